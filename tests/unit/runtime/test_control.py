"""The control thread: what is submitted runs there, and its outcome comes back to the caller's own loop."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from forge.runtime.control import ControlLoop, control

LIMIT_S = 600
tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")


@pytest.fixture
def side() -> Iterator[ControlLoop]:
    loop = ControlLoop("test-control")
    yield loop
    loop.stop()
    assert loop.loop.is_closed()


def drive(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, LIMIT_S))


def test_a_coroutine_runs_on_the_control_thread_in_the_callers_context(side: ControlLoop) -> None:
    async def where() -> tuple[str, bool, str]:
        return threading.current_thread().name, asyncio.get_running_loop() is side.loop, tenant.get()

    async def body() -> Any:
        tenant.set("blue")
        return await side.submit(where())

    assert drive(body()) == ("test-control", True, "blue")


def test_an_exception_is_raised_to_the_caller(side: ControlLoop) -> None:
    async def fail() -> None:
        raise KeyError("there")

    async def body() -> None:
        with pytest.raises(KeyError, match="there"):
            await side.submit(fail())
        assert await side.submit(asyncio.sleep(0, "still alive")) == "still alive"

    drive(body())


def test_it_goes_on_while_the_callers_loop_is_blocked(side: ControlLoop) -> None:
    ran = threading.Event()

    async def work() -> None:
        ran.set()

    async def body() -> None:
        outcome = side.submit(work())
        assert ran.wait(LIMIT_S)  # this loop does not turn meanwhile
        await outcome

    drive(body())


def test_cancelling_the_outcome_cancels_the_coroutine(side: ControlLoop) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def body() -> None:
        outcome = side.submit(work())
        await asyncio.to_thread(begun.wait, LIMIT_S)
        outcome.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outcome
        assert await asyncio.to_thread(ended.wait, LIMIT_S)

    drive(body())


def test_cancelling_before_it_began_keeps_it_from_beginning(side: ControlLoop) -> None:
    gate, is_blocked = threading.Event(), threading.Event()
    ran: list[str] = []

    async def block() -> None:
        is_blocked.set()
        gate.wait(LIMIT_S)

    async def work() -> None:
        ran.append("work")

    async def body() -> None:
        blocking = side.submit(block())
        await asyncio.to_thread(is_blocked.wait, LIMIT_S)
        outcome = side.submit(work())
        outcome.cancel()
        await asyncio.sleep(0)  # the word travels with the next turn of this loop
        gate.set()
        await blocking
        await side.submit(asyncio.sleep(0))
        assert ran == []

    drive(body())


def test_a_coroutine_that_cancels_itself_cancels_the_outcome(side: ControlLoop) -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    async def body() -> None:
        outcome = side.submit(give_up())
        await asyncio.wait({outcome})
        assert outcome.cancelled()

    drive(body())


def test_a_caller_that_has_gone_harms_nobody(side: ControlLoop, caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    ended: list[str] = []

    async def work() -> None:
        await asyncio.to_thread(gate.wait, LIMIT_S)
        ended.append("work")
        raise KeyError("nobody hears it")

    async def leave() -> None:
        side.submit(work())

    async def fence() -> None:
        while not ended:  # noqa: ASYNC110 - turns of a loop that is not blocked, no time passes in between
            await asyncio.sleep(0)

    asyncio.run(leave())
    gate.set()

    async def come_back() -> None:
        await side.submit(fence())

    drive(come_back())
    assert ended == ["work"]
    assert caplog.messages == []


def test_stopping_cancels_what_still_runs() -> None:
    side = ControlLoop("test-control")
    begun = threading.Event()
    ended: list[str] = []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def body() -> None:
        outcome = side.submit(work())
        await asyncio.to_thread(begun.wait, LIMIT_S)
        side.stop()
        assert ended == ["work"]
        with pytest.raises(asyncio.CancelledError):
            await outcome

    drive(body())
    side.stop()  # a second time does nothing


def test_there_is_one_for_each_process() -> None:
    assert control() is control()
    program = """
import asyncio, os
from forge.runtime.control import control

async def ask():
    return await control().submit(asyncio.sleep(0, os.getpid()))

mine = control()
assert asyncio.run(ask()) == os.getpid()
child = os.fork()
if child == 0:
    assert control() is not mine
    assert asyncio.run(asyncio.wait_for(ask(), 600)) == os.getpid()
    os._exit(7)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=600, check=False).returncode == 7
