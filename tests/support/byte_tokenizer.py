"""A tokenizer that a reader can check by hand: one token per byte, and four special ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.config import DataConfig, TrainingConfig
from forge.data import BatchLoader, open_loaders
from forge.types import Batch

EOS, START, TURN, END = 256, 257, 258, 259


class ByteTokenizer:
    """Each message is START, its role, TURN, its content, END; the assistant says its content and its END."""

    eos_token_id: int | None = EOS

    def __init__(self) -> None:
        self.num_calls = 0

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        self.num_calls += 1
        token_ids: list[int] = []
        said: list[bool] = []
        for message in messages:
            header = [START, *message["role"].encode(), TURN]
            body = [*message["content"].encode(), END]
            token_ids += header + body
            said += [False] * len(header) + [message["role"] == "assistant"] * len(body)
        return token_ids, said

    def encode_text(self, text: str) -> list[int]:
        self.num_calls += 1
        return [*text.encode(), EOS]


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_texts(path: Path, count: int, *, prefix: str = "", longest: int = 23) -> Path:
    """Records of text of many lengths, all different."""
    return write_lines(path, [{"text": f"{prefix}{number}" + "x" * (number * 7 % longest)} for number in range(count)])


def open_train(data: Mapping[str, Any], *, seed: int = 0, read_ahead: int = 0, **training: Any) -> BatchLoader:
    """A training loader of a configuration written as a dictionary."""
    return open_loaders(
        DataConfig.model_validate(data),
        training=TrainingConfig.model_validate(training),
        tokenizer=ByteTokenizer(),
        seed=seed,
        read_ahead=read_ahead,
    ).train


def content(batch: Batch) -> tuple[Any, ...]:
    """A batch as plain values, which compare."""
    return batch.token_ids.tolist(), batch.loss_weights.tolist(), batch.lengths, batch.identities


def names(batch: Batch) -> list[str]:
    """The identities without folders."""
    return [Path(identity).name for identity in batch.identities]
