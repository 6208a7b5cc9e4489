"""Metrics sinks that kill or hold: named in a configuration, and called in the controller's process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil

from leftovers import processes_of

HOLDING = "holding after step"


def holding(pipe: Path, *, at_step: int) -> str:
    """The override that names `Hold`."""
    return f"metrics.sinks=[{{kind: 'killing_sinks:Hold', args: {{at_step: {at_step}, pipe: '{pipe}'}}}}]"


class Hold:
    """When a step is written, prints a line that begins with HOLDING, and waits until the named pipe was opened for
    writing and closed. A signal that is sent meanwhile comes at this step, however short steps are."""

    def __init__(self, folder: Path, *, at_step: int, pipe: str) -> None:
        self._at_step: int | None = at_step
        self._pipe = Path(pipe)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        if step == self._at_step:
            self._at_step = None  # other figures of the same step may follow
            print(HOLDING, step, flush=True)
            self._pipe.read_text()

    def close(self) -> None:
        pass


class KillTrainer:
    """Kills the largest rank of this process, which is the trainer, when a step is written."""

    def __init__(self, folder: Path, *, at_step: int) -> None:
        self._at_step = at_step

    def write(self, step: int, values: Mapping[str, object]) -> None:
        if step == self._at_step:
            max(processes_of(os.getpid()), key=_memory).kill()

    def close(self) -> None:
        pass


def _memory(process: psutil.Process) -> int:
    """The memory of a rank; others, such as the process that ranks are forks of, count as empty."""
    try:
        return int(process.memory_info().rss) if "FORGE_LABEL" in process.environ() else 0
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return 0


class KillController(KillTrainer):
    """Kills this process when a step is written."""

    def write(self, step: int, values: Mapping[str, object]) -> None:
        if step == self._at_step:
            psutil.Process().kill()
