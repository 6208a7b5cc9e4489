"""The step log: what `forge replay` reads, in `replay/` of a run's folder.

    session_000000.json   what all steps after step 0 have in common, until the run is resumed
    step_000007.bin       the record of step 7: see `step_record`

A file appears whole or not at all. Steps are encoded and written by a thread, so that a step of the run does not wait
for them, unless three are waiting already. A run that resumes after step c removes the records of later steps: they
come again.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from forge.config import ReplayRecordConfig
from forge.errors import ReplayError
from forge.rollout.ledger import recording
from forge.rollout.step_record import (
    LearnedBatch,
    StepRecord,
    batch_digest,
    decode_step,
    encode_step,
    logprobs_digest,
    outcome_of,
)
from forge.types import Group, StepResult

FOLDER: Final = "replay"
FORMAT: Final = 1
_STEP: Final = re.compile(r"step_(\d+)\.bin")
_SESSION: Final = re.compile(r"session_(\d+)\.json")
_MOST_WAITING: Final = 3


def step_path(folder: Path, step: int) -> Path:
    """Return the file of a step's record."""
    return folder / f"step_{step:06d}.bin"


def recorded_steps(folder: Path) -> dict[int, Path]:
    """Return the files of all recorded steps, in order."""
    return _numbered(folder, _STEP)


def read_sessions(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Return the sessions of a run by the step that each starts after, in order."""
    return {start: _read_session(path) for start, path in _numbered(folder, _SESSION).items()}


def read_step(folder: Path, step: int) -> StepRecord:
    """Return the record of a step. Raise `ReplayError` where it is damaged."""
    path = step_path(folder, step)
    record = decode_step(path.read_bytes(), path=path)
    if record.step != step:
        raise ReplayError(
            "the record of a step is that of another step",
            path=str(path),
            value=record.step,
            rule=f"the record of step {step}",
            repair="restore the file",
        )
    return record


def _read_session(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReplayError(
            f"the record of a session cannot be read: {error}",
            path=str(path),
            rule=f"JSON of format {FORMAT}, as a run writes it",
            repair="restore the file, or replay with the release that wrote it",
        ) from error
    return dict(found)


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    names = os.listdir(folder) if folder.is_dir() else []
    found = [(int(match[1]), folder / name) for name in names if (match := pattern.fullmatch(name)) is not None]
    return dict(sorted(found))


class StepLog:
    """Writes the step log of a run.

    Args:
        folder: where it is; made where needed.
        config: how much of it is kept.
        kept_checkpoints: returns the steps of the checkpoints that there are. Records of steps before the oldest are
            removed once an earlier checkpoint is.
        resume_step: the step that the run resumes after; None for a new run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: ReplayRecordConfig,
        kept_checkpoints: Callable[[], Iterable[int]],
        resume_step: int | None,
    ) -> None:
        self.folder, self._config, self._kept_checkpoints = folder, config, kept_checkpoints
        self._start = resume_step or 0
        self._seen_checkpoints: set[int] = set()
        self._waiting: deque[tuple[Path, Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forge-step-log")
        with recording(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for part in folder.glob(".*.part"):
                part.unlink()  # of a process that was killed while it wrote
            after = -1 if resume_step is None else resume_step
            late = [path for step, path in recorded_steps(folder).items() if step > after]
            late += [path for start, path in _numbered(folder, _SESSION).items() if start >= max(after, 0)]
            for path in late:
                path.unlink()
            self._sizes = {step: path.stat().st_size for step, path in recorded_steps(folder).items()}

    def begin(self, session: Mapping[str, Any]) -> None:
        """Write what the steps of this session have in common."""
        document = {"format": FORMAT, "start_step": self._start, **session}
        path = self.folder / f"session_{self._start:06d}.json"
        with recording(path):
            _replace(path, json.dumps(document, ensure_ascii=False, indent=1).encode())

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        *,
        learned: LearnedBatch,
        result: StepResult,
        weights: str | None,
    ) -> None:
        """Record a step. Returns before it is written; an error is raised by a later call."""
        while self._waiting and (len(self._waiting) >= _MOST_WAITING or self._waiting[0][1].done()):
            self._wait_oldest()
        path = step_path(self.folder, step)

        def work() -> None:
            logprobs = logprobs_digest(result.logprobs)
            found = StepRecord(
                step,
                tuple(groups),
                batch_digest(learned.batch),
                outcome_of(result),
                logprobs=logprobs,
                weights=weights,
                learning_rate=learned.learning_rate,
                critic=learned.critic,
            )
            data = encode_step(found)
            _replace(path, data)
            self._sizes[step] = len(data)
            self._prune()

        self._waiting.append((path, self._thread.submit(work)))

    def flush(self) -> None:
        """Wait until all steps are written: before the checkpoint that stands on them."""
        while self._waiting:
            self._wait_oldest()

    def close(self) -> None:
        """Write what is waiting, and end the thread."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def _wait_oldest(self) -> None:
        path, written = self._waiting.popleft()
        with recording(path):
            written.result()

    def _prune(self) -> None:
        newest, first = max(self._sizes), 0
        if self._config.keep_steps is not None:
            first = newest - self._config.keep_steps + 1
        kept = set(self._kept_checkpoints())
        self._seen_checkpoints |= kept
        if kept and self._seen_checkpoints - kept:
            first = max(first, min(kept) + 1)
        left = self._config.max_gb * 1e9
        for step in sorted(self._sizes, reverse=True):
            left -= self._sizes[step]
            if step < first or (left < 0 and step != newest):
                first = max(first, step + 1)
        for step in [step for step in self._sizes if step < first]:
            step_path(self.folder, step).unlink(missing_ok=True)
            del self._sizes[step]
        starts = sorted(_numbered(self.folder, _SESSION))
        for start, following in itertools.pairwise(starts):
            if following < first:  # all of its steps are gone
                (self.folder / f"session_{start:06d}.json").unlink(missing_ok=True)


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
