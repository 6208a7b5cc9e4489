"""The routing table: who gets a slot, who waits, in which order, and what ends the waiting."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import Counter
from typing import Any

import pytest

from forge.errors import ActorFailure, OptionError, Overloaded, ServiceStopped
from forge.runtime.pending_calls import PendingCalls
from forge.service.records import ReplicaState, Request
from forge.service.routing import least_loaded, round_robin
from forge.service.routing_table import RoutingTable
from forge.service.targets import Target
from stand_in_replica import LIMIT_S, drive, entry, make_table, queue_up, request, settle, take

# ---- choosing


def test_calls_go_round() -> None:
    table = make_table(3)
    assert [take(table).index for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_least_loaded_avoids_the_busy() -> None:
    table = make_table(2, router=least_loaded)
    first = take(table)
    table.release(take(table))
    assert [take(table).index, first.index] == [1, 0]


def test_a_users_router_sees_states_and_the_request_and_is_held_to_its_choice() -> None:
    seen: list[tuple[Any, Any]] = []

    def mine(states: tuple[ReplicaState, ...], asked: Request) -> int:
        seen.append((states, asked))
        return states[-1].index if len(seen) == 1 else 9

    table = make_table(2, router=mine)
    assert take(table, "s").index == 1
    assert seen == [((ReplicaState(0, 0, 0, 0, "box"), ReplicaState(1, 0, 0, 0, "box")), request("s"))]
    with pytest.raises(OptionError, match="did not choose"):
        table.try_acquire(request())
    assert [target.in_flight for target in table.live()] == [0, 1]


def test_a_target_reaches_its_own_replica() -> None:
    table = make_table(2)
    target = take(table)
    target.invoke("call")
    target.cancel(7)
    assert target.entry.actor._forge_invoke.sent == [("call",)]
    assert target.entry.actor._forge_cancel.sent == [(7,)]
    assert take(table).entry.actor._forge_invoke.sent == []


# ---- limits and the queue


def test_no_replica_gets_more_than_its_limit() -> None:
    table = make_table(2, limit=2)
    held = [take(table) for _ in range(4)]
    assert Counter(target.index for target in held) == {0: 2, 1: 2}
    assert table.try_acquire(request()) is None
    table.release(held[1])
    assert take(table).index == 1


def test_slots_go_to_those_who_have_waited_longest() -> None:
    async def body() -> None:
        table = make_table(1, limit=1)
        target = take(table)
        waiting = await queue_up(table, None, None, None)
        assert table.num_waiting == 3
        for task in waiting:
            assert not task.done()
            table.release(target)
            assert table.try_acquire(request()) is None  # nobody slips in between
            target = await task
        assert table.num_waiting == 0
        assert target.in_flight == 1

    drive(body())


def test_two_free_slots_wake_two_callers() -> None:
    async def body() -> None:
        table = make_table(2, limit=1)
        held = [take(table), take(table)]
        waiting = await queue_up(table, None, None, None)
        for target in held:
            table.release(target)
        await settle()
        assert [task.done() for task in waiting] == [True, True, False]
        waiting[2].cancel()
        await settle()

    drive(body())


def test_a_full_queue_pushes_back() -> None:
    async def body() -> None:
        table = make_table(1, limit=1, max_queue=1)
        target = take(table)
        (waiting,) = await queue_up(table, None)
        with pytest.raises(Overloaded) as caught:
            await table.acquire(request())
        error = caught.value
        assert error.message == "service policy: 1 calls already wait for a slot"
        assert (error.path, error.value) == ("options(max_queue=)", 1)
        assert error.rule
        assert error.repair
        assert table.num_rejected == 1
        table.release(target)
        assert (await waiting).index == 0

    drive(body())


def test_without_a_queue_nobody_waits_for_a_slot() -> None:
    async def body() -> None:
        table = make_table(1, limit=1, max_queue=0)
        target = take(table)
        with pytest.raises(Overloaded):
            await table.acquire(request())
        table.release(target)
        assert await table.acquire(request()) is target

    drive(body())


def test_one_that_gives_up_waiting_leaves_the_queue_intact() -> None:
    async def body() -> None:
        table = make_table(1, limit=1)
        target = take(table)
        first, second, third = await queue_up(table, None, None, None)
        second.cancel()
        await settle()
        assert table.num_waiting == 2
        table.release(target)
        first.cancel()  # it was woken for the slot, and does not take it
        assert await third is target
        assert (table.num_waiting, target.in_flight) == (0, 1)

    drive(body())


def test_a_session_does_not_jump_the_queue() -> None:
    async def body() -> None:
        table = make_table(1, limit=1)
        table.pin("s")
        target = take(table)
        first, second = await queue_up(table, None, None)
        table.release(target)
        assert table.try_acquire(request("s")) is None  # the slot is the first one's, who has been woken for it
        assert await first is target
        assert not second.done()
        table.release(target)
        assert await second is target

    drive(body())


def test_a_change_does_not_reorder_the_queue() -> None:
    """Every change of a replica wakes all who wait; those who get nothing stay where they were."""

    async def body() -> None:
        table = make_table(1, limit=1)
        target = take(table)
        first, second = await queue_up(table, None, None)
        third = asyncio.create_task(table.acquire(request()))
        table.update(entry(1, health="starting"))
        await settle()
        assert table.num_waiting == 3
        for task in (first, second, third):
            table.release(target)
            await settle()
            assert task.done(), "another one was served first"
        assert [task.result() for task in (first, second, third)] == [target] * 3

    drive(body())


# ---- replicas that come and go


def test_a_lost_replica_fails_its_pending_calls_and_gets_no_more() -> None:
    async def body() -> None:
        table = make_table(2)
        target = take(table)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        target.calls.add(reply, asyncio.get_running_loop())
        table.update(entry(0, health="restarting", failure="rank 0 ended"))
        with pytest.raises(ActorFailure, match="replica 0 of policy was lost: rank 0 ended"):
            await reply
        assert [one.index for one in table.live()] == [1]
        assert [take(table).index for _ in range(3)] == [1, 1, 1]

    drive(body())


def test_a_death_that_has_not_reached_the_table_yet_is_heeded() -> None:
    table = RoutingTable("policy", router=round_robin, limit=None, max_queue=None)
    calls = PendingCalls()
    table.update(entry(0), calls)
    table.update(entry(1))
    calls.fail(ActorFailure("gone"))
    assert [one.index for one in table.live()] == [1]
    assert [take(table).index for _ in range(2)] == [1, 1]


def test_a_new_generation_starts_empty_and_keeps_the_counts_and_its_turn() -> None:
    table = make_table(2, limit=1)
    old = take(table)
    old.num_ok, old.num_errors, old.num_lost = 5, 2, 1
    table.update(entry(0, generation=1))
    fresh = table.targets[0]
    assert fresh is not old
    assert old.calls.failure is not None
    assert (fresh.in_flight, fresh.last_used) == (0, 1)
    assert (fresh.num_ok, fresh.num_errors, fresh.num_lost) == (5, 2, 1)
    assert take(table).index == 1
    table.release(old)  # the call that was lost with it
    assert fresh.in_flight == 0


def test_the_same_generation_keeps_its_target() -> None:
    table = make_table(1)
    target = take(table)
    table.update(entry(0))
    assert table.targets[0] is target
    assert target.calls.failure is None


def test_callers_wait_while_replicas_restart_and_go_on_when_one_is_back() -> None:
    async def body() -> None:
        table = make_table(1, limit=2, max_queue=0)
        table.update(entry(0, health="restarting"))
        tasks = await queue_up(table, None, "s")
        assert table.num_waiting == 2
        table.update(entry(0, generation=1))
        assert {(await task).entry.generation for task in tasks} == {1}

    drive(body())


def test_a_stopped_service_says_so_to_new_callers_and_to_those_who_wait() -> None:
    async def body() -> None:
        table = make_table(2, limit=1)
        take(table), take(table)
        waiting = await queue_up(table, None, None)
        table.update(entry(0, health="stopped"))
        await settle()
        assert not any(task.done() for task in waiting)
        table.update(entry(1, health="stopped"))
        for caller in (*waiting, table.acquire(request())):
            with pytest.raises(ServiceStopped, match="service policy was shut down") as caught:
                await caller
            assert caught.value.path == "policy"
        assert table.num_waiting == 0

    drive(body())


def test_a_service_whose_replicas_were_all_given_up_says_why() -> None:
    async def body() -> None:
        table = make_table(2)
        table.update(entry(0, health="given_up", failure="out of memory"))
        assert take(table).index == 1
        table.update(entry(1, health="restarting"))
        (waiting,) = await queue_up(table, None)
        table.update(entry(1, health="given_up", failure="setup failed"))
        with pytest.raises(ServiceStopped, match="has no replica left") as caught:
            await waiting
        error = caught.value
        assert (error.path, error.value) == ("policy", {0: "out of memory", 1: "setup failed"})
        assert error.rule
        assert error.repair

    drive(body())


def test_a_table_that_knows_no_replica_yet_waits() -> None:
    async def body() -> None:
        table = make_table(0, limit=1)
        (waiting,) = await queue_up(table, None)
        assert not waiting.done()
        table.update(entry(0))
        assert (await waiting).index == 0

    drive(body())


def test_every_change_is_announced_once_to_each_who_asked() -> None:
    async def body() -> None:
        table = make_table(1)
        first, second, gone = table.next_change(), table.next_change(), table.next_change()
        gone.cancel()
        await settle()
        assert not first.done()
        table.update(entry(0, health="restarting"))
        await asyncio.gather(first, second)
        later = table.next_change()
        await settle()
        assert not later.done()
        table.update(entry(0, generation=1))
        await later
        kept = weakref.ref(later)
        del later
        gc.collect()
        assert kept() is None, "an announcement that was made is forgotten"

    drive(body())


# ---- several event loops


def test_a_slot_that_is_freed_on_one_loop_wakes_a_caller_on_another() -> None:
    table = make_table(1, limit=1)
    target = take(table)
    waits = threading.Event()
    got: list[Target] = []

    async def other() -> None:
        task = asyncio.create_task(table.acquire(request()))
        change = table.next_change()
        await settle()
        waits.set()
        got.append(await task)
        await change

    thread = threading.Thread(target=drive, args=(other(),))
    thread.start()
    assert waits.wait(LIMIT_S)
    table.release(target)
    table.update(entry(1, health="starting"))
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert got == [target]
    assert (target.in_flight, table.num_waiting) == (1, 0)


def test_two_loops_share_the_slots_and_lose_none() -> None:
    table = make_table(2, limit=2)
    guard = threading.Lock()
    in_use: Counter[int] = Counter()
    served: Counter[str] = Counter()
    start = threading.Barrier(2)

    async def caller(name: str) -> None:
        for _ in range(40):
            target = await table.acquire(request())
            with guard:
                in_use[target.index] += 1
                assert in_use[target.index] <= 2
            await asyncio.sleep(0)
            with guard:
                in_use[target.index] -= 1
                served[name] += 1
            table.release(target)

    async def many(name: str) -> None:
        await asyncio.gather(*(caller(name) for _ in range(8)))

    def work(name: str) -> None:
        start.wait(LIMIT_S)
        drive(many(name))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    assert served == {"a": 320, "b": 320}
    assert [target.in_flight for target in table.live()] == [0, 0]
    assert table.num_waiting == 0
