"""Waiting that can be ended, and that says for what it waits.

The first Ctrl-C asks a run to save and end, the second ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_log = logging.getLogger("forge.grpo")


class Stop:
    """Whether the run was asked to end. Awaitable parts of a run are raced against it with `unless`."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        self._asked.set()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Await work, or leave it when the run is asked to end; then the answer is None."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for each in (task, asked):
                each.cancel()
            await asyncio.wait({task, asked})


@contextlib.asynccontextmanager
async def stopped_by_hand(*, save_hint: str) -> AsyncIterator[Stop]:
    """Inside the block, Ctrl-C asks the run to end; a second one cancels it. Only in the main thread, which alone gets
    signals."""
    stop, task, loop = Stop(), asyncio.current_task(), asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def pressed() -> None:
        if stop.is_asked:
            _log.warning("ending at once")
            assert task is not None
            task.cancel()
            return
        _log.warning("stopping: %s; press Ctrl-C again to end at once", save_hint)
        stop.ask()

    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, pressed)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


async def patiently(work: Coroutine[Any, Any, T], *, every_s: float, say: Callable[[], None]) -> T:
    """Await work; whenever another `every_s` seconds have gone by without it, call `say`."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=every_s)
            if not task.done():
                say()
        return task.result()
    finally:
        task.cancel()
