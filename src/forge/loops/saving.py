"""When a run saves, and from which step it would resume."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from forge.config import CheckpointConfig
from forge.trainer.checkpoint_folder import readable_checkpoints
from forge.trainer.schedules import is_due


class SaveRule:
    """Says when a checkpoint is due: every `save_interval` steps, and when `save_interval_s` seconds have passed since
    the last one."""

    def __init__(self, config: CheckpointConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._last = clock()

    def is_due(self, step: int) -> bool:
        """Whether the state after this step is to be saved."""
        return is_due(step, self._config.save_interval) or (step > 0 and self.is_overdue())

    def is_overdue(self) -> bool:
        """Whether the last checkpoint is older than `save_interval_s`."""
        limit = self._config.save_interval_s
        return limit is not None and self._clock() - self._last >= limit

    def saved(self) -> None:
        """Count the seconds from now on."""
        self._last = self._clock()


def saved_step(folder: Path) -> int | None:
    """The step that `--resume` continues after: that of the checkpoint completed last; None if there is none.

    A checkpoint that is still being written, or whose write failed, does not count.
    """
    infos = readable_checkpoints(folder)
    if not infos:
        return None
    caller = infos[-1].extra.get("caller", {})
    return int(caller.get("step", infos[-1].step))


def where_it_stopped(step: int, folder: Path) -> str:
    """Say after which step a run ended, and what `--resume` continues after."""
    saved = saved_step(folder)
    kept = "there is no checkpoint yet" if saved is None else f"--resume continues after step {saved}"
    return f"stopped after step {step}; {kept}"
