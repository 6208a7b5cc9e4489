"""Metrics sinks that kill: named in a configuration, and called in the controller's process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil


class KillTrainer:
    """Kills the largest process below this one, which is the trainer, when a step is written."""

    def __init__(self, folder: Path, *, at_step: int) -> None:
        self._at_step = at_step

    def write(self, step: int, values: Mapping[str, object]) -> None:
        if step == self._at_step:
            max(psutil.Process().children(recursive=True), key=lambda each: each.memory_info().rss).kill()

    def close(self) -> None:
        pass


class KillController(KillTrainer):
    """Kills this process when a step is written."""

    def write(self, step: int, values: Mapping[str, object]) -> None:
        if step == self._at_step:
            psutil.Process().kill()
