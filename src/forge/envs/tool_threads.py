"""Calls of tools that must not affect anything else, whatever they raise and however long they take."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from forge.envs.limits import Fault


class ToolExit(Exception):
    """A tool raised what would end more than its own call, such as `SystemExit`.

    Attributes:
        error: what it raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(type(error).__name__)
        self.error = error


async def call_on_thread(function: Callable[[], Any], *, name: str) -> Any:
    """Call a plain function on a thread of its own and return what it returns.

    The threads of `asyncio.to_thread` are few and shared: functions that hang would leave none for other calls. A
    thread that hangs does not keep the process from exiting.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def resolve(value: Any, error: Exception | None) -> None:
        if future.done():  # its time was up
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def work() -> None:
        value: Any = None
        error: Exception | None = None
        try:
            value = context.run(function)
        except BaseException as raised:  # noqa: BLE001 - whatever it is, the caller gets it
            error = raised if isinstance(raised, Exception) else ToolExit(raised)
            if isinstance(raised, StopIteration):  # a future cannot hold it
                error = ToolExit(raised)
        with suppress(RuntimeError):  # the loop is closed: the call was given up long ago
            loop.call_soon_threadsafe(resolve, value, error)

    thread = threading.Thread(target=work, name=f"forge-tool-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise Fault(f"there is no thread for the tool {name}: {error}", kind="threads") from error
    try:
        return await future
    finally:
        if not future.cancelled():
            thread.join()  # it has nothing left to do


async def contain(made: Awaitable[Any]) -> Any:
    """Await a coroutine of a tool. What it raises itself must not look like the end of the episode or the process."""
    try:
        return await made
    except (SystemExit, BaseExceptionGroup) as error:
        if isinstance(error, Exception):
            raise
        raise ToolExit(error) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ToolExit(error) from error
