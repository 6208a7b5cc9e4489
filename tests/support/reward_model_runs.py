"""Short runs that train a tiny reward model in this process, and what `transformers` makes of the result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.config import RewardTrainingConfig, load
from forge.loops.reward_model import RewardModelResult, run_reward_model

ROOT = Path(__file__).resolve().parents[2]
LAST = 30
WORDS = ("red", "blue", "green", "old", "new", "long")


def pairs(num: int, *, offset: int = 0) -> Iterator[dict[str, Any]]:
    """Answers that name the colour of the question are preferred; every seventh record has a margin."""
    for number in range(offset, offset + num):
        right, wrong = WORDS[number % 6], WORDS[(number + 1 + number // 6 % 5) % 6]
        record: dict[str, Any] = {"prompt": f"Which word is it: {right}? ({number})"}
        record |= {"chosen": f"It is {right}.", "rejected": f"It is {wrong}, and that is all."}
        yield record | ({"margin": 0.5} if number % 7 == 0 else {})


def write(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@contextmanager
def as_rank() -> Iterator[None]:
    """Let this process be the only rank of a run."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "test"}.items():
            patch.setenv(name, value)
        yield


def config(folder: Path, *overrides: str) -> RewardTrainingConfig:
    base = [
        *("model.preset=tiny", "model.num_layers=1", f"run.output_dir={folder}", "run.name=rm"),
        f"data.sources=[{{path: {folder.parent}/pairs.jsonl}}]",
        f"validation.sources=[{{path: {folder.parent}/held.jsonl}}]",
        *("reward_model.centering_coefficient=0.01", "training.batch_size=8", f"training.max_steps={LAST}"),
        *("training.max_seq_len=128", "training.learning_rate=2e-3", "training.num_epochs=9"),
        *("training.microbatch_tokens=512", "validation.interval=10", "metrics.tensorboard=false"),
        "checkpointing.save_interval=10",
    ]
    return load(RewardTrainingConfig, overrides=[*base, *overrides])


def train(chosen: RewardTrainingConfig) -> RewardModelResult:
    with as_rank():
        return asyncio.run(run_reward_model(chosen))


def write_pairs(folder: Path) -> Path:
    """Write the pairs to learn from, and the held-out ones, into a folder."""
    write(folder / "pairs.jsonl", pairs(120))
    write(folder / "held.jsonl", pairs(42, offset=120))
    return folder


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def hf_rewards(folder: Path, conversations: list[Any]) -> list[float]:
    """What `transformers` makes of conversations or texts, one at a time."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for each in conversations:
        if isinstance(each, str):
            ids = tokenizer(each)["input_ids"]
        else:
            text = tokenizer.apply_chat_template(each, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            found.append(float(model(input_ids=torch.tensor([ids])).logits[0, 0]))
    return found


def conversation(record: dict[str, Any], side: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record[side]}]
