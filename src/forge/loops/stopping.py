"""Stop a run on a signal, and wait for work that can be interrupted.

The first SIGINT (Ctrl-C), SIGTERM or SIGHUP asks a run to finish its step, save and end; the second ends it at once.
The exit code is 128 plus the signal's number. The SIGINT of a notebook is its "interrupt the kernel".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, TypeVar

from forge.observe.notebook import is_notebook, without_groups

T = TypeVar("T")
_log = logging.getLogger("forge.loops")

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SCHEDULED: Final = (signal.SIGTERM, signal.SIGHUP)
"""Signals that SIGKILL follows, after a time that the sender decides."""
_COPY_S: Final = 3.0
"""A rank, or a supervised run, may get one request several times: from the scheduler and from what started it. Copies
that come within this time of the first are not a second request."""
SUPERVISOR_VARIABLE: Final = "FORGE_SUPERVISOR"
"""Names the process of `forge run --supervise`, in the run that it has started."""


class RunInterrupted(asyncio.CancelledError):
    """A run in a notebook was ended at once, by a second interrupt. It is a cancellation, as every interrupt of a
    kernel is; the cell shows this text and no traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class Stop:
    """Whether the run was asked to end, and by which signal. Await what can be cut short with `unless`."""

    def __init__(self) -> None:
        self._asked, self._late = asyncio.Event(), asyncio.Event()
        self.signal: signal.Signals | None = None
        """The signal that asked for it; None if there was none."""

    @property
    def is_asked(self) -> bool:
        return self.signal is not None or self._asked.is_set()

    @property
    def exit_code(self) -> int:
        """What the process exits with: 0 unless a signal ended the run."""
        return 0 if self.signal is None else 128 + self.signal

    def ask(self, number: signal.Signals | None = None) -> None:
        """Ask the run to end after this step."""
        self.signal = self.signal or number
        self._asked.set()

    def retract(self) -> None:
        """Take back that a failed task asked the run to end: it starts again. A signal stands."""
        if self.signal is None:
            self._asked.clear()

    def watch(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task beside training. If it fails, the step in progress is finished and saved, and the run ends."""

        def look(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                _log.error("%s failed; the run saves its state and ends", name)
                self.ask()

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(look)
        return task

    def expire(self) -> None:
        """Note that there is no time left for a long step: what runs under `in_time` is abandoned."""
        self._late.set()

    async def unless(self, work: Coroutine[Any, Any, T], *, reminder: Reminder | None = None) -> T | None:
        """Await work, or cancel it when the run is asked to end; then the result is None."""
        task = asyncio.ensure_future(work)
        try:
            await _done_or_set(task, self._asked, reminder)
            return task.result() if task.done() else None
        finally:
            await _cancel(task)

    async def in_time(
        self,
        work: Coroutine[Any, Any, T],
        abandon: Callable[[], Awaitable[None]],
        *,
        reminder: Reminder | None = None,
    ) -> T:
        """Await work. If time runs out first, call `abandon`, after which work raises or still finishes."""
        task = asyncio.ensure_future(work)
        try:
            await _done_or_set(task, self._late, reminder)
            if not task.done():
                await abandon()
                await _done_or_set(task, asyncio.Event(), reminder)
            return task.result()
        finally:
            await _cancel(task)


@dataclass(frozen=True, slots=True)
class Reminder:
    """Calls `report` whenever another `every_s` seconds have passed in a wait."""

    every_s: float
    report: Callable[[], None]

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that nothing interrupts."""
        task = asyncio.ensure_future(work)
        try:
            await _done_or_set(task, asyncio.Event(), self)
            return task.result()
        finally:
            task.cancel()


async def _done_or_set(task: asyncio.Future[Any], event: asyncio.Event, reminder: Reminder | None) -> None:
    """Wait until a task is done or an event is set."""
    waiter = asyncio.ensure_future(event.wait())
    try:
        while not (task.done() or event.is_set()):
            timeout = None if reminder is None else reminder.every_s
            done, _ = await asyncio.wait({task, waiter}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done and reminder is not None:
                reminder.report()
    finally:
        await _cancel(waiter)


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait until it has ended."""
    task.cancel()
    await asyncio.wait({task})


class _Listener:
    """Signal handlers that fill in a `Stop`.

    The handlers are Python's own rather than the event loop's: in a rank, a training step blocks the loop.
    """

    def __init__(
        self,
        stop: Stop,
        *,
        save_hint: str,
        grace_s: float | None,
        is_rank: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stop, self._save_hint, self._grace_s = stop, save_hint, grace_s
        self._is_rank, self._clock = is_rank, clock
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        self._before: dict[signal.Signals, Any] = {}
        self._first_at = 0.0
        self._timer: threading.Timer | None = None
        self.is_late = self._is_closed = False
        self.second: signal.Signals | None = None

    def open(self) -> None:
        for number in STOP_SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started with nohup
            self._before[number] = signal.signal(number, self._received)

    def close(self) -> None:
        self._is_closed = True
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._timer is not None:
            self._timer.cancel()

    def _received(self, value: int, frame: FrameType | None) -> None:
        number = signal.Signals(value)
        if self._is_closed:  # a kernel puts handlers back that it found when a cell began
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
            return
        if number is signal.SIGHUP:
            self._leave_terminal()
        if self._stop.signal is None:
            self._stop.signal, self._first_at = number, self._clock()
            if self._grace_s is not None and number in _SCHEDULED:
                self._timer = threading.Timer(self._grace_s / 2, self._expire)
                self._timer.daemon = True
                self._timer.start()
            self._loop.call_soon_threadsafe(self._ask, number)
        elif self._may_be_copied(number) and self._clock() - self._first_at <= _COPY_S:
            pass
        elif not self._is_rank:
            self.second = number
            self._loop.call_soon_threadsafe(self._end)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _may_be_copied(self, number: signal.Signals) -> bool:
        """Whether one request may come as several signals."""
        return self._is_rank or (number in _SCHEDULED and SUPERVISOR_VARIABLE in os.environ)

    def _ask(self, number: signal.Signals) -> None:
        again = "send another signal"
        if number is signal.SIGINT:
            again = "interrupt the kernel again" if is_notebook() else "press Ctrl-C again"
        _log.warning("stopping on %s: %s; %s to end at once", number.name, self._save_hint, again)
        self._stop.ask(number)

    def _end(self) -> None:
        _log.warning("ending at once")
        assert self._task is not None
        self._task.cancel()

    def _expire(self) -> None:
        self.is_late = True
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._stop.expire)

    def _leave_terminal(self) -> None:
        """Send output to nowhere if the terminal is gone: printing would fail, and nothing would be saved."""
        lost = [number for number in self._terminals if not os.isatty(number)]
        if lost:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for number in lost:
                os.dup2(nowhere, number)
            os.close(nowhere)


@contextlib.asynccontextmanager
async def stopped_by_signals(
    *, save_hint: str, grace_s: float | None = None, is_rank: bool = False
) -> AsyncIterator[tuple[Stop, Callable[[], bool]]]:
    """Let SIGINT, SIGTERM and SIGHUP ask the run to end, inside the block; a second one ends it, with SystemExit, or in
    a notebook, which lives on, with `RunInterrupted`.

    Yields the `Stop`, and a function that says whether half of `grace_s` has passed since SIGTERM or SIGHUP. Signals
    are heard in the main thread only. SIGHUP stays ignored where it is, as under nohup.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop, lambda: False
        return
    listener = _Listener(stop, save_hint=save_hint, grace_s=grace_s, is_rank=is_rank)
    listener.open()
    try:
        yield stop, lambda: listener.is_late
    except asyncio.CancelledError:
        if listener.second is signal.SIGINT and is_notebook():
            raise RunInterrupted("the run was ended at once, by a second interrupt") from None
        if listener.second is not None:
            raise SystemExit(128 + listener.second) from None
        raise
    except Exception as error:
        if is_notebook():
            without_groups(error)
        raise
    finally:
        listener.close()
