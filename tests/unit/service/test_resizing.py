"""Resizing without processes: which replicas come and go, and what a routing table does with one that leaves."""

from __future__ import annotations

import asyncio

from forge.service.resizing import indices_to_add, indices_to_remove
from stand_in_replica import drive, entry, make_table, request, settle, take

# ---- which


def test_new_replicas_get_the_lowest_free_indices() -> None:
    assert indices_to_add([0, 1], 2) == (2, 3)
    assert indices_to_add([0, 2, 5], 3) == (1, 3, 4)
    assert indices_to_add([3], 0) == ()


def test_dropped_and_unhealthy_replicas_leave_first() -> None:
    present = {0: "given_up", 1: "healthy", 2: "restarting", 3: "healthy", 4: "healthy"}
    assert indices_to_remove(present, 4) == (0, 2, 4, 3)  # type: ignore[arg-type]
    assert indices_to_remove(present, 0) == ()  # type: ignore[arg-type]


# ---- the table


def leaving(index: int, *, keeps_sessions: bool = False):
    from dataclasses import replace

    return replace(entry(index, health="draining"), keeps_sessions=keeps_sessions)


def test_calls_in_flight_end_and_no_new_ones_come() -> None:
    async def body() -> None:
        table = make_table(2)
        kept, left = take(table), take(table)
        table.update(leaving(1))
        drained = asyncio.create_task(table.wait_drained(1))
        assert [take(table).index for _ in range(3)] == [0, 0, 0]
        assert [target.index for target in table.hold_live()] == [0]
        await settle()
        assert left.calls.failure is None
        assert not drained.done()
        table.release(left)
        await drained
        table.update(entry(1, health="removed"))
        assert list(table.entries) == [0]
        assert left.calls.failure is not None
        assert kept.calls.failure is None

    drive(body())


def test_a_call_to_all_replicas_keeps_one_from_being_drained() -> None:
    table = make_table(2)
    held = table.hold_live()
    table.update(leaving(1))
    assert not table.is_drained(1)
    table.let_go(held)
    assert table.is_drained(1)


def test_sessions_move_or_are_waited_for() -> None:
    async def body() -> None:
        for keeps, later in ((False, 0), (True, 1)):
            table = make_table(2)
            table.release(take(table))
            table.pin("s")
            table.release(take(table, "s"))
            table.update(leaving(1, keeps_sessions=keeps))
            assert table.is_drained(1) is not keeps
            target = take(table, "s")
            assert target.index == later
            table.release(target)
            drained = asyncio.create_task(table.wait_drained(1))
            await settle()
            assert drained.done() is not keeps
            table.unpin("s")
            await drained

    drive(body())


def test_the_sessions_of_a_removed_replica_choose_another() -> None:
    table = make_table(2)
    table.pin("s")
    first = take(table, "s").index
    table.update(entry(first, health="removed"))
    assert table.num_sessions_at(first) == 0
    assert take(table, "s").index != first
    assert table.try_acquire(request("s")) is not None
