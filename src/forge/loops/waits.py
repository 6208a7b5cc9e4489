"""What a run is doing or waiting for: logged when it takes long, and shown to whoever asks."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from forge.loops.stopping import Reminder, Stop

T = TypeVar("T")
What = str | Callable[[], str]
_log = logging.getLogger("forge.grpo")


class Waits:
    """The waits of one run.

    Args:
        stop: cuts those short that can be.
        report_s: seconds after which a wait is logged, and again after as many.
        step: returns the steps taken so far.
    """

    def __init__(self, stop: Stop, *, report_s: float, step: Callable[[], int]) -> None:
        self.stop, self._report_s, self._step = stop, report_s, step
        self._current: list[Callable[[], str]] = []

    @property
    def current(self) -> tuple[str, ...]:
        """What the run waits for now, the longest wait first: an update of generators may be under way meanwhile."""
        return tuple(each() for each in self._current)

    @contextmanager
    def shown(self, what: What) -> Iterator[Callable[[], str]]:
        """Show what the block waits for."""

        def describe() -> str:
            return what if isinstance(what, str) else what()

        self._current.append(describe)
        try:
            yield describe
        finally:
            self._current.remove(describe)

    @contextmanager
    def reminding(self, what: What) -> Iterator[Reminder]:
        """Show what the block waits for, and yield what logs it."""
        with self.shown(what) as describe:
            yield Reminder(self._report_s, lambda: _log.warning("step %d waits: %s", self._step() + 1, describe()))

    async def during(self, work: Coroutine[Any, Any, T], what: What) -> T:
        """Await work that nothing interrupts."""
        with self.reminding(what) as reminder:
            return await reminder.during(work)

    async def unless(self, work: Coroutine[Any, Any, T], what: What) -> T | None:
        """Await work, or cancel it when the run is asked to end; then the result is None."""
        with self.reminding(what) as reminder:
            return await self.stop.unless(work, reminder=reminder)

    async def in_time(self, work: Coroutine[Any, Any, T], abandon: Callable[[], Awaitable[None]], what: What) -> T:
        """Await work. If time runs out first, call `abandon`, after which work raises or still finishes."""
        with self.reminding(what) as reminder:
            return await self.stop.in_time(work, abandon, reminder=reminder)
