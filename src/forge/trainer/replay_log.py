"""What a trainer was asked to do since its last checkpoints, so that another process can be brought to the same state.

A trainer is deterministic: a checkpoint and the batches since then, in the same order, give the same weights, optimizer
state and random state, bit for bit. The log holds those batches, and the checkpoints that were asked for in between.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forge.trainer.checkpoint_folder import RECORD_NAME, CheckpointInfo, read_checkpoint, readable_checkpoints
from forge.types import Batch, StepResult

SAVE_ID: Final = "save_id"
"""The key, in what a loop stores with a checkpoint, that says which save made it."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """An optimizer step: its batch, what it found, and the highest rate of the schedule where that was changed."""

    batch: Batch
    found: tuple[int, str, str]
    learning_rate: float | None = None

    @classmethod
    def of(cls, batch: Batch, result: StepResult, *, learning_rate: float | None = None) -> LoggedStep:
        return cls(batch, fingerprint(result), learning_rate)


def fingerprint(result: StepResult) -> tuple[int, str, str]:
    """Return what shows that two steps started from the same weights and did the same. NaN equals NaN."""
    return result.step, repr(result.loss), repr(result.grad_norm)


@dataclass(frozen=True, slots=True)
class LoggedSave:
    """A checkpoint that was asked for. It may be complete, on its way, or lost with the process that wrote it."""

    arguments: Mapping[str, Any]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def parts(self) -> Mapping[str, Path]:
        """The checkpoints of other models that it takes; none if they are not there any more."""
        return self.arguments.get("parts") or {}


class ReplayLog:
    """Steps and saves of one trainer, oldest first."""

    def __init__(self) -> None:
        self._entries: list[LoggedStep | LoggedSave] = []
        self.reaches_back = True
        """Whether it holds everything since the start, or since the checkpoint that the run was resumed from."""

    def add_step(self, batch: Batch, result: StepResult, *, learning_rate: float | None = None) -> None:
        self._entries.append(LoggedStep.of(batch, result, learning_rate=learning_rate))

    def add_save(self, save: LoggedSave) -> None:
        """Add a save that was begun. There is one on its way at most, so the one before it is complete: whatever
        precedes that one is dropped."""
        places = [place for place, entry in enumerate(self._entries) if isinstance(entry, LoggedSave)]
        if places and places[-1] > 0:
            del self._entries[: places[-1]]
            self.reaches_back = False
        self._entries.append(save)

    def since(self, complete: Collection[str]) -> tuple[LoggedSave | None, Sequence[LoggedStep | LoggedSave]]:
        """Return the last save that is complete, None if there is none, and what was asked for after it."""
        for place in reversed(range(len(self._entries))):
            entry = self._entries[place]
            if isinstance(entry, LoggedSave) and entry.id in complete:
                return entry, self._entries[place + 1 :]
        return None, list(self._entries)

    @property
    def num_bytes_unsaved(self) -> int:
        """The memory of the batches since the last save."""
        unsaved: dict[int, Batch] = {}
        for entry in reversed(self._entries):
            if isinstance(entry, LoggedSave):
                break
            unsaved[id(entry.batch)] = entry.batch  # several steps may be taken on one batch
        return sum(_num_bytes(batch) for batch in unsaved.values())


def _num_bytes(batch: Batch) -> int:
    return sum(each.nbytes for each in (batch.token_ids, batch.loss_weights, *batch.fields.values()))


def complete_saves(folder: Path, *, part: str | None = None) -> dict[str, Path]:
    """Return the complete checkpoints of a folder by the id of the save that made them.

    With `part` they are those of another model: in the folder of that name, or parts of the checkpoints of this one.
    """
    found = readable_checkpoints(folder)
    if part is not None:
        inside = [read_checkpoint(each.path / part) for each in found if (each.path / part / RECORD_NAME).is_file()]
        found = [*inside, *readable_checkpoints(folder / part)]
    return {made_by: info.path for info in found if (made_by := _save_id(info)) is not None}


def _save_id(info: CheckpointInfo) -> str | None:
    caller = info.extra.get("caller")
    made_by = caller.get(SAVE_ID) if isinstance(caller, Mapping) else None
    return made_by if isinstance(made_by, str) else None
