"""The record of one step: the groups that it learned from, and digests of what it computed. One file.

    FORGESTEP1\\n | length of the head | head (JSON, zlib) | columns (zlib) | BLAKE2b of all before

The head has everything but the columns of numbers: see `group_codec`. The bytes of a column are stored plane by plane,
the lowest byte of every element first, which compresses better.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from forge.errors import ReplayError
from forge.rollout.group_codec import Altered, Column, altered_quantities, decode_groups, encode_groups
from forge.types import Batch, Group, StepResult

if TYPE_CHECKING:
    from torch import Tensor

MAGIC: Final = b"FORGESTEP1\n"
_DIGEST_BYTES: Final = 16
_LEVEL: Final = 1
_NOT_COMPARED: Final = ("memory_gib",)
"""Metrics of a step that do not depend on what is computed alone."""


@dataclass(frozen=True, slots=True)
class CriticRecord:
    """What a run recorded of its critic in one step.

    Attributes:
        values: the digest of the values that it gave the groups before it learned from them.
        outcome: the metrics of its own steps, by name.
        learning_rate: the highest rate of its schedule, where it was changed while the run ran; None for that of the
            configuration.
    """

    values: str
    outcome: Mapping[str, float]
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class LearnedBatch:
    """What one step learned from.

    Attributes:
        batch: what the policy's trainer got.
        learning_rate: the highest rate of the schedule, where it was changed while the run ran; None for that of the
            configuration.
        critic: what the critic did in this step; None without one.
    """

    batch: Batch
    learning_rate: float | None = None
    critic: CriticRecord | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a run recorded of one step.

    Attributes:
        step: its number; also the version of the weights after it.
        groups: what it learned from, in the order of the batch, with advantages.
        batch: the digest of the batch that they made.
        outcome: what the trainer reported, by name: loss, grad_norm, learning_rate and the metrics of the loss.
        logprobs: the digest of the trainer's logprobs before the step; None where they were not kept.
        weights: the digest of the weights that were published after it; None where none were.
        learning_rate: the highest rate of the schedule in this step, where it was changed while the run ran; None for
            that of the configuration.
        critic: what the critic did in this step; None without one.
        altered: what does not have the digest that it was written with.
        num_bytes: the size of the file.
    """

    step: int
    groups: tuple[Group, ...]
    batch: str
    outcome: Mapping[str, Any]
    logprobs: str | None = None
    weights: str | None = None
    learning_rate: float | None = None
    critic: CriticRecord | None = None
    altered: tuple[Altered, ...] = field(default=(), compare=False)
    num_bytes: int = field(default=0, compare=False)

    @property
    def num_tokens(self) -> int:
        """Tokens that the trainer read: prompts, and what was sampled."""
        return int(self.outcome["num_tokens"])

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled."""
        return sum(group.num_tokens for group in self.groups)


def outcome_of(result: StepResult) -> dict[str, Any]:
    """Return what is recorded and compared of a step's result."""
    names = ("loss", "grad_norm", "learning_rate", "num_tokens", "num_loss_tokens", "skipped")
    metrics = {name: value for name, value in result.metrics.items() if name not in _NOT_COMPARED}
    return {name: getattr(result, name) for name in names} | {
        f"metrics.{name}": value if isinstance(value, str | bool | int) else float(value)
        for name, value in sorted(metrics.items())
    }


def batch_digest(batch: Batch) -> str:
    """Return a digest of all that a trainer gets of a batch."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    found.update(repr((batch.lengths, batch.sequences)).encode())
    if batch.temperatures:
        found.update(repr(batch.temperatures).encode())
    tensors = {"token_ids": batch.token_ids, "loss_weights": batch.loss_weights, **batch.fields}
    for name, tensor in sorted(tensors.items()):
        array = tensor.detach().cpu().contiguous().numpy()
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array)
    return found.hexdigest()


def logprobs_digest(logprobs: Sequence[Tensor] | None) -> str | None:
    """Return a digest of the trainer's logprobs of every sample; None without them."""
    if logprobs is None:
        return None
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for each in logprobs:
        found.update(each.detach().cpu().contiguous().numpy())
    return found.hexdigest()


def values_digest(groups: Sequence[Group]) -> str:
    """Return a digest of a critic's values of groups."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for episode in (episode for group in groups for episode in group.episodes):
        found.update(np.array(episode.values or (), dtype=np.float64).tobytes())
        found.update(np.array(sorted(episode.end_values.items()), dtype=np.float64).tobytes())
    return found.hexdigest()


# ---- The file -------------------------------------------------------------------------------------------------------


def encode_step(record: StepRecord) -> bytes:
    """Return a record as the bytes of its file."""
    documents, columns = encode_groups(record.groups)
    head = {
        "step": record.step,
        "batch": record.batch,
        "outcome": dict(record.outcome),
        "logprobs": record.logprobs,
        "weights": record.weights,
        **({} if record.learning_rate is None else {"learning_rate": record.learning_rate}),
        **({} if record.critic is None else {"critic": asdict(record.critic)}),
        "groups": documents,
    }
    return pack(head, columns)


def decode_step(data: bytes, *, path: Path) -> StepRecord:
    """Return the record that a file holds. Raise `ReplayError` for one that is cut off or has other bytes."""
    head, columns = unpack(data, path=path)
    groups = decode_groups(head["groups"], columns)
    return StepRecord(
        step=head["step"],
        groups=tuple(groups),
        batch=head["batch"],
        outcome=head["outcome"],
        logprobs=head["logprobs"],
        weights=head["weights"],
        learning_rate=head.get("learning_rate"),
        critic=CriticRecord(**head["critic"]) if "critic" in head else None,
        altered=tuple(altered_quantities(groups, head["groups"])),
        num_bytes=len(data),
    )


def pack(head: Mapping[str, Any], columns: Mapping[str, Column]) -> bytes:
    """Return a document and columns as the bytes of a file."""
    blocks = {name: zlib.compress(_planes(column), _LEVEL) for name, column in columns.items()}
    forms = [[name, columns[name].dtype.str, len(columns[name]), len(blocks[name])] for name in blocks]
    text = json.dumps({**head, "columns": forms}, ensure_ascii=False, default=_plain).encode("utf-8", "surrogatepass")
    packed = zlib.compress(text, _LEVEL)
    body = b"".join([MAGIC, struct.pack("<Q", len(packed)), packed, *blocks.values()])
    return body + _digest(body)


def unpack(data: bytes, *, path: Path) -> tuple[dict[str, Any], dict[str, Column]]:
    """Return the document and the columns of a file. Raise `ReplayError` where its bytes are not those written."""
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if not data.startswith(MAGIC) or _digest(body) != digest:
        raise ReplayError(
            "the record of a step is damaged",
            path=str(path),
            value=f"{len(data)} bytes",
            rule="the bytes that the run wrote, with their digest at the end",
            repair="restore the file; steps from a later checkpoint on can still be replayed",
        )
    start = len(MAGIC) + 8
    (size,) = struct.unpack("<Q", body[len(MAGIC) : start])
    head = json.loads(zlib.decompress(body[start : start + size]))
    place, columns = start + size, dict[str, Column]()
    for name, kind, count, length in head.pop("columns"):
        columns[name] = _from_planes(zlib.decompress(body[place : place + length]), np.dtype(kind), count)
        place += length
    return head, columns


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _planes(column: Column) -> bytes:
    return column.view(np.uint8).reshape(len(column), column.dtype.itemsize).T.tobytes()


def _from_planes(data: bytes, kind: np.dtype[Any], count: int) -> Column:
    planes = np.frombuffer(data, dtype=np.uint8).reshape(kind.itemsize, count)
    return np.ascontiguousarray(planes.T).view(kind).reshape(count)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if hasattr(value, "item") else str(value)


def same_number(one: object, other: object) -> bool:
    """Return whether two recorded values are equal; NaN equals NaN."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return one == other
