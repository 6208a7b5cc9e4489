"""Sessions in the routing table: they stay, wait, move and end, and hold up nobody else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from forge.service.routing import BUILT_IN
from stand_in_replica import drive, entry, make_table, queue_up, request, settle, take


def test_a_session_stays_with_its_replica() -> None:
    table = make_table(3)
    table.pin("s")
    home = take(table, "s")
    others = [take(table).index for _ in range(4)]
    assert home.index not in others[:2]
    assert [take(table, "s") for _ in range(3)] == [home] * 3


def test_a_session_waits_for_its_replica_though_another_is_free() -> None:
    async def body() -> None:
        table = make_table(2, limit=1)
        table.pin("s")
        home = take(table, "s")
        assert table.try_acquire(request("s")) is None
        (waiting,) = await queue_up(table, "s")
        table.release(take(table))  # the other replica's slot is not for it
        await settle()
        assert not waiting.done()
        table.release(home)
        assert await waiting is home

    drive(body())


def test_a_session_that_waits_for_its_replica_does_not_hold_up_others() -> None:
    async def body() -> None:
        table = make_table(2, limit=1)
        table.pin("s")
        home = take(table, "s")
        (pinned,) = await queue_up(table, "s")
        (plain,) = await queue_up(table, None)
        assert plain.done(), "the other replica is idle"
        assert plain.result() is not home
        table.release(home)
        assert await pinned is home

    drive(body())


def test_a_session_moves_when_its_replica_is_lost_and_stays_where_it_moved() -> None:
    table = make_table(2)
    table.pin("s")
    home = take(table, "s")
    table.update(entry(home.index, health="restarting", failure="killed"))
    other = take(table, "s")
    assert other is not home
    table.update(entry(home.index, generation=1))
    assert take(table, "s") is other


def test_sessions_are_counted_and_end_once() -> None:
    table = make_table()
    table.pin("a")
    table.pin("b")
    assert (table.num_sessions, table.knows_session("a")) == (2, True)
    assert [table.unpin("a"), table.unpin("a"), table.unpin("nobody")] == [True, False, False]
    assert (table.num_sessions, table.knows_session("a")) == (1, False)


def test_a_call_that_outlives_its_session_does_not_bring_it_back() -> None:
    table = make_table()
    table.pin("s")
    table.unpin("s")
    take(table, "s")
    assert (table.num_sessions, table.knows_session("s")) == (0, False)


def test_ending_a_session_does_not_end_the_calls_that_are_pinned_by_it() -> None:
    async def body() -> None:
        table = make_table(1, limit=1)
        table.pin("s")
        home = take(table, "s")
        (waiting,) = await queue_up(table, "s")
        table.unpin("s")
        table.release(home)
        assert await waiting is home
        assert table.num_sessions == 0

    drive(body())


def test_what_waited_for_a_sessions_replica_may_go_elsewhere_when_the_session_ends() -> None:
    async def body() -> None:
        table = make_table(2, limit=1)
        table.pin("s")
        home = take(table, "s")
        (waiting,) = await queue_up(table, "s")
        table.unpin("s")
        await settle()
        assert waiting.done()
        assert waiting.result() is not home
        assert table.try_acquire(request()) is None

    drive(body())


# ---- Where sessions start ----------------------------------------------------------------------------------------


def started(table: Any, names: range) -> list[int]:
    """Start sessions, each with one call that is answered before the next session starts."""
    homes = []
    for number in names:
        table.pin(str(number))
        target = take(table, str(number))
        table.release(target)
        homes.append(target.index)
    return homes


@pytest.mark.parametrize("router", BUILT_IN.values(), ids=BUILT_IN)
def test_sessions_spread_over_replicas_though_nothing_is_in_flight(router: Any) -> None:
    table = make_table(3, router=router)
    homes = started(table, range(300))
    assert Counter(homes) == {0: 100, 1: 100, 2: 100}
    assert [table.num_sessions_at(index) for index in range(3)] == [100] * 3
    for number in range(0, 300, 2):
        if homes[number] != 1:
            table.unpin(str(number))
    more = started(table, range(300, 400))
    assert Counter(more) == {0: 50, 2: 50}, "new ones go where others have ended"
    assert [table.num_sessions_at(index) for index in range(3)] == [100] * 3


@pytest.mark.parametrize("router", BUILT_IN.values(), ids=BUILT_IN)
def test_sessions_of_a_lost_replica_spread_over_the_others(router: Any) -> None:
    table = make_table(3, router=router)
    homes = started(table, range(90))
    table.update(entry(1, health="restarting", failure="killed"))
    for number in range(90):
        table.release(take(table, str(number)))
    assert [table.num_sessions_at(index) for index in range(3)] == [45, 0, 45]
    stayed = [take(table, str(number)).index == homes[number] for number in range(90)]
    assert sum(stayed) == 60, "the others have not moved"
    table.update(entry(1, generation=1))
    assert set(started(table, range(90, 130))) == {1}, "the new replica has none"


def test_calls_without_a_session_are_not_held_off_by_sessions() -> None:
    table = make_table(2)
    started(table, range(1))
    assert Counter(take(table).index for _ in range(10)) == {0: 5, 1: 5}


def test_a_router_of_the_users_own_sees_the_sessions() -> None:
    seen: list[list[int]] = []

    def router(states: Any, request: Any) -> int:
        seen.append([state.num_sessions for state in states])
        return 0

    table = make_table(2, router=router)
    assert started(table, range(3)) == [0, 0, 0]
    assert seen == [[0, 0], [1, 0], [2, 0]]


def test_no_session_leaves_a_trace() -> None:
    table = make_table(2)
    started(table, range(200))
    table.update(entry(0, health="restarting", failure="killed"))
    for number in range(200):
        if number % 3:
            take(table, str(number))
        table.unpin(str(number))
    assert (table.num_sessions, [table.num_sessions_at(index) for index in range(2)]) == (0, [0, 0])
