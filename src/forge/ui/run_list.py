"""Finds the runs in a folder and in the folders below it, and keeps a summary of each."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from forge.observe.report.reading import EVAL_RESULTS, EVAL_SAMPLES
from forge.trainer.checkpoint_folder import LOCK_NAME
from forge.ui.run_files import CONFIG, METRICS
from forge.ui.run_summary import RunSummary, SummaryReader

MAX_DEPTH: Final = 8
MAX_RUNS: Final = 20_000
_MAX_FOLDERS: Final = 200_000
_SIGNS: Final = frozenset((METRICS, EVAL_RESULTS, EVAL_SAMPLES))
_INSIDE: Final = frozenset(
    (
        *("checkpoints", "rollouts", "replay", "journals", "crashes", "profiles", "tensorboard", "wandb"),
        *("node_modules", "__pycache__"),
    )
)
"""Folders that hold what runs write, and never a run."""


class RunList:
    """The runs below a folder, by their path relative to it. Links to folders are not followed.

    A name that a client sends is only ever looked up here: no path is made of it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._readers: dict[str, SummaryReader] = {}
        self._summaries: dict[str, RunSummary] = {}
        self.is_complete = False
        """Whether all runs that were found have a summary."""
        self.is_cut = False
        """Whether there are more runs than `MAX_RUNS`."""

    def scan(self) -> None:
        """Look for runs that came or went. Takes as long as the file system needs to list the folders."""
        found: dict[str, SummaryReader] = {}
        self.is_cut = False
        for folder in find_runs(self.root):
            if len(found) >= MAX_RUNS:
                self.is_cut = True
                break
            name = _name(folder.relative_to(self.root))
            found[name] = self._readers.get(name) or SummaryReader(folder, name)
        with self._lock:
            self._readers = found
            self._summaries = {name: known for name, known in self._summaries.items() if name in found}

    def summarise(self) -> Iterator[RunSummary]:
        """Yield the summaries that are new or have changed, those of the newest files first."""
        with self._lock:
            readers = list(self._readers.values())
        for reader in sorted(readers, key=_changed_at, reverse=True):
            summary = reader.read()
            with self._lock:
                if reader.id not in self._readers or self._summaries.get(reader.id) == summary:
                    continue
                self._summaries[reader.id] = summary
            yield summary
        self.is_complete = True

    def refresh(self, run_id: str) -> RunSummary | None:
        """Return the summary of one run as of now; None where there is no such run."""
        with self._lock:
            reader = self._readers.get(run_id)
        if reader is None:
            return None
        summary = reader.read()
        with self._lock:
            self._summaries[run_id] = summary
        return summary

    def folder(self, run_id: str) -> Path | None:
        """Return the folder of a run; None where there is no such run."""
        with self._lock:
            reader = self._readers.get(run_id)
        return None if reader is None else reader.folder

    def summary(self, run_id: str) -> RunSummary | None:
        """Return the summary of a run that is known; None where there is none."""
        with self._lock:
            return self._summaries.get(run_id)

    @property
    def summaries(self) -> Mapping[str, RunSummary]:
        """The summaries that are known, by run."""
        with self._lock:
            return dict(self._summaries)


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the folders of runs and evaluations at and below a folder, without following links."""
    waiting = [(root, 0)]
    num_seen = 0
    while waiting and num_seen < _MAX_FOLDERS:
        folder, depth = waiting.pop()
        num_seen += 1
        try:
            with os.scandir(folder) as entries:
                names, below = set(), []
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.name)
                    else:
                        names.add(entry.name)
        except OSError:
            continue
        if names & _SIGNS or {CONFIG, LOCK_NAME} <= names:
            yield folder
        if depth < MAX_DEPTH:
            inside = (name for name in sorted(below, reverse=True) if name not in _INSIDE and not name.startswith("."))
            waiting += [(folder / name, depth + 1) for name in inside]


def _name(place: Path) -> str:
    """Return what an address calls a folder: bytes that are not text are spelled out: no address has them."""
    return os.fsencode(place.as_posix()).decode("utf-8", "backslashreplace")


def _changed_at(reader: SummaryReader) -> float:
    try:
        return os.stat(reader.folder / METRICS).st_mtime
    except OSError:
        return 0.0
