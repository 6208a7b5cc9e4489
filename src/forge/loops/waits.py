"""What a run is doing or waiting for: logged when it takes long, and shown to whoever asks, or watches its terminal."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from forge.loops.stopping import Reminder, Stop
from forge.observe.monitor import current_monitor
from forge.observe.phases import Progress, phase

T = TypeVar("T")
_log = logging.getLogger("forge.grpo")


@dataclass(frozen=True, slots=True)
class Work:
    """Something that a run does or waits for.

    Attributes:
        text: says it in a log line.
        doing: says it in two or three words.
        first: what it is called as a phase of the run's start.
        count: returns how much of it is done, and how much there is; None where that is not known.
        unit: what is counted.
    """

    text: str | Callable[[], str]
    doing: str
    first: str = ""
    count: Callable[[], tuple[int, int]] | None = None
    unit: str = ""

    def describe(self) -> str:
        """Return the words for a log line."""
        return self.text if isinstance(self.text, str) else self.text()

    def shown(self) -> str:
        """Return the words for a terminal: `waiting for rollouts: 3 of 16 groups`."""
        if self.count is None:
            return self.doing
        done, total = self.count()
        return f"{self.doing}: {done} of {total} {self.unit}"


TRAINING = Work("the trainer learns", "training", "first step")
PUBLISHING = Work("the trainer publishes its weights", "publishing weights", "first weight sync")
SAVING = Work("the trainer saves its state", "saving a checkpoint", "first checkpoint")
WRITING = Work("the checkpoint is written", "writing a checkpoint", "first checkpoint")

What = str | Callable[[], str] | Work


class Waits:
    """The waits of one run.

    Args:
        stop: cuts those short that can be.
        report_s: seconds after which a wait is logged, and again after as many.
        step: returns the steps taken so far.
    """

    def __init__(self, stop: Stop, *, report_s: float, step: Callable[[], int]) -> None:
        self.stop, self._report_s, self._step = stop, report_s, step
        self._current: list[Work] = []
        self._progress: dict[Work, Progress] = {}

    @property
    def current(self) -> tuple[str, ...]:
        """What the run waits for now, the longest wait first: an update of generators may be under way meanwhile."""
        return tuple(each.describe() for each in self._current)

    @contextmanager
    def shown(self, what: What) -> Iterator[Callable[[], str]]:
        """Show what the block waits for."""
        work = what if isinstance(what, Work) else Work(what, "working")
        self._current.append(work)
        try:
            with self._as_phase(work):
                self.changed()
                yield work.describe
        finally:
            self._current.remove(work)
            self.changed()

    @contextmanager
    def _as_phase(self, work: Work) -> Iterator[None]:
        """Report the block as a phase of the start, until the run has started."""
        monitor = current_monitor()
        if monitor is None or monitor.startup.seconds is not None or not work.first:
            yield
            return
        with phase(work.first) as progress:
            if work.count is not None:
                progress.set_total(work.count()[1])
                self._progress[work] = progress
            try:
                yield
            finally:
                self._progress.pop(work, None)

    def changed(self) -> None:
        """Show anew what the run waits for: it is something else, or further."""
        monitor = current_monitor()
        if monitor is None:
            return
        monitor.do(self._current[0].shown() if self._current else None)
        for work, progress in self._progress.items():
            if work.count is not None:
                progress.reach(work.count()[0])

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
