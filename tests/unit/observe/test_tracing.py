"""Spans: what is kept of them, in which lane, and on which clock."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from forge.errors import DataError
from forge.observe import is_tracing, span, switch_tracing, tracing
from forge.observe.tracing import Ended, OpenSpan, Process, Trace, Tracer, drain_trace, spans_of


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    drain_trace()
    switch_tracing(True)
    yield
    switch_tracing(False)
    drain_trace()


def ended() -> list[Ended]:
    return list(drain_trace().ended)


def test_spans_nest_and_carry_what_they_were_given() -> None:
    with span("outer", num=3, kind="a", name="also a name"), span("inner"):
        pass
    inner, outer = ended()
    assert (inner.name, inner.args) == ("inner", None)
    assert (outer.name, outer.args) == ("outer", {"num": 3, "kind": "a", "name": "also a name"})
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    assert inner.lane == outer.lane == "MainThread"


def test_nothing_is_kept_while_it_is_off() -> None:
    switch_tracing(False)
    first, second = span("a"), span("b", args=1)
    with first, second:
        pass
    assert first is second, "not even an object is made"
    assert ended() == []
    assert not is_tracing()


def test_a_span_that_raises_says_so_and_lets_it_through() -> None:
    with pytest.raises(KeyError), span("lookup", key="x"):
        raise KeyError("x")
    (one,) = ended()
    assert one.args == {"key": "x", "error": "KeyError"}


def test_arguments_are_small_and_plain() -> None:
    with span("a", long="x" * 300, thing=[1, 2], flag=True, none=None, odd=float("inf")):
        pass
    (one,) = ended()
    assert one.args == {"long": "x" * 199 + "…", "thing": "[1, 2]", "flag": True, "none": None, "odd": float("inf")}
    with span("many", **{f"n{number}": number for number in range(20)}):
        pass
    (many,) = ended()
    assert len(many.args or {}) == 8


def test_tasks_that_run_at_once_have_lanes_of_their_own() -> None:
    async def work(gate: asyncio.Event, arrived: asyncio.Semaphore) -> None:
        with span("work"):
            arrived.release()
            await gate.wait()

    async def body() -> None:
        gate, arrived = asyncio.Event(), asyncio.Semaphore(0)
        with span("parent"):
            tasks = [asyncio.create_task(work(gate, arrived), name=f"group-{number}") for number in range(3)]
            for _ in tasks:
                await arrived.acquire()
            gate.set()
            await asyncio.gather(*tasks)

    asyncio.run(body())
    lanes: dict[str, set[str]] = {}
    for one in ended():
        lanes.setdefault(one.name, set()).add(one.lane)
    assert lanes == {"work": {"group", "group 2", "group 3"}, "parent": {"Task"}}


def test_tasks_that_follow_each_other_share_a_lane() -> None:
    async def body() -> None:
        for number in range(5):
            await asyncio.create_task(work(), name=f"group-{number}")

    async def work() -> None:
        with span("work"):
            await asyncio.sleep(0)

    asyncio.run(body())
    assert [one.lane for one in ended()] == ["group"] * 5
    assert tracing._tracer._taken == {}, "and nothing is remembered of them"


def test_a_thread_that_works_for_a_task_has_its_own_lane() -> None:
    def work() -> None:
        with span("compute"):
            pass

    async def body() -> None:
        with span("wait"), ThreadPoolExecutor(1, thread_name_prefix="engine") as pool:
            await asyncio.get_running_loop().run_in_executor(pool, work)

    asyncio.run(body())
    assert [(one.name, one.lane) for one in ended()] == [("compute", "engine"), ("wait", "Task")]


def test_a_span_may_end_in_another_task_than_it_began_in() -> None:
    async def body() -> None:
        block = span("moved")
        await asyncio.create_task(enter(block), name="first")
        with span("other"):
            block.__exit__(None, None, None)

    async def enter(block: OpenSpan) -> None:
        block.__enter__()

    asyncio.run(body())
    assert [(one.name, one.lane) for one in ended()] == [("moved", "first"), ("other", "Task")]


def test_memory_is_bounded_and_what_is_lost_is_counted() -> None:
    tracer = Tracer(max_spans=3)
    for number in range(5):
        with OpenSpan(tracer, f"span {number}", {}):
            pass
    kept, num_dropped = tracer.drain()
    assert ([one.name for one in kept], num_dropped) == (["span 2", "span 3", "span 4"], 2)
    assert tracer.drain() == ((), 0)


def test_threads_lose_nothing() -> None:
    start = threading.Barrier(6)

    def work() -> None:
        start.wait()
        for _ in range(300):
            with span("outer"), span("inner"):
                pass

    threads = [threading.Thread(target=work, name=f"worker-{number}") for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = ended()
    assert len(found) == 6 * 600
    assert {one.lane for one in found} <= {"worker", *(f"worker {number}" for number in range(2, 7))}
    assert tracing._tracer._taken == {}
    assert tracing._tracer._open == {}


def test_processes_of_one_host_share_a_clock_and_others_have_their_own() -> None:
    one = Ended("work", 100, 200, "Task", None)
    here = Trace(Process("box", 1, "a"), "boot", 1_000, (one,))
    drifted = Trace(Process("box", 2, "b"), "boot", 1_007, (one,))
    elsewhere = Trace(Process("far", 1, "c"), "another boot", 5_000, (one,))
    starts = [trace.spans(boot="boot", epoch_ns=1_000)[0].start_ns for trace in (here, drifted, elsewhere)]
    assert starts == [1_100, 1_100, 5_100]


def test_spans_come_in_the_order_in_which_they_began() -> None:
    with span("first"), span("second"):
        pass
    found = spans_of([drain_trace()])
    assert [one.name for one in found] == ["first", "second"]
    assert found[0].process == Process(found[0].process.host, os.getpid(), "controller")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"FORGE_TRACE": "1", "FORGE_LABEL": "policy[1]", "RANK": "1", "WORLD_SIZE": "2"}, "1 policy[1] rank 1"),
        ({"FORGE_TRACE": "0", "FORGE_LABEL": "policy[1]", "RANK": "0", "WORLD_SIZE": "1"}, "0 policy[1]"),
    ],
)
def test_the_environment_switches_it_on_and_names_the_process(environment: dict[str, str], said: str) -> None:
    program = "from forge.observe.tracing import *; print(int(is_tracing()), this_process().name)"
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, said), ran.stderr


def test_it_is_on_or_off() -> None:
    with pytest.raises(DataError) as caught:
        switch_tracing(1)  # type: ignore[arg-type]
    assert (caught.value.path, caught.value.value) == ("switch_tracing(on)", 1)
    assert (caught.value.rule, caught.value.repair) == ("true or false", "switch_tracing(True)")


def test_a_forked_child_has_spans_of_its_own() -> None:
    with span("parent's"):
        pass
    child = os.fork()
    if child == 0:
        is_right = False
        try:
            with span("child's"):
                pass
            trace = drain_trace()
            is_right = [one.name for one in trace.ended] == ["child's"] and trace.process.pid == os.getpid()
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [one.name for one in ended()] == ["parent's"]
