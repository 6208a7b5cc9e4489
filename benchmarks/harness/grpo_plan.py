"""What `grpo.py` trains, for how long, the files that both sides read, and the reward that both sides call.

Only the standard library is imported at the top: this file also runs in TRL's environment.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

SHAPE_5M = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_layers": 5,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "max_seq_len": 512,
}
SHAPE_30M = {
    "vocab_size": 32768,
    "hidden_size": 384,
    "num_layers": 10,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1152,
    "max_seq_len": 512,
}
SHAPE_QUICK = {"num_layers": 2}


@dataclass(frozen=True)
class Plan:
    """What is trained, and for how long.

    Attributes:
        shape: facts of the model that differ from the tiny one's.
        num_prompts, group_size: prompts of a step, and completions of each.
        max_tokens: new tokens of a completion; exactly so many where only speed is measured, else at most.
        max_seq_len: tokens of prompt and completion together, at most.
        learning_rate: AdamW's, constant.
        num_rounds: windows of each side; `num_warm` windows before them are not counted.
        window: steps of a window.
        goal: the part of held-out questions answered rightly at which a side is done; None to measure speed alone.
        sft_steps: steps in which the model is shown how an answer is written before anything is measured; 0 for none.
        seed: of everything that is drawn while it is trained; `num_seeds` runs to the goal, from seed 0 on.
        settings: further settings of our sides.
    """

    shape: Mapping[str, Any]
    num_prompts: int = 8
    group_size: int = 8
    max_tokens: int = 32
    max_seq_len: int = 96
    learning_rate: float = 5e-4
    num_rounds: int = 6
    num_warm: int = 1
    window: int = 8
    goal: float | None = None
    sft_steps: int = 100
    seed: int = 0
    num_seeds: int = 1
    settings: tuple[str, ...] = ()

    @property
    def samples_per_step(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def is_fixed_length(self) -> bool:
        """Whether every completion has `max_tokens` tokens, so that all sides do the same work."""
        return self.goal is None


# ---- The reward


def is_right(text: str, answer: str) -> float:
    """1 if the first answer that the text gives is the right one, else 0."""
    found = re.search(r"The answer is (\d+)\.", text)
    return float(found is not None and found[1] == answer)


def reward(prompt: Any, completion: Any) -> float:
    """`is_right` as our rewards are called: `harness.grpo_plan:reward`."""
    return is_right(completion.text, prompt.answer)


# ---- The files


def prepare(folder: Path, plan: Plan, *, start: Path | None = None) -> dict[str, Any]:
    """Write the task and the model that all sides begin with, and say what they are.

    `start` is a folder with such a model from an earlier run. Otherwise one is made, and taught the form of an answer.
    """
    from forge.models.tiny import make_tiny, tensor_shapes

    task = _digits().write_task(folder / "task", seed=0)
    facts = make_tiny(folder / "untaught", **plan.shape)
    if start is not None:
        shutil.copytree(start, folder / "model")
    elif plan.sft_steps:
        teach(folder, num_steps=plan.sft_steps)
    else:
        shutil.copytree(folder / "untaught", folder / "model")
    return {
        "parameters": sum(math.prod(shape) for _, shape in tensor_shapes(facts)),
        "num_train": _num_lines(task / "prompts.jsonl"),
        "num_heldout": _num_lines(task / "heldout.jsonl"),
    }


def _digits() -> Any:
    """The quick start's task."""
    spec = importlib.util.spec_from_file_location("digits", ROOT / "apps" / "quickstart" / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def teach(folder: Path, *, num_steps: int) -> None:
    """Train the model in `untaught` on the task's demonstrations, which show the form of answers, into `model`."""
    from forge.config import SFTConfig, load
    from forge.loops.sft import run_sft

    settings = [
        f"run.output_dir={folder / 'taught'}",
        f"model.path={folder / 'untaught'}",
        f"data.sources=[{{path: {folder / 'task' / 'demonstrations.jsonl'}}}]",
        "training.batch_size=3",
        "training.max_seq_len=512",
        f"training.max_steps={num_steps}",
        "training.learning_rate=1e-3",
        "distributed.num_threads=1",
        "distributed.with_gpus=false",
        "checkpointing.save_interval=null",
    ]
    result = asyncio.run(run_sft(load(SFTConfig, overrides=settings)))
    assert result.export is not None
    shutil.copytree(result.export, folder / "model")


def read_questions(path: Path) -> list[dict[str, str]]:
    """Records `{"prompt", "answer"}`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
