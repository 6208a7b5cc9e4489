"""Hugging Face datasets as sources: a folder that `datasets` saved, and one that `load_dataset` takes by path.

They run in a process of their own, because `datasets` decides at its import where its cache is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = '''
import json, sys
import datasets
import torch
from tokenizers import Tokenizer as Model, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from forge.config import DataConfig, TrainingConfig
from forge.data import open_loaders
from forge.errors import DataError

torch.set_num_threads(1)
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)

class Chat:
    """A real tokenizer of `transformers`, over single characters."""

    def __init__(self):
        letters = [chr(code) for code in range(32, 127)]
        vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", "<unk>", *letters])}
        model = Model(models.WordLevel(vocabulary, unk_token="<unk>"))
        model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        self.inner = PreTrainedTokenizerFast(
            tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
        )
        self.eos_token_id = self.inner.eos_token_id

    def encode_chat(self, messages):
        found = self.inner.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return found["input_ids"], [bool(mark) for mark in found["assistant_masks"]]

    def encode_text(self, text):
        return [*self.inner.encode(text, add_special_tokens=False), self.eos_token_id]

chat = Chat()

def open_train(data):
    return open_loaders(
        DataConfig.model_validate(data), training=TrainingConfig(batch_size=3, num_epochs=2, max_seq_len=64),
        tokenizer=chat, seed=0,
    ).train

def content(batch):
    return batch.token_ids.tolist(), batch.loss_weights.tolist(), list(batch.identities)

def learnt(tokens, weights):
    return "".join(chat.inner.convert_ids_to_tokens([t for t, w in zip(tokens, weights) if w]))

def examine(data):
    try:
        with open_train(data) as loader:
            whole = [content(batch) for batch in loader]
        with open_train(data) as loader:
            first = [content(next(loader)), content(next(loader))]
            state = json.loads(json.dumps(loader.state_dict()))
        with open_train(data) as loader:
            loader.load_state_dict(state)
            rest = [content(batch) for batch in loader]
    except DataError as error:
        return {"error": error.message, "path": error.path, "rule": error.rule}
    return {
        "same": first + rest == whole,
        "formats": loader.formats,
        "learnt": [learnt(tokens, weights) for tokens, weights, _ in whole],
        "places": [place for _, _, identities in whole for place in identities],
    }

rows, folder, cases = json.loads(sys.argv[1])
train = datasets.Dataset.from_list(rows)
train.save_to_disk(folder + "/one")
datasets.DatasetDict({"train": train, "test": train.select(range(2))}).save_to_disk(folder + "/splits")
print(json.dumps({name: examine(data) for name, data in cases.items()}))
'''

ROWS = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a" * (1 + n % 5)}]}
    for n in range(17)
]
KINDS = ("one", "splits", "hub")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    (folder / "hub").mkdir()
    (folder / "hub" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """What the program found for each case; all run in one process, because its imports take long."""

    def case(*, streaming: bool = False, **source: Any) -> dict[str, Any]:
        return {"sources": [source], "streaming": streaming, "shuffle_buffer": 6, "pack_lookahead": 4}

    cases = {
        f"{kind} {streaming}": case(
            streaming=streaming, **{"hf_dataset" if kind == "hub" else "path": str(folder / kind)}
        )
        for kind in KINDS
        for streaming in (False, True)
    }
    cases["no split"] = case(path=str(folder / "splits"), split="validation")
    cases["no dataset"] = case(hf_dataset="nobody/nothing")
    env = {
        **os.environ,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps([ROWS, str(folder), cases])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_is_read_whole_and_resumed_exactly(
    found: dict[str, Any], folder: Path, kind: str, streaming: bool
) -> None:
    case = found[f"{kind} {streaming}"]
    assert "error" not in case, case
    assert case["same"]
    assert case["formats"] == ["messages"]
    assert sorted(case["places"]) == sorted(2 * [f"{folder / kind}:{row}" for row in range(17)])
    answers = "".join(case["learnt"]).split("</s>")
    assert sorted(answers) == sorted(["", *(2 * [row["messages"][1]["content"] for row in ROWS])])


def test_a_split_or_dataset_that_is_not_there_is_refused(found: dict[str, Any]) -> None:
    assert "has no split 'validation'" in found["no split"]["error"]
    assert found["no split"]["rule"] == "the split is one of test, train"
    assert "the dataset nobody/nothing cannot be loaded" in found["no dataset"]["error"]
    assert found["no dataset"]["path"] == "nobody/nothing"
