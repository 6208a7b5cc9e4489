"""The control thread: an event loop of its own for supervision.

Heartbeats, deaths and restarts are handled there, so that a user's program that keeps its own event loop busy (a long
collation, a blocking call) neither delays a restart nor makes healthy replicas look dead.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> bool:
    """Call `callback` soon on a loop of any thread; False if that loop has ended."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return False
    return True


class ControlLoop:
    """An asyncio loop on a daemon thread. All methods may be called from any thread."""

    def __init__(self, name: str = "forge-control") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left, timeout=1))
        self.loop.close()

    def start(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run `coro` on the control loop, in the caller's context. Cancelling the result cancels the coroutine."""
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        context = contextvars.copy_context()

        def begin() -> None:
            if outcome.cancelled():
                coro.close()
                return
            task = self.loop.create_task(coro, context=context)
            task.add_done_callback(deliver)
            outcome.add_done_callback(lambda done: post(self.loop, task.cancel) if done.cancelled() else None)

        def deliver(task: asyncio.Task[T]) -> None:
            error = None if task.cancelled() else task.exception()
            if task.cancelled():
                outcome.cancel()
            elif not outcome.set_running_or_notify_cancel():
                return  # the caller has cancelled it
            elif error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        if not post(self.loop, begin):
            coro.close()
            outcome.cancel()
        return outcome

    def submit(self, coro: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """As `start`, to be awaited on the caller's own loop."""
        return asyncio.wrap_future(self.start(coro))

    def stop(self) -> None:
        """End the loop's thread; nothing may be submitted afterwards."""
        if self._thread.is_alive():
            post(self.loop, self.loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=5)


_control: ControlLoop | None = None
_owner_pid = 0
_guard = threading.Lock()


def control() -> ControlLoop:
    """Return this process's control loop, started on first use."""
    global _control, _owner_pid
    with _guard:
        if _control is None or _owner_pid != os.getpid():
            _control, _owner_pid = ControlLoop(), os.getpid()
            atexit.register(_control.stop)
        return _control
