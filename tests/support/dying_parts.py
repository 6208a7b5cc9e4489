"""A loss that kills the process that computes it, when a file says so, and a sink that writes the file."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.losses import CrossEntropy, LossTerms, TokenView
from forge.types import Batch


def arm(folder: Path, *, rank: int = 0, times: int = 1) -> None:
    """Let a rank die the next time that it computes the loss, or the next `times` times."""
    for number in range(times):
        (folder / f"die-{rank}-{number}").touch()


def die_if_armed(folder: Path) -> None:
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    for mark in sorted(folder.glob(f"die-{rank}-*")):
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class DyingLoss:
    """Another loss, whose computation may kill the process in the middle of a step; see `arm`."""

    is_nll = False  # else the trainer computes it by itself

    def __init__(self, loss: Any, folder: Path) -> None:
        self._loss, self._folder = loss, folder

    def __call__(self, tokens: TokenView) -> LossTerms:
        die_if_armed(self._folder)
        terms: LossTerms = self._loss(tokens)
        return terms

    def normalizer(self, batch: Batch) -> float:
        return float(self._loss.normalizer(batch))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loss, name)


class Arming:
    """A metrics sink that arms the loss when a step is written: `at` has how often it kills, by the step."""

    def __init__(self, folder: Path, *, marks: str, at: Mapping[str, int]) -> None:
        self._marks, self._at = Path(marks), at

    def write(self, step: int, values: Mapping[str, object]) -> None:
        written = self._marks / f"written-{step}"
        if not written.exists():  # the first time: a run that starts again writes it again
            written.touch()
            arm(self._marks, times=self._at.get(str(step), 0))

    def close(self) -> None:
        pass


def dying_cross_entropy(*, folder: str) -> DyingLoss:
    """The loss of fine-tuning, for `loss.function`."""
    return DyingLoss(CrossEntropy(), Path(folder))
