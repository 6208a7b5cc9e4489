"""How many groups start on a host at once, and what becomes of those that wait."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from forge.errors import ActorFailure
from forge.runtime.pending_calls import PendingCalls
from forge.runtime.start_turns import StartTurns, turns_of


@dataclass
class Place:
    name: str
    start_turns: StartTurns = field(default_factory=lambda: StartTurns(2))


class Group:
    """Waits as a group of ranks does, and notes when it starts."""

    def __init__(self, name: str, places: list[Place], running: list[str]) -> None:
        self.name, self.places, self.running = name, places, running
        self.calls, self.may_end = PendingCalls(), asyncio.Event()
        self.task = asyncio.create_task(self.start())

    async def ask(self, turn: asyncio.Future[None]) -> None:
        self.calls.add(turn, asyncio.get_running_loop())
        try:
            await turn
        finally:
            self.calls.discard(turn)

    async def start(self) -> None:
        async with turns_of(self.places, self.ask):
            self.running.append(self.name)
            await self.may_end.wait()
            self.running.remove(self.name)


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


@in_a_loop
async def test_some_start_at_once_and_the_others_in_order() -> None:
    place, running = Place("one"), list[str]()
    groups = [Group(name, [place], running) for name in "abcd"]
    await settle()
    assert running == ["a", "b"]
    groups[1].may_end.set()
    await settle()
    assert running == ["a", "c"]
    for group in groups:
        group.may_end.set()
    await asyncio.gather(*(group.task for group in groups))
    assert place.start_turns.num_free == 2


@in_a_loop
async def test_one_that_is_stopped_while_it_waits_is_told_at_once_and_holds_up_nobody() -> None:
    place, running = Place("one"), list[str]()
    groups = [Group(name, [place], running) for name in "abcde"]
    await settle()
    groups[2].calls.fail(ActorFailure("c was stopped", path="c"))
    groups[3].task.cancel()
    with pytest.raises(ActorFailure, match="c was stopped"):
        await groups[2].task
    with pytest.raises(asyncio.CancelledError):
        await groups[3].task
    groups[0].may_end.set()
    await settle()
    assert running == ["b", "e"]
    for group in groups:
        group.may_end.set()
    await asyncio.gather(groups[0].task, groups[1].task, groups[4].task)
    assert place.start_turns.num_free == 2


@in_a_loop
async def test_a_turn_that_comes_too_late_goes_to_the_next() -> None:
    place, running = Place("one"), list[str]()
    groups = [Group(name, [place], running) for name in "abcd"]
    await settle()
    groups[0].may_end.set()
    await asyncio.sleep(0)  # "a" ends and hands its turn to "c", which has not run yet
    assert running == ["b"]
    groups[2].task.cancel()
    await settle()
    assert running == ["b", "d"]
    for group in groups:
        group.may_end.set()
    await asyncio.gather(*(group.task for group in groups), return_exceptions=True)
    assert place.start_turns.num_free == 2


@in_a_loop
async def test_groups_over_several_hosts_do_not_wait_in_a_circle() -> None:
    one, two = Place("one", StartTurns(1)), Place("two", StartTurns(1))
    running: list[str] = []
    groups = [Group("a", [one, two], running), Group("b", [two, one], running)]
    await settle()
    assert running == ["a"]
    for group in groups:
        group.may_end.set()
    async with asyncio.timeout(30):
        await asyncio.gather(*(group.task for group in groups))
