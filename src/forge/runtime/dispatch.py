"""How an actor runs its calls: one task for each, in order where order was promised, each of them cancellable.

Every actor object has one `Dispatcher`, on that actor's event loop. Replies go back through the call's port; an
exception is sent as itself with the remote traceback attached.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forge.runtime.endpoints import EndpointSpec
from forge.runtime.replies import Outbox
from forge.runtime.serialization import as_remote
from forge.runtime.streams import SendWindow, StreamPort, serve_items

_log = logging.getLogger("forge.runtime")
_FORGET_AFTER = 4096
SETUP = "setup"


class Dispatcher:
    """Runs one actor's calls. Serial endpoints take turns through one lock; concurrent ones do not."""

    def __init__(self) -> None:
        self.num_served = 0
        self._turn = asyncio.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._by_call: dict[int, asyncio.Task[None]] = {}
        self._cancelled_early: dict[int, None] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._windows: dict[int, SendWindow] = {}

    def outbox(self, caller: int) -> Outbox:
        """Return where replies to a calling process go."""
        box = self._outboxes.get(caller)
        if box is None:
            box = self._outboxes[caller] = Outbox()
        return box

    def start(
        self, actor: Any, port: Any, spec: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any], call_id: int = 0
    ) -> None:
        """Start a call and return at once; its reply goes to `port`."""
        if call_id and call_id in self._cancelled_early:
            del self._cancelled_early[call_id]
            return
        task = asyncio.create_task(self._serve(actor, port, spec, args, kwargs))
        self._tasks.add(task)
        if call_id:
            self._by_call[call_id] = task
        task.add_done_callback(functools.partial(self._finished, call_id))

    def start_stream(self, port: StreamPort, call: functools.partial[Any], call_id: int) -> asyncio.Task[None] | None:
        """Start a stream and return at once; its items go to `port`. None if its reader has left already."""
        if call_id in self._cancelled_early:
            del self._cancelled_early[call_id]
            return None
        window = self._windows[call_id] = SendWindow(port)
        task = asyncio.create_task(self._serve_stream(port, window, call))
        self._tasks.add(task)
        self._by_call[call_id] = task
        task.add_done_callback(functools.partial(self._finished, call_id))
        task.add_done_callback(lambda _: self._windows.pop(call_id))
        return task

    def grant(self, call_id: int, num_items: int) -> None:
        """Let a stream send so many more items: its reader has taken them, or sends a heartbeat."""
        window = self._windows.get(call_id)
        if window is not None:
            window.grant(num_items)

    def _finished(self, call_id: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._by_call.pop(call_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a call could not be answered", exc_info=error)

    def cancel(self, call_id: int) -> None:
        """Cancel a call whose caller has gone. One that has not arrived yet is dropped on arrival."""
        task = self._by_call.get(call_id)
        if task is not None:
            task.cancel()
            return
        self._cancelled_early[call_id] = None
        if len(self._cancelled_early) > _FORGET_AFTER:
            del self._cancelled_early[next(iter(self._cancelled_early))]

    async def _serve(
        self, actor: Any, port: Any, spec: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        try:
            port.send(await self.invoke(actor, spec, args, kwargs))
            self.num_served += spec.name != SETUP
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
            _report(port, error)

    async def _serve_stream(self, port: StreamPort, window: SendWindow, call: functools.partial[Any]) -> None:
        try:
            await serve_items(call(), port, window)
            self.num_served += 1
        except BaseException as error:  # noqa: BLE001 - as above
            _report(port, error)

    async def invoke(self, actor: Any, spec: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the endpoint's method here and return what it returns."""
        if spec.concurrent:
            return await spec.method(actor, *args, **kwargs)
        async with self._turn:
            if spec.is_async:
                return await spec.method(actor, *args, **kwargs)
            return await self._on_thread(functools.partial(spec.method, actor, *args, **kwargs))

    async def _on_thread(self, call: functools.partial[Any]) -> Any:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="forge-endpoint")
        run = contextvars.copy_context().run
        running = asyncio.get_running_loop().run_in_executor(self._thread, run, _without_stop_iteration, call)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # A thread cannot be interrupted: keep the turn until it is done, so that calls still never overlap.
            await asyncio.wait({running})
            if not running.cancelled():
                running.exception()
            raise


def _report(port: Any, error: BaseException) -> None:
    port.exception(as_remote(error))
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error  # by us, and not by the user's own code


def _without_stop_iteration(call: functools.partial[Any]) -> Any:
    try:
        return call()
    except StopIteration as error:  # no future can hold one: as in a coroutine, it becomes a RuntimeError
        raise RuntimeError("the endpoint raised StopIteration") from error
