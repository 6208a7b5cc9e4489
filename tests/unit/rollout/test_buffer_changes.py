"""The bound and the size of batches change while a run runs: what becomes of groups that were admitted before."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from episodes import make_group
from forge.config import RolloutConfig
from forge.rollout.buffer import ReplayBuffer
from forge.rollout.taken_batch import TakenBatch


async def admitted(buffer: ReplayBuffer) -> list[int]:
    """The numbers that the buffer lets begin now."""
    numbers = []
    while (number := await at_once(buffer.admit())) is not None:
        numbers.append(number)
    return numbers


async def at_once(asking: Any) -> Any:
    """What a coroutine returns without having to wait; None where it waits."""
    task = asyncio.ensure_future(asking)
    await asyncio.sleep(0)
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
        return None
    return task.result()


async def learned(buffer: ReplayBuffer) -> list[int]:
    """The groups of the next batch, which is learned from and served."""
    taken: TakenBatch | None = await at_once(buffer.take())
    assert taken is not None
    buffer.commit()
    buffer.serve(buffer.num_taken)
    return [group.number for group in taken.groups]


def buffer_of(**keys: Any) -> ReplayBuffer:
    return ReplayBuffer(RolloutConfig(**{"batch_groups": 2, **keys}))


def run(body: Any) -> None:
    asyncio.run(asyncio.wait_for(body(), 600))


def test_a_smaller_bound_requeues_what_is_too_old_and_waits_for_none_of_it() -> None:
    async def body() -> None:
        buffer = buffer_of(staleness=2)
        assert await admitted(buffer) == [0, 1, 2, 3, 4, 5]
        for number in (0, 1, 2):
            buffer.put(make_group(number))
        assert await learned(buffer) == [0, 1]
        assert await admitted(buffer) == [6, 7]
        buffer.change(staleness=0, batch_groups=2)
        assert buffer.counts.num_stale == 1, "group 2 was ready, and is of version 0"
        buffer.put(make_group(3))  # in flight then, and of version 0
        assert buffer.counts.num_stale == 2
        assert await admitted(buffer) == [], "4 to 7 are in flight, more than the new bound admits"
        buffer.put(make_group(4, version=1))  # waited at a generator, which sampled it with the new weights
        buffer.put(make_group(6, version=1))
        assert await at_once(buffer.take()) is None, "7 is due: it began with the weights that learn next"
        buffer.put(make_group(7, version=1))
        assert await learned(buffer) == [4, 6], "5 began with version 0, and is not waited for"
        buffer.put(make_group(5))
        assert await at_once(buffer.take()) is None
        assert buffer.counts.num_stale == 4, "5, and 7, which version 1 sampled"
        assert await admitted(buffer) == [2, 3]

    run(body)


def test_a_larger_bound_admits_more_at_once() -> None:
    async def body() -> None:
        buffer = buffer_of(staleness=0)
        assert await admitted(buffer) == [0, 1]
        buffer.change(staleness=1, batch_groups=2)
        assert await admitted(buffer) == [2, 3]

    run(body)


def test_smaller_batches_hold_the_oldest_and_what_is_too_old_then_is_requeued() -> None:
    async def body() -> None:
        buffer = buffer_of(batch_groups=4, staleness=1)
        for number in await admitted(buffer):
            buffer.put(make_group(number))
        assert await learned(buffer) == [0, 1, 2, 3]
        buffer.change(staleness=1, batch_groups=1)
        assert buffer.batch_groups == 1
        assert await admitted(buffer) == [], "four are ready, more than two batches of one"
        assert await learned(buffer) == [4]
        assert await at_once(buffer.take()) is None
        assert buffer.counts.num_stale == 3, "5, 6 and 7 are of version 0, and batch 2 takes none below 1"
        assert await admitted(buffer) == [5, 6]

    run(body)


def test_larger_batches_wait_for_more_groups() -> None:
    async def body() -> None:
        buffer = buffer_of(batch_groups=1, staleness=0)
        assert await admitted(buffer) == [0]
        buffer.change(staleness=0, batch_groups=3)
        assert await admitted(buffer) == [1, 2]
        buffer.put(make_group(0))
        assert await at_once(buffer.take()) is None
        buffer.put(make_group(1))
        buffer.put(make_group(2))
        assert await learned(buffer) == [0, 1, 2]

    run(body)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rule=st.sampled_from(["drop", "replace", "keep"]))
def test_in_any_order_the_bound_in_force_holds_and_no_group_is_lost_or_twice(seed: int, rule: str) -> None:
    """A storm with changes between batches. In the end, everything that was admitted can still be learned from."""
    chance = random.Random(seed)

    def limits() -> dict[str, int]:
        return {"staleness": chance.randint(0, 3), "batch_groups": chance.randint(1, 4)}

    async def body() -> None:
        chosen = limits()
        buffer = buffer_of(no_signal=rule, max_no_signal_groups=10**6, **chosen)
        done: list[int] = []

        def finish(number: int, *, fails: float = 0.0) -> None:
            began = buffer.in_flight[number]
            rewards = (1.0, 1.0) if chance.random() < fails else (0.0, 1.0)
            buffer.put(make_group(number, rewards, version=chance.randint(began, buffer.version)))

        async def learn() -> bool:
            taken = await at_once(buffer.take())
            if taken is None:
                return False
            assert all(0 <= old <= chosen["staleness"] for old in taken.staleness), "the bound"
            assert 0 < len(taken.groups) <= chosen["batch_groups"]
            done.extend([*(group.number for group in taken.groups), *(number for number, _ in taken.drops)])
            buffer.commit()
            return True

        for _ in range(150):
            await admitted(buffer)
            what, flying = chance.random(), sorted(buffer.in_flight)
            if flying and what < 0.6:
                finish(chance.choice(flying), fails=0.2)
            elif flying and what < 0.65:
                buffer.requeue(chance.choice(flying))
            elif await learn():
                if chance.random() < 0.3:
                    chosen = limits()
                    buffer.change(**chosen)
                if chosen["staleness"] == 0 or chance.random() < 0.7:
                    buffer.serve(buffer.num_taken)
            assert sorted([*done, *buffer.pending]) == list(range(buffer.next_number)), "lost or twice"
        buffer.serve(buffer.num_taken)
        num_done = len(done)
        for _ in range(60):  # a run that goes on undisturbed makes progress
            for number in [*await admitted(buffer), *buffer.in_flight]:
                if number in buffer.in_flight:
                    finish(number)
            if await learn():
                buffer.serve(buffer.num_taken)
        assert len(done) > num_done

    run(body)
