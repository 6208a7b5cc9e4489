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
    """Kills the trainer of this process, by its label, when a step is written."""

    def __init__(self, folder: Path, *, at_step: int) -> None:
        self._at_step = at_step

    def write(self, step: int, values: Mapping[str, object]) -> None:
        if step == self._at_step:
            (trainer,) = [each for each in processes_of(os.getpid()) if _label(each).lower().startswith("trainer")]
            trainer.kill()

    def close(self) -> None:
        pass


def _label(process: psutil.Process) -> str:
    """What a rank is called; empty for others, such as the process that ranks are forks of."""
    try:
        return process.environ().get("FORGE_LABEL", "")
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return ""


class KillController(KillTrainer):
    """Kills this process when a step is written."""

    def write(self, step: int, values: Mapping[str, object]) -> None:
        if step == self._at_step:
            psutil.Process().kill()
