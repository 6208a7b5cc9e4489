"""Signals that stop a run, and work that is left when it is asked to end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forge.errors import StepAbandoned
from forge.loops.stopping import STOP_SIGNALS, Stop, stopped_by_signals

LIMIT_S = 600


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Begin as in a terminal, and leave the process as it was."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(body: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body(), LIMIT_S))


def test_work_is_awaited_or_left_when_the_run_is_asked_to_end() -> None:
    was_cancelled: list[bool] = []

    async def work(event: asyncio.Event) -> int:
        try:
            await event.wait()
        except asyncio.CancelledError:
            was_cancelled.append(True)
            raise
        return 7

    async def body() -> None:
        stop, ready = Stop(), asyncio.Event()
        asyncio.get_running_loop().call_soon(ready.set)
        assert await stop.unless(work(ready)) == 7
        asyncio.get_running_loop().call_soon(stop.ask)
        assert await stop.unless(work(asyncio.Event())) is None
        assert was_cancelled == [True]

    run(body)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_asks_the_run_to_end(number: signal.Signals) -> None:
    async def body() -> tuple[bool, int]:
        before = [signal.getsignal(each) for each in STOP_SIGNALS]
        async with stopped_by_signals(save_hint="it is saved") as (stop, is_late):
            assert (stop.is_asked, stop.exit_code) == (False, 0)
            os.kill(os.getpid(), number)
            assert stop.is_asked, "also where the event loop does not get its turn"
            assert await stop.unless(asyncio.Event().wait()) is None
            assert not is_late()
        assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
        return stop.is_asked, stop.exit_code

    assert run(body) == (True, 128 + number)


TWICE = """
import asyncio, os, signal, sys
from forge.loops.stopping import stopped_by_signals

async def body():
    async with stopped_by_signals(save_hint=""):
        for name in sys.argv[1:]:
            os.kill(os.getpid(), signal.Signals[name])
        await asyncio.Event().wait()

asyncio.run(body())
"""


@pytest.mark.parametrize("names", [("SIGINT", "SIGINT"), ("SIGHUP", "SIGTERM")])
def test_the_second_signal_ends_it_at_once(names: tuple[str, str]) -> None:
    command = [sys.executable, "-c", TWICE, *names]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 128 + signal.Signals[names[1]]
    assert "Traceback" not in ended.stderr


def test_a_run_that_is_cancelled_by_its_caller_is_cancelled() -> None:
    async def body() -> None:
        async with stopped_by_signals(save_hint="it is saved"):
            await asyncio.Event().wait()

    async def outer() -> None:
        task = asyncio.create_task(body())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(outer)


def test_under_nohup_a_hangup_stays_ignored() -> None:
    async def body() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        async with stopped_by_signals(save_hint="it is saved") as (stop, _):
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_asked
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    run(body)


def test_another_thread_gets_no_signals_and_sets_no_handler() -> None:
    async def body() -> bool:
        async with stopped_by_signals(save_hint="it is saved") as (stop, is_late):
            return stop.is_asked or is_late()

    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(run(body)))
    thread.start()
    thread.join(LIMIT_S)
    assert found == [False]


def test_a_step_that_takes_too_long_is_abandoned() -> None:
    """After half of the time that a scheduler leaves, which here is none."""

    async def body() -> None:
        given_up = asyncio.Event()

        async def step() -> None:
            await given_up.wait()
            raise StepAbandoned("no time")

        async def abandon() -> None:
            given_up.set()

        async with stopped_by_signals(save_hint="it is saved", grace_s=1e-3) as (stop, is_late):
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(StepAbandoned):
                await stop.in_time(step(), abandon)
            assert is_late()

    run(body)


def test_a_step_that_ends_in_time_is_not_abandoned() -> None:
    async def step() -> int:
        await asyncio.sleep(0)
        return 7

    async def abandon() -> None:
        raise AssertionError

    async def body() -> int:
        return await Stop().in_time(step(), abandon)

    assert run(body) == 7


RANK = """
import asyncio, os, signal, sys
from forge.loops import stopping

async def body():
    stop = stopping.Stop()
    now = [0.0]
    listener = stopping._Listener(stop, save_hint="", grace_s=None, is_rank=True, clock=lambda: now[0])
    listener.open()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)  # from the launcher of the ranks, which passes the request on
    print("asked by", stop.signal.name, flush=True)
    now[0] = 60.0
    os.kill(os.getpid(), signal.SIGTERM)
    print("not reached", flush=True)

asyncio.run(body())
"""


def test_a_rank_takes_copies_of_a_signal_for_one_and_a_later_one_ends_it() -> None:
    ended = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, timeout=600, check=False)
    assert (ended.stdout, ended.returncode) == ("asked by SIGINT\n", -signal.SIGTERM), ended.stderr


SUPERVISED = """
import asyncio, os, signal
from forge.loops import stopping

async def body():
    stop = stopping.Stop()
    now = [0.0]
    listener = stopping._Listener(stop, save_hint="", grace_s=None, is_rank=False, clock=lambda: now[0])
    listener.open()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # from the scheduler, beside the one that the supervisor passed on
    print(stop.signal.name, listener.second)
    now[0] = 60.0
    os.kill(os.getpid(), signal.SIGTERM)
    print(listener.second.name)
    asyncio.current_task().uncancel()
    listener.close()

asyncio.run(body())
"""


def test_a_supervised_run_takes_copies_of_sigterm_for_one() -> None:
    for env, seen in (({"FORGE_SUPERVISOR": "1"}, "None"), ({}, str(signal.SIGTERM))):
        ended = subprocess.run(
            [sys.executable, "-c", SUPERVISED],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert ended.stdout.splitlines()[0].lower() == f"sigterm {seen}".lower(), ended.stderr
        assert ended.stdout.splitlines()[1] == "SIGTERM"


def test_a_handler_that_is_put_back_later_passes_signals_on() -> None:
    """A kernel saves the handlers when a cell begins, and puts them back when it ends."""
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))

    async def body() -> Any:
        async with stopped_by_signals(save_hint="it is saved"):
            return signal.getsignal(signal.SIGINT)

    handler = run(body)
    signal.signal(signal.SIGINT, handler)
    os.kill(os.getpid(), signal.SIGINT)
    assert received == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is not handler
