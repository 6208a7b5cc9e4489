"""The buffer: admission, batches, and the bound on staleness."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from episodes import make_group
from forge.config import AlgorithmConfig, RolloutConfig
from forge.errors import CheckpointError, RolloutError
from forge.rollout.buffer import REPORT_EVERY, ReplayBuffer
from forge.rollout.signal import NoSignalGroup
from forge.rollout.taken_batch import TakenBatch

EQUAL = (1.0, 1.0)


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, 600))


def buffer_of(*, num_groups: int | None = None, **keys: Any) -> ReplayBuffer:
    return ReplayBuffer(RolloutConfig(**{"batch_groups": 2, **keys}), num_groups=num_groups)


def buffer_for(preset: str, *, seen: list[NoSignalGroup] | None = None, **keys: Any) -> ReplayBuffer:
    """A buffer for an algorithm, which notes the groups that teach nothing."""

    def note(fruitless: NoSignalGroup) -> None:
        if seen is not None:
            seen.append(fruitless)

    algorithm = AlgorithmConfig(preset=preset)
    return ReplayBuffer(RolloutConfig(**{"batch_groups": 2, **keys}), algorithm=algorithm, on_no_signal=note)


async def admitted(buffer: ReplayBuffer) -> list[int]:
    """The numbers that the buffer lets begin now."""
    numbers: list[int] = []
    while True:
        asking = asyncio.ensure_future(buffer.admit())
        await asyncio.sleep(0)
        if not asking.done():
            asking.cancel()
            return numbers
        number = asking.result()
        if number is None:
            return numbers
        numbers.append(number)


async def waits(coroutine: Coroutine[Any, Any, Any]) -> bool:
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    is_waiting = not task.done()
    task.cancel()
    return is_waiting


def test_synchronous_admits_one_batch_and_the_next_when_its_weights_are_served() -> None:
    async def body() -> None:
        buffer = buffer_of()
        assert await admitted(buffer) == [0, 1]
        buffer.put(make_group(1))
        assert await waits(buffer.take())
        buffer.put(make_group(0))
        taken = await buffer.take()
        assert taken is not None
        assert ([group.number for group in taken.groups], taken.index) == ([0, 1], 0)
        assert await admitted(buffer) == []
        buffer.commit()
        assert await admitted(buffer) == []
        buffer.serve(1)
        assert await admitted(buffer) == [2, 3]

    run(body())


def test_asynchronous_admits_so_many_batches_more() -> None:
    async def body() -> None:
        buffer = buffer_of(staleness=2)
        assert await admitted(buffer) == [0, 1, 2, 3, 4, 5]
        for number in (3, 5):
            buffer.put(make_group(number))
        taken = await buffer.take()
        assert taken is not None
        assert [group.number for group in taken.groups] == [3, 5]
        assert await admitted(buffer) == []  # it is being trained on: version 0 still serves
        buffer.commit()
        buffer.serve(1)
        assert await admitted(buffer) == [6, 7]

    run(body())


def test_a_batch_waits_for_those_that_would_be_too_old_for_the_next() -> None:
    async def body() -> None:
        buffer = buffer_of(staleness=1)
        assert await admitted(buffer) == [0, 1, 2, 3]
        for number in (1, 2):
            buffer.put(make_group(number))
        assert (await buffer.take()) is not None
        buffer.commit()
        buffer.serve(1)
        assert await admitted(buffer) == [4, 5]
        for number in (4, 5):
            buffer.put(make_group(number, version=1))
        assert await waits(buffer.take())  # 0 and 3 were begun with version 0 and would be too old for batch 2
        buffer.put(make_group(0))
        buffer.put(make_group(3))
        taken = await buffer.take()
        assert taken is not None
        assert ([group.number for group in taken.groups], taken.staleness) == ([0, 3], (1, 1))

    run(body())


def test_what_is_too_old_all_the_same_goes_back_to_the_queue() -> None:
    async def body() -> None:
        buffer = buffer_of()
        buffer.load({"next_number": 4, "pending": [], "num_taken": 3})
        assert await admitted(buffer) == [4, 5]
        buffer.put(make_group(4, version=2))  # a generator was behind
        buffer.put(make_group(5, version=3))
        assert await waits(buffer.take())
        assert await admitted(buffer) == [4]
        buffer.put(make_group(4, version=3))
        taken = await buffer.take()
        assert taken is not None
        assert (taken.num_stale, taken.staleness, buffer.counts.num_stale) == (1, (0, 0), 1)

    run(body())


@pytest.mark.parametrize("rule", ["replace", "drop", "keep"])
def test_what_is_too_old_is_not_given_up_for_its_rewards(rule: str) -> None:
    """The weights of now may tell its completions apart."""

    async def body() -> None:
        buffer = buffer_of(no_signal=rule)
        buffer.load({"next_number": 2, "pending": [0, 1], "num_taken": 3})
        assert await admitted(buffer) == [0, 1]
        buffer.put(make_group(0, EQUAL, version=2))
        assert (buffer.counts.num_stale, buffer.counts.num_no_signal) == (1, 0)
        assert await admitted(buffer) == [0]
        buffer.put(make_group(0, version=3))
        buffer.put(make_group(1, version=3))
        taken = await buffer.take()
        assert taken is not None
        assert ([group.number for group in taken.groups], taken.drops, taken.num_stale) == ([0, 1], (), 1)

    run(body())


def test_groups_without_signal_are_replaced_dropped_or_kept() -> None:
    async def body(rule: str) -> tuple[list[int], list[int], TakenBatch]:
        buffer = buffer_of(no_signal=rule)
        first = await admitted(buffer)
        buffer.put(make_group(0, EQUAL))
        buffer.put(make_group(1))
        more = await admitted(buffer)
        for number in more:
            buffer.put(make_group(number))
        taken = await buffer.take()
        assert taken is not None
        assert buffer.pending == tuple(range(buffer.next_number))
        buffer.commit()
        assert buffer.pending == ()
        return first, more, taken

    _, more, taken = run(body("replace"))
    assert taken.rewards == (0.0, 1.0, 0.0, 1.0, 1.0, 1.0)
    assert (tuple(each.reward for each in taken.dropped), taken.num_no_signal) == (EQUAL, 1)
    assert (more, [group.number for group in taken.groups], taken.drops) == ([2], [1, 2], ((0, "no_signal"),))
    _, more, taken = run(body("drop"))
    assert (taken.rewards, taken.num_no_signal) == ((0.0, 1.0, 1.0, 1.0), 1)
    assert (more, [group.number for group in taken.groups], taken.drops) == ([], [1], ((0, "no_signal"),))
    _, more, taken = run(body("keep"))
    assert (more, [group.number for group in taken.groups], taken.drops) == ([], [0, 1], ())
    assert (taken.rewards, taken.num_no_signal) == ((1.0, 1.0, 0.0, 1.0), 1)


def test_a_batch_of_which_everything_is_dropped_is_no_step() -> None:
    async def body() -> None:
        buffer = buffer_of()
        await admitted(buffer)
        buffer.put(make_group(0, EQUAL))
        buffer.put(make_group(1, EQUAL))
        taking = asyncio.ensure_future(buffer.take())
        await asyncio.sleep(0)
        assert not taking.done()
        assert buffer.num_taken == 0
        assert await admitted(buffer) == [2, 3]
        buffer.put(make_group(2))
        buffer.put(make_group(3))
        taken = await taking
        assert taken is not None
        assert (taken.index, taken.drops) == (0, ((0, "no_signal"), (1, "no_signal")))

    run(body())


def test_completions_that_are_all_masked_teach_nothing_whatever_the_rule() -> None:
    async def body() -> None:
        buffer = buffer_of(no_signal="keep", mask_truncated=True)
        await admitted(buffer)
        buffer.put(make_group(0, finish_reason="length"))
        buffer.put(make_group(1))
        taken = await buffer.take()
        assert taken is not None
        assert [group.number for group in taken.groups] == [1]

    run(body())


def test_too_many_groups_in_a_row_without_signal_end_the_run() -> None:
    async def body() -> None:
        buffer = buffer_of(no_signal="replace", max_no_signal_groups=3)
        await admitted(buffer)
        buffer.put(make_group(0, EQUAL))
        buffer.drop(1, "failed")
        await admitted(buffer)
        with pytest.raises(RolloutError, match="3 groups in a row") as caught:
            buffer.put(make_group(2, EQUAL))
        assert caught.value.path == "rollout.max_no_signal_groups"
        assert caught.value.value == "3 groups: all rewards are equal (2 groups), a reward failed (1 group)"
        assert buffer.pending == (0, 1, 2, 3)  # nothing is lost: a checkpoint can be made now

    run(body())


def test_signal_begins_the_count_again() -> None:
    async def body() -> None:
        buffer = buffer_of(no_signal="replace", max_no_signal_groups=2, batch_groups=8)
        await admitted(buffer)
        for number in range(0, 8, 2):
            buffer.put(make_group(number, EQUAL))
            buffer.put(make_group(number + 1))
        assert buffer.counts.num_no_signal == 4

    run(body())


def test_the_last_batch_may_be_smaller_and_then_it_is_over() -> None:
    async def body() -> None:
        buffer = buffer_of(num_groups=3)
        for number in await admitted(buffer):
            buffer.put(make_group(number))
        assert (await buffer.take()) is not None
        buffer.commit()
        buffer.serve(1)
        assert await admitted(buffer) == [2]
        buffer.put(make_group(2, version=1))
        taken = await buffer.take()
        assert taken is not None
        assert [group.number for group in taken.groups] == [2]
        buffer.commit()
        buffer.serve(2)
        assert (await buffer.take(), await buffer.admit()) == (None, None)

    run(body())


def test_a_run_that_learned_before_it_was_resumed_may_end_without_signal() -> None:
    """What was given up after the last batch is pending in its checkpoint, and comes again."""

    async def body(num_taken: int) -> None:
        buffer = buffer_of(num_groups=4)
        buffer.load({"next_number": 4, "pending": [2, 3], "num_taken": num_taken})
        for number in await admitted(buffer):
            buffer.put(make_group(number, EQUAL, version=num_taken))
        assert await buffer.take() is None
        buffer.check_any_signal()

    run(body(1))
    with pytest.raises(RolloutError, match="prompts are exhausted"):
        run(body(0))


def test_rollouts_are_not_over_while_a_group_may_come_back() -> None:
    async def body() -> None:
        buffer = buffer_of(num_groups=2)
        assert await admitted(buffer) == [0, 1]
        for number in (0, 1):
            buffer.put(make_group(number))
        assert await waits(buffer.admit())
        assert await buffer.take() is not None
        buffer.commit()
        assert await buffer.admit() is None

    run(body())


def test_groups_in_flight_are_limited_besides() -> None:
    async def body() -> None:
        buffer = buffer_of(staleness=3, max_in_flight=3)
        assert await admitted(buffer) == [0, 1, 2]
        buffer.put(make_group(1))
        assert await admitted(buffer) == [3]

    run(body())


def test_a_batch_that_was_not_settled_counts_as_not_taken() -> None:
    async def body() -> None:
        buffer = buffer_of(no_signal="replace")
        await admitted(buffer)
        buffer.put(make_group(0, EQUAL))
        for number in (*await admitted(buffer), 1):
            buffer.put(make_group(number))
        assert (await buffer.take()) is not None
        assert buffer.state() == {"next_number": 3, "pending": [0, 1, 2], "num_taken": 0}
        with pytest.raises(RuntimeError, match="not been committed"):
            await buffer.take()
        buffer.commit()
        assert buffer.state() == {"next_number": 3, "pending": [], "num_taken": 1}

    run(body())


def test_after_a_resume_groups_come_in_the_order_of_their_numbers() -> None:
    """Else a synchronous run would not learn from the same groups together as one that nothing disturbed."""

    async def body() -> None:
        buffer = buffer_of()
        buffer.load({"next_number": 9, "pending": [8, 2, 5, 3], "num_taken": 4})
        assert await admitted(buffer) == [2, 3]
        for number in (2, 3):
            buffer.put(make_group(number, version=4))
        assert await buffer.take() is not None
        buffer.commit()
        buffer.serve(5)
        assert await admitted(buffer) == [5, 8]

    run(body())


def test_the_oldest_weights_are_learned_from_first() -> None:
    async def body() -> None:
        buffer = buffer_of(staleness=2)
        assert await admitted(buffer) == [0, 1, 2, 3, 4, 5]
        for number in (4, 5):
            buffer.put(make_group(number))
        assert await buffer.take() is not None
        buffer.commit()
        buffer.serve(1)
        for number in (0, 1):
            buffer.requeue(number)
        assert await admitted(buffer) == [0, 1, 6, 7]
        for number, version in ((0, 1), (1, 1), (2, 0), (3, 0)):
            buffer.put(make_group(number, version=version))
        taken = await buffer.take()
        assert taken is not None
        assert [group.number for group in taken.groups] == [2, 3]

    run(body())


def test_a_checkpoint_that_contradicts_the_ledger_is_refused() -> None:
    with pytest.raises(CheckpointError, match="disagree") as caught:
        buffer_of().load({"next_number": 5, "pending": [3, 4], "num_taken": 1}, committed=[0, 3])
    assert caught.value.value == [3]


@pytest.mark.parametrize("rule", ["drop", "replace", "keep"])
def test_where_the_batch_is_the_baseline_equal_rewards_are_learned_from(rule: str) -> None:
    async def body() -> None:
        buffer = buffer_for("reinforce_pp", no_signal=rule)
        await admitted(buffer)
        buffer.put(make_group(0, (0.0, 0.0)))
        buffer.put(make_group(1, (1.0, 1.0)))
        taken = await buffer.take()
        assert taken is not None
        assert ([group.number for group in taken.groups], taken.num_no_signal) == ([0, 1], 0)
        assert (buffer.counts.num_no_signal, buffer.tally.num_groups) == (0, 0)

    run(body())


@pytest.mark.parametrize("rule", ["drop", "replace"])
def test_a_batch_that_does_not_differ_from_itself_is_no_step_and_ends_the_run_in_the_end(rule: str) -> None:
    async def body() -> None:
        seen: list[NoSignalGroup] = []
        buffer = buffer_for("reinforce_pp", seen=seen, no_signal=rule, max_no_signal_groups=4)
        taking = asyncio.ensure_future(buffer.take())
        for number in await admitted(buffer):
            buffer.put(make_group(number, (0.0, 0.0)))
        assert [await buffer.admit(), await buffer.admit()] == [2, 3]
        assert (buffer.num_taken, buffer.uncommitted_drops) == (0, ((0, "no_signal"), (1, "no_signal")))
        buffer.put(make_group(2, (0.0, 0.0)))
        buffer.put(make_group(3, (0.0, 0.0)))
        with pytest.raises(RolloutError, match="4 groups in a row") as caught:
            await taking
        assert caught.value.value == "4 groups: all rewards are 0 (4 groups)"
        assert buffer.pending == (0, 1, 2, 3)
        assert [each.number for each in seen] == [0, 1, 2, 3]

    run(body())


def test_a_batch_without_signal_may_be_kept_and_is_counted() -> None:
    async def body() -> None:
        seen: list[NoSignalGroup] = []
        buffer = buffer_for("reinforce_pp", seen=seen, no_signal="keep")
        for number in await admitted(buffer):
            buffer.put(make_group(number, EQUAL))
        taken = await buffer.take()
        assert taken is not None
        assert (len(taken.groups), taken.num_no_signal, taken.drops) == (2, 2, ())
        assert [(each.number, each.is_kept) for each in seen] == [(0, True), (1, True)]

    run(body())


def test_the_log_says_every_so_often_why_nothing_is_learned(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        buffer = buffer_of(no_signal="replace", batch_groups=1)
        for number in range(2 * REPORT_EVERY):
            assert await admitted(buffer) == [number]
            buffer.put(make_group(number, (0.0, 0.0)))

    run(body())
    assert [record.getMessage() for record in caplog.records if record.name == "forge.rollout"] == [
        f"{count} groups in a row brought nothing to learn from; the run ends at 1000: "
        f"all rewards are 0 ({count} groups)"
        for count in (REPORT_EVERY, 2 * REPORT_EVERY)
    ]


def test_what_was_dropped_since_the_last_step_is_known_wherever_it_waits() -> None:
    async def body() -> None:
        buffer = buffer_of(batch_groups=3)
        await admitted(buffer)
        buffer.put(make_group(0, EQUAL))  # waits for its batch
        buffer.drop(1, "refused")
        assert buffer.uncommitted_drops == ((0, "no_signal"), (1, "refused"))
        for number in (2, *await admitted(buffer)):
            buffer.put(make_group(number))
        taken = await buffer.take()
        assert taken is not None
        assert taken.drops == buffer.uncommitted_drops == ((0, "no_signal"), (1, "refused"))
        buffer.commit()
        assert buffer.uncommitted_drops == ()

    run(body())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch_groups=st.integers(1, 4),
    staleness=st.integers(0, 3),
    rule=st.sampled_from(["drop", "replace", "keep"]),
    num_groups=st.one_of(st.none(), st.integers(1, 40)),
    most=st.one_of(st.none(), st.integers(1, 6)),
)
def test_in_any_order_the_bound_holds_and_no_group_is_lost_or_twice(
    seed: int, batch_groups: int, staleness: int, rule: str, num_groups: int | None, most: int | None
) -> None:
    """A storm: groups end in any order, fail, go back; updates lag; kills fall anywhere."""
    chance = random.Random(seed)

    async def body() -> None:
        keys = {"batch_groups": batch_groups, "staleness": staleness, "no_signal": rule, "max_in_flight": most}
        buffer = buffer_of(num_groups=num_groups, **keys)
        settled: list[int] = []
        kept, kept_settled, lagging = buffer.state(), list(settled), 0
        for _ in range(200):
            await admitted(buffer)
            flying = buffer.in_flight
            number = chance.choice(sorted(flying)) if flying else None
            what = chance.random()
            if number is not None and what < 0.6:
                version = flying[number] + chance.randint(0, buffer.version - flying[number])
                rewards = EQUAL if chance.random() < 0.3 else (0.0, 1.0)
                buffer.put(make_group(number, rewards, version=version))
            elif number is not None and what < 0.65:
                buffer.drop(number, "failed")
            elif number is not None and what < 0.7:
                buffer.requeue(number)
            elif what < 0.95:
                taking = asyncio.ensure_future(buffer.take())
                await asyncio.sleep(0)
                if not taking.done():
                    taking.cancel()
                    await asyncio.wait([taking])
                elif (taken := taking.result()) is not None:
                    assert all(0 <= old <= staleness for old in taken.staleness), "the bound"
                    assert len(taken.groups) <= batch_groups
                    if chance.random() < 0.9:
                        settled += [group.number for group in taken.groups] + [each for each, _ in taken.drops]
                    else:  # the step fails, and the run is taken up again
                        buffer, settled = revived(kept, num_groups, keys), list(kept_settled)
                        lagging = 0
                        continue
                    buffer.commit()
                    lagging += 1
                    if chance.random() < 0.5:
                        kept, kept_settled = buffer.state(), list(settled)
                if lagging and (staleness == 0 or chance.random() < 0.7):
                    lagging = 0
                    buffer.serve(buffer.num_taken)
            else:  # kill -9
                buffer, settled, lagging = revived(kept, num_groups, keys), list(kept_settled), 0
            assert sorted([*settled, *buffer.pending]) == list(range(buffer.next_number)), "lost or twice"

    def revived(state: dict[str, Any], num_groups: int | None, keys: dict[str, Any]) -> ReplayBuffer:
        again = buffer_of(num_groups=num_groups, **keys)
        again.load(state)
        return again

    run(body())


def test_episodes_without_a_token_do_not_make_their_group_old() -> None:
    async def body() -> None:
        buffer = buffer_of(num_groups=3, batch_groups=1, staleness=0)
        for version, number in enumerate(await admitted(buffer)):
            group = make_group(number, (0.0, 1.0), version=version)
            silent = replace(group.episodes[0], turns=())
            buffer.put(replace(group, episodes=(silent, group.episodes[1])))
        taken = await buffer.take()
        assert taken is not None
        assert (len(taken.groups), taken.num_stale, taken.staleness) == (1, 0, (0,))
        buffer.commit()
        buffer.serve(1)
        (number,) = await admitted(buffer)
        group = make_group(number, (0.0, 1.0), version=1)
        buffer.put(replace(group, episodes=tuple(replace(each, turns=()) for each in group.episodes)))
        assert (buffer.counts.num_stale, buffer.uncommitted_drops) == (0, ((number, "empty"),))

    run(body())
