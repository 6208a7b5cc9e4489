"""How many deaths a run survives: a bounded number of restarts, and never a third try of a step that killed twice."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from forge.config import RecoveryConfig
from forge.errors import ForgeError, RecoveryError
from forge.observe.clock import monotonic_s
from forge.observe.fault_records import record_fault
from forge.trainer.crash_files import try_to_write_crash
from forge.types import Batch

_log = logging.getLogger("forge.trainer")
_MAX_BACKOFF_S: Final = 60.0


class Deaths:
    """Counts the deaths of one worker, and says when they end the run.

    Args:
        name: what the worker is called in messages and in the names of files: `trainer`.
        rules: how many restarts there may be.
        crashes: the folder for batches that it dies on.
        clock: seconds.
    """

    def __init__(
        self, name: str, rules: RecoveryConfig, crashes: Path, *, clock: Callable[[], float] = monotonic_s
    ) -> None:
        self._name, self._rules, self._crashes, self._clock = name, rules, crashes, clock
        self._restarts: list[float] = []
        self._places: Counter[tuple[str, int]] = Counter()

    def note(self, failure: Exception, *, what: str, step: int, batch: Batch | None) -> None:
        """Count a death in a call after so many steps. The second one in the same place raises `RecoveryError`, and its
        batch is written."""
        self._places[what, step] += 1
        if self._places[what, step] < 2:
            return
        written = None
        if batch is not None:
            text = text_of(failure)
            written = try_to_write_crash(self._crashes, batch, worker=self._name, step=step + 1, failure=text)
        raise RecoveryError(
            f"the {self._name} died twice in {what} after {step} step(s)",
            path=None if written is None else str(written),
            value=text_of(failure),
            rule="a step that kills its worker twice is not tried a third time",
            repair="look at the worker's output and the kernel's log (dmesg), then continue with --resume"
            if written is None
            else "look at the batch: README.md in that folder says how; then continue with --resume",
        ).with_log(getattr(failure, "log", None)) from failure

    async def wait_to_restart(self, failure: Exception) -> None:
        """Return when the worker may be started again. Raise `RecoveryError` if that was done too often."""
        rules, now = self._rules, self._clock()
        self._restarts = [each for each in self._restarts if now - each < rules.window_s]
        count = len(self._restarts)
        if count >= rules.max_restarts:
            raise RecoveryError(
                f"the {self._name} was lost again after {count} restart(s)",
                path="recovery.max_restarts",
                value=text_of(failure),
                rule=f"at most {rules.max_restarts} in {rules.window_s:g} s",
                repair="find out what kills it (memory? the host?), then continue with --resume; or raise the limit",
            ).with_log(getattr(failure, "log", None)) from failure
        self._restarts.append(now)
        record_fault("restart", failure, where=self._name)
        _log.warning(
            "%s; restart %d of at most %d in %g s",
            *(text_of(failure), count + 1, rules.max_restarts, rules.window_s),
        )
        if count:
            await asyncio.sleep(min(rules.backoff_s * 2 ** (count - 1), _MAX_BACKOFF_S))


def text_of(failure: Exception) -> str:
    """Return what happened, without the fields of our errors."""
    return failure.message if isinstance(failure, ForgeError) else str(failure)
