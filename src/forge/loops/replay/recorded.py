"""What a run's folder holds for a replay: sessions, records of steps, and the checkpoints to start from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from forge.config.loading import FILE_NAME
from forge.config.yaml_text import read_yaml
from forge.errors import ReplayError
from forge.loops.replay.session import Session
from forge.rollout.ledger import read_ledger
from forge.rollout.record import spread
from forge.rollout.step_log import FOLDER, read_sessions, read_step, recorded_steps
from forge.rollout.step_record import StepRecord
from forge.trainer.checkpoint_folder import CheckpointInfo, read_checkpoint, readable_checkpoints

_MOST_READ: Final = 16
"""Records that are read to find out how many bytes a token takes."""


@dataclass(frozen=True, slots=True)
class Start:
    """A state of the trainer that steps can be replayed from.

    Attributes:
        step: the steps that were taken by then.
        checkpoint: the checkpoint; None for the model's own weights.
        weights: the digest of its weights as the run published them; None where it is not known.
    """

    step: int
    checkpoint: CheckpointInfo | None
    weights: str | None

    def __str__(self) -> str:
        return "the initial weights" if self.checkpoint is None else f"the checkpoint of step {self.step}"

    @property
    def extra(self) -> Mapping[str, Any]:
        """What the loop stored with the checkpoint."""
        caller: Mapping[str, Any] = {} if self.checkpoint is None else self.checkpoint.extra.get("caller", {})
        return caller


class RecordedRun:
    """A run's folder, as a replay sees it. Nothing in it is changed; the run may still be running."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.log = self.folder / FOLDER
        document = _read_config(self.folder)
        sessions = read_sessions(self.log)
        self.steps = recorded_steps(self.log)
        if not sessions or not self.steps:
            raise _not_recorded(self.folder, document)
        self.sessions = {start: Session.read(each, path=self.log) for start, each in sessions.items()}
        given = document.get("checkpointing", {}).get("output_dir")
        self.checkpoint_dir = Path(given) if given else self.folder / "checkpoints"

    def session_of(self, step: int) -> Session:
        """Return the session that took a step."""
        return self.sessions[max((start for start in self.sessions if start < step), default=min(self.sessions))]

    def read(self, step: int) -> StepRecord:
        """Return the record of a step. Raise `ReplayError` where it is damaged."""
        return read_step(self.log, step)

    @cached_property
    def starts(self) -> dict[int, Start]:
        """The states to start from, by step."""
        found: dict[int, Start] = {}
        for start, session in self.sessions.items():
            if session.checkpoint is None:
                found[start] = Start(start, None, session.weights)
            elif (session.checkpoint / "checkpoint.json").is_file():
                found[start] = Start(start, read_checkpoint(session.checkpoint), session.weights)
        for info in readable_checkpoints(self.checkpoint_dir):
            caller = info.extra.get("caller", {})
            if "buffer" in caller and self._is_of_this_run(int(caller["step"]), caller.get("weights")):
                weights = caller.get("weights") or self.weights_after(int(caller["step"]))
                found[int(caller["step"])] = Start(int(caller["step"]), info, weights)
        return dict(sorted(found.items()))

    def _is_of_this_run(self, step: int, weights: str | None) -> bool:
        """Return whether a checkpoint is of the steps that are recorded: one that a run left behind when it went back
        to an earlier checkpoint is not."""
        known = self.weights_after(step)
        return known is None or weights is None or known == weights

    def weights_after(self, step: int) -> str | None:
        """Return the digest of the weights that were published after a step; None where it is not known."""
        if step in self.sessions:
            return self.sessions[step].weights
        try:
            return self.read(step).weights if step in self.steps else None
        except ReplayError:
            return None

    def start_of(self, step: int) -> Start | None:
        """Return the nearest earlier state from which every step up to this one is recorded; None if there is none."""
        first = step
        while first - 1 in self.steps and first - 1 not in self.starts:
            first -= 1
        if step not in self.steps or first - 1 not in self.starts:
            return None
        start = self.starts[first - 1]
        session = self.session_of(step)
        if start.step < session.start_step and not self.session_of(start.step + 1).trains_like(session):
            return None  # the checkpoint of the resume that changed the configuration is gone
        return start

    @cached_property
    def window(self) -> tuple[int, ...]:
        """The steps that can be replayed."""
        return tuple(step for step in self.steps if self.start_of(step) is not None)

    def describe_window(self) -> str:
        """Return the steps that can be replayed, in words."""
        if not self.window:
            return "none: every checkpoint that their records follow is gone"
        parts = [f"{first} to {last}" if first < last else str(first) for first, last in _runs(self.window)]
        return f"steps {', '.join(parts)}" if len(self.window) > 1 else f"step {parts[0]}"

    def find_start(self, step: int) -> Start:
        """Return the state that a step is replayed from. Raise `ReplayError` for a step outside the window."""
        found = self.start_of(step)
        if found is None:
            raise ReplayError(
                "this step cannot be replayed" if step in self.steps else "this step is not recorded",
                path="--step",
                value=step,
                rule=f"{self.describe_window()} of {self.folder} can be replayed",
                repair="choose one of them; a run keeps more with a larger checkpointing.keep, record.replay.max_gb or "
                "record.replay.keep_steps",
            )
        return found

    def find_group(self, number: int) -> StepRecord:
        """Return the record of the step that learned from a group. Raise `ReplayError` where there is none."""
        lines = read_ledger(self.folder / "ledger.jsonl") if (self.folder / "ledger.jsonl").is_file() else ()
        line = next((each for each in lines if each.group == number), None)
        if line is not None and line.outcome == "trained" and line.step in self.steps:
            return self.read(line.step)
        outcome = "it was never finished" if line is None else f"outcome {line.outcome}, step {line.step}"
        raise ReplayError(
            "this group is not recorded",
            path="--group",
            value=number,
            rule=f"a group that a recorded step learned from ({self.describe_window()}); {outcome}",
            repair="take a number from ledger.jsonl whose step is recorded",
        )


def log_size(recorded: RecordedRun) -> dict[str, float]:
    """Return how large the record of a run's steps is: in all, for each step, and for each token of their batches."""
    num_bytes = sum(path.stat().st_size for path in recorded.steps.values())
    records = [recorded.read(step) for step in spread(list(recorded.steps), _MOST_READ)]
    num_read = sum(record.num_bytes for record in records)
    return {
        "num_steps": len(recorded.steps),
        "num_bytes": num_bytes,
        "bytes_per_step": num_bytes / len(recorded.steps),
        "bytes_per_token": num_read / max(1, sum(record.num_tokens for record in records)),
    }


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / FILE_NAME
    if not path.is_file():
        raise ReplayError(
            "this is not the folder of a run",
            path="RUN",
            value=str(folder),
            rule=f"a folder with the {FILE_NAME} that a run writes",
            repair="name the folder run.output_dir/run.name of a run",
        )
    document = read_yaml(path.read_text(encoding="utf-8"), source=str(path)).data
    return document if isinstance(document, Mapping) else {}


def _not_recorded(folder: Path, document: Mapping[str, Any]) -> ReplayError:
    record = document.get("record", {})
    value: object
    if "algorithm" not in document:
        value, rule = "no section algorithm", "a run of reinforcement learning: only those can be replayed"
        repair = "there is none: other runs are not recorded"
    else:
        value = {"record.replay": record.get("replay") if isinstance(record, Mapping) else None}
        rule = f"at least one step in {folder / FOLDER}"
        repair = "run with record.replay.enabled: true"
    return ReplayError("the run has no record of its steps", path=str(folder), value=value, rule=rule, repair=repair)


def _runs(numbers: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of each run of consecutive numbers."""
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in group]
        yield found[0], found[-1]
