"""The control thread: an event loop of its own for supervision.

Heartbeats, deaths and restarts are handled there, so that a user's program that keeps its own event loop busy (a long
collation, a blocking call) neither delays a restart nor makes healthy replicas look dead.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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

    def submit(self, coro: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run `coro` on the control loop, in the caller's context; await the result on the caller's own loop.

        Cancelling the returned future cancels the coroutine.
        """
        caller = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = caller.create_future()
        context = contextvars.copy_context()
        task: asyncio.Task[T] | None = None

        def deliver(done: asyncio.Task[T]) -> None:
            def settle() -> None:
                if outcome.done():
                    return
                if done.cancelled():
                    outcome.cancel()
                elif (error := done.exception()) is not None:
                    outcome.set_exception(error)
                else:
                    outcome.set_result(done.result())

            if not done.cancelled():
                done.exception()  # marks it as retrieved: the caller may have gone
            if not caller.is_closed():
                caller.call_soon_threadsafe(settle)

        def start() -> None:
            nonlocal task
            task = self.loop.create_task(coro, context=context)
            task.add_done_callback(deliver)
            if outcome.cancelled():
                task.cancel()

        def forward_cancel(done: asyncio.Future[T]) -> None:
            if done.cancelled() and task is not None and not self.loop.is_closed():
                self.loop.call_soon_threadsafe(task.cancel)

        outcome.add_done_callback(forward_cancel)
        self.loop.call_soon_threadsafe(start)
        return outcome

    def stop(self) -> None:
        """End the loop's thread; nothing may be submitted afterwards."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=5)


_control: ControlLoop | None = None
_owner_pid = 0
_guard = threading.Lock()


def control() -> ControlLoop:
    """This process's control loop, started on first use."""
    global _control, _owner_pid
    with _guard:
        if _control is None or _owner_pid != os.getpid():
            _control, _owner_pid = ControlLoop(), os.getpid()
            atexit.register(_control.stop)
        return _control
