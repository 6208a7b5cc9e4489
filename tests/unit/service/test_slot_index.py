"""The order of free replicas: the same choices as the routers make as functions of all of them."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.errors import ActorFailure
from forge.service.routing import BUILT_IN, least_loaded, round_robin
from forge.service.routing_table import RoutingTable
from forge.service.targets import Target
from stand_in_replica import drive, entry, make_table, request, settle, take

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
SESSIONS = ("a", "b", "c")
Operation = tuple[str, int]


@pytest.fixture(scope="module")
def linear_table() -> Iterator[Any]:
    """The table that looks at every replica."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("harness.linear_table").LinearTable
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "harness":
                del sys.modules[name]


class Side:
    """A table, and what was done with it."""

    def __init__(self, table: RoutingTable, num_replicas: int) -> None:
        self.table, self.num_replicas = table, num_replicas
        self.generations = dict.fromkeys(range(num_replicas), 0)
        self.held: list[Target] = []
        self.waiting: list[asyncio.Task[Target]] = []
        self.log: list[Any] = []
        self.held_back: dict[int, ExitStack] = {}
        for index in range(num_replicas):
            table.update(entry(index))

    async def do(self, operation: Operation) -> None:
        name, number = operation
        index, session = number % self.num_replicas, SESSIONS[number % len(SESSIONS)]
        getattr(self, name)(index, (None, session)[number % 2] if name in ("call", "queue") else session)
        await settle()
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            self._note(task.result())
        self.log.append((self.table.num_waiting, [self.table.num_sessions_at(each) for each in self.generations]))

    def _note(self, target: Target | None) -> None:
        self.log.append(None if target is None else (target.index, target.entry.generation, target.in_flight))
        if target is not None:
            self.held.append(target)

    def call(self, index: int, session: str | None) -> None:
        self._note(self.table.try_acquire(request(session)))

    def queue(self, index: int, session: str | None) -> None:
        self.waiting.append(asyncio.create_task(self.table.acquire(request(session))))

    def release(self, index: int, session: str) -> None:
        if self.held:
            self.table.release(self.held.pop(index % len(self.held)))

    def pin(self, index: int, session: str) -> None:
        self.table.pin(session)

    def unpin(self, index: int, session: str) -> None:
        self.table.unpin(session)

    def lose(self, index: int, session: str) -> None:
        self.table.update(entry(index, generation=self.generations[index], health="restarting", failure="killed"))

    def fail(self, index: int, session: str) -> None:
        """Let the calls know of a death before the table does."""
        if index in self.table.targets:
            self.table.targets[index].calls.fail(ActorFailure("gone"))

    def restart(self, index: int, session: str) -> None:
        self.generations[index] += 1
        self.table.update(entry(index, generation=self.generations[index]))

    def drain(self, index: int, session: str) -> None:
        known = self.table.entries.get(index)
        if known is not None and known.health == "healthy":
            self.table.update(replace(known, health="draining", keeps_sessions=session == "a"))

    def remove(self, index: int, session: str) -> None:
        if sum(each.health == "healthy" for each in self.table.entries.values()) > 1:
            self.table.update(entry(index, generation=self.generations[index], health="removed"))

    def hold_back(self, index: int, session: str) -> None:
        if index in self.held_back:
            self.held_back.pop(index).close()
        else:
            self.held_back[index] = ExitStack()
            self.held_back[index].enter_context(self.table.held_back(index))

    async def end(self) -> None:
        for task in self.waiting:
            task.cancel()
        await settle()


NAMES = [
    "call",
    "call",
    "call",
    "call",
    "release",
    "release",
    "release",
    "queue",
    "pin",
    "unpin",
    "lose",
    "fail",
    "restart",
    "drain",
    "remove",
    "hold_back",
]
operations = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 59)), max_size=80)


@pytest.mark.parametrize("router", BUILT_IN.values(), ids=BUILT_IN)
@given(num_replicas=st.integers(1, 6), limit=st.sampled_from([None, 1, 2]), script=operations)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_every_choice_is_that_of_the_table_that_looks_at_every_replica(
    linear_table: Any, router: Any, num_replicas: int, limit: int | None, script: list[Operation]
) -> None:
    async def body() -> None:
        options = {"router": router, "limit": limit, "max_queue": None}
        ours = Side(RoutingTable("policy", **options), num_replicas)
        reference = Side(linear_table("policy", **options), num_replicas)
        for operation in script:
            await ours.do(operation)
            await reference.do(operation)
            assert ours.log == reference.log
        await ours.end()
        await reference.end()

    drive(body())


@pytest.mark.parametrize("router", [round_robin, least_loaded])
def test_the_index_does_not_grow_with_calls(router: Any) -> None:
    table = make_table(5, router=router, limit=3)
    table.pin("s")
    take(table, "s")
    for _ in range(2000):
        held = [take(table) for _ in range(10)]
        for target in held:
            table.release(target)
    assert table._session_order is not None
    assert max(len(table._order), len(table._session_order)) <= 3 * 5 + 64


def test_an_index_finds_the_smallest_key_among_those_that_are_free() -> None:
    table = make_table(4, limit=1)
    assert [take(table).index for _ in range(3)] == [0, 1, 2]
    with table.held_back(3):
        assert table.try_acquire(request()) is None
    assert take(table).index == 3


def test_a_replica_that_was_lost_and_is_back_is_found_once() -> None:
    table = make_table(3, limit=1)
    held = [take(table) for _ in range(3)]
    table.update(entry(1, health="restarting", failure="killed"))
    table.update(entry(1, generation=1))
    table.release(held[1])  # the call that was lost with it frees nothing
    fresh = take(table)
    assert (fresh.index, fresh.entry.generation) == (1, 1)
    assert table.try_acquire(request()) is None
