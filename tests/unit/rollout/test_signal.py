"""Which groups have signal: every algorithm, every rule, groups of one included."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, get_args

import pytest

from episodes import make_group, with_turn
from forge.config import AlgorithmConfig, GRPOConfig, OverlongConfig, RewardConfig, RewardsConfig, RolloutConfig
from forge.config.algorithm import AdvantageConfig, KLConfig, Preset
from forge.rollout.buffer import ReplayBuffer
from forge.rollout.signal import NoSignalGroup, SignalTest
from forge.rollout.taken_batch import TakenBatch
from forge.types import Group, Score

PRESETS = get_args(Preset)
GRPO = AlgorithmConfig()
BY_ITSELF = ("reinforce",)  # a reward is compared with nothing
BY_BATCH = ("reinforce_pp",)  # with the batch
BY_CRITIC = ("ppo",)  # with what a critic expects
BY_GROUP = tuple(preset for preset in PRESETS if preset not in (*BY_ITSELF, *BY_BATCH, *BY_CRITIC))


def taken_of(preset: str, rule: str, rewards: list[tuple[float, ...]]) -> tuple[list[int], int]:
    """Which of these groups a step learns from, and how many had no signal. None of them: no step."""

    async def body() -> TakenBatch | None:
        config = RolloutConfig(batch_groups=len(rewards), group_size=len(rewards[0]), no_signal=rule)
        buffer = ReplayBuffer(config, algorithm=AlgorithmConfig(preset=preset), num_groups=len(rewards))
        for number, each in enumerate(rewards):
            assert await buffer.admit() == number
            buffer.put(make_group(number, each))
        return await buffer.take()

    taken = asyncio.run(asyncio.wait_for(body(), 600))
    return ([], len(rewards)) if taken is None else ([group.number for group in taken.groups], taken.num_no_signal)


@pytest.mark.parametrize("rule", ["drop", "replace", "keep"])
@pytest.mark.parametrize("preset", PRESETS)
def test_groups_of_several(preset: str, rule: str) -> None:
    learned, num_no_signal = taken_of(preset, rule, [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)])
    lacking = {0, 1} if preset in BY_GROUP else {0} if preset in BY_ITSELF else set()
    assert set(learned) == ({0, 1, 2} if rule == "keep" else {0, 1, 2} - lacking)
    assert num_no_signal == len(lacking)


@pytest.mark.parametrize("rule", ["drop", "replace", "keep"])
@pytest.mark.parametrize("preset", [*BY_ITSELF, *BY_BATCH, *BY_CRITIC])
def test_groups_of_one(preset: str, rule: str) -> None:
    learned, num_no_signal = taken_of(preset, rule, [(0.0,), (1.0,), (0.5,)])
    lacking = {0} if preset in BY_ITSELF else set()
    assert set(learned) == ({0, 1, 2} if rule == "keep" else {0, 1, 2} - lacking)
    assert num_no_signal == len(lacking)


@pytest.mark.parametrize("rule", ["drop", "replace", "keep"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_configuration_is_refused_where_its_groups_could_never_have_signal(preset: str, rule: str) -> None:
    def config(group_size: int, batch_groups: int) -> GRPOConfig:
        rollout = {"group_size": group_size, "batch_groups": batch_groups, "no_signal": rule}
        return GRPOConfig(algorithm={"preset": preset}, rollout=rollout)

    config(2, 1)
    if preset in BY_GROUP:
        with pytest.raises(ValueError, match="a completion alone is its own baseline"):
            config(1, 8)
        return
    config(1, 2)
    if preset in BY_BATCH:
        with pytest.raises(ValueError, match="compared with each other"):
            config(1, 1)
    else:
        config(1, 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_configuration_admits_can_be_learned_from(preset: str) -> None:
    """The smallest groups that validation lets through have signal when rewards differ."""
    size = 2 if preset in BY_GROUP else 1
    rewards = [tuple(float(number + place) for place in range(size)) for number in range(2)]
    learned, _ = taken_of(preset, "drop", rewards)
    assert learned == ([1] if preset in BY_ITSELF else [0, 1])  # a reward of 0 without a baseline teaches nothing


def test_rounding_is_not_signal() -> None:
    grpo, plain = SignalTest(GRPO), SignalTest(AlgorithmConfig(preset="reinforce"))
    assert not grpo.passes([make_group(0, (0.1 + 0.2, 0.3))])
    assert grpo.passes([make_group(0, (0.0, 1e-6))])
    assert not plain.passes([make_group(0, (0.1 + 0.2 - 0.3, 0.0))])
    assert plain.passes([make_group(0, (1e-6, 1e-6))])


@pytest.mark.parametrize(
    ("keys", "is_of_batch"),
    [
        ({}, False),
        ({"scale": "batch_std"}, False),
        ({"whiten": True, "scale": "none"}, False),
        ({"baseline": "leave_one_out", "whiten": True}, False),
        ({"baseline": "leave_one_out", "scale": "others_std"}, False),
        ({"baseline": "leave_one_out", "scale": "others_std", "whiten": True}, True),
        ({"whiten": True, "whiten_over": "tokens"}, True),
        ({"whiten_over": "tokens"}, False),
        ({"baseline": "none"}, False),
        ({"baseline": "none", "whiten": True}, True),
        ({"baseline": "batch_mean"}, True),
    ],
)
def test_only_a_batch_can_tell_where_it_moves_the_advantages_of_a_group(keys: Any, is_of_batch: bool) -> None:
    assert SignalTest(AlgorithmConfig(advantage=AdvantageConfig(**keys))).is_of_batch == is_of_batch


def test_whitening_over_tokens_moves_groups_of_equal_rewards() -> None:
    test = SignalTest(AlgorithmConfig(preset="reinforce_pp_baseline", convention="verl"))
    assert test.is_of_batch
    assert test.passes([make_group(0, (1.0, 1.0)), make_group(1, (0.0, 1.0))])
    assert not test.passes([make_group(0, (1.0, 1.0)), make_group(1, (0.0, 0.0))])


def test_a_divergence_that_single_tokens_pay_for_is_signal_but_not_for_dynamic_sampling() -> None:
    algorithm = AlgorithmConfig(kl=KLConfig(coefficient=0.1, place="reward", credit="token"))
    group = make_group(0, (1.0, 1.0))
    same = _with_reference(group, 0.0)
    apart = _with_reference(group, -0.5)
    assert not SignalTest(algorithm).passes([same])
    assert SignalTest(algorithm).passes([apart])
    assert not SignalTest(algorithm, before_shaping=True).passes([apart])


def _with_reference(group: Group, difference: float) -> Group:
    """The group with a reference whose logprobs differ from the sampler's by a constant."""
    references = (tuple(value + difference for value in each.logprobs) for each in group.episodes)
    pairs = zip(group.episodes, references, strict=True)
    return replace(group, episodes=tuple(replace(each, ref_logprobs=reference) for each, reference in pairs))


def shaped(number: int, rewards: tuple[float, ...], unshaped: tuple[float, ...]) -> Group:
    group = make_group(number, rewards)
    scores = [replace(each.score, unshaped=value) for each, value in zip(group.episodes, unshaped, strict=True)]
    pairs = zip(group.episodes, scores, strict=True)
    return replace(group, episodes=tuple(replace(episode, score=score) for episode, score in pairs))


def test_dynamic_sampling_looks_at_rewards_before_shaping() -> None:
    """DAPO replaces groups that are all right or all wrong; a penalty for length does not change that."""
    dynamic, plain = SignalTest(GRPO, before_shaping=True), SignalTest(GRPO)
    all_right = shaped(0, (1.0, 0.6), (1.0, 1.0))
    assert not dynamic.passes([all_right])
    assert dynamic.reason(all_right) == "equal_before_shaping"
    assert plain.passes([all_right]), "advantages differ, so there is something to learn"
    assert dynamic.passes([shaped(0, (0.5, 0.0), (1.0, 0.0))])
    cancelled = shaped(0, (0.0, 0.0), (1.0, 0.0))
    assert not dynamic.passes([cancelled]), "no advantage is left to learn from"


@pytest.mark.parametrize(("rule", "is_learned_from"), [("replace", False), ("drop", True), ("keep", True)])
def test_only_dynamic_sampling_leaves_out_what_length_terms_alone_tell_apart(rule: str, is_learned_from: bool) -> None:
    async def body() -> TakenBatch | None:
        buffer = ReplayBuffer(RolloutConfig(batch_groups=2, no_signal=rule), num_groups=2)
        for _ in range(2):
            await buffer.admit()
        buffer.put(shaped(0, (1.0, 0.6), (1.0, 1.0)))
        buffer.put(make_group(1))
        return await buffer.take()

    taken = asyncio.run(asyncio.wait_for(body(), 600))
    assert taken is not None
    assert [group.number for group in taken.groups] == ([0, 1] if is_learned_from else [1])
    assert taken.num_no_signal == (not is_learned_from)


def named(number: int, right: tuple[float, ...], form: tuple[float, ...]) -> Group:
    """A group of two rewards: for the answer, and a smaller one for its form."""
    group = make_group(number, right)
    scores = [Score(one + 0.1 * two, {"right": one, "form": two}) for one, two in zip(right, form, strict=True)]
    pairs = zip(group.episodes, scores, strict=True)
    return replace(group, episodes=tuple(replace(episode, score=score) for episode, score in pairs))


@pytest.mark.parametrize("rule", ["drop", "replace"])
@pytest.mark.parametrize("preset", ["grpo", *BY_ITSELF, *BY_BATCH, *BY_CRITIC])
def test_one_reward_can_decide_whether_a_group_has_signal(preset: str, rule: str) -> None:
    """DAPO's filter on accuracy, where a bonus for the form tells completions apart: for every algorithm."""

    async def body() -> TakenBatch | None:
        config = RolloutConfig(batch_groups=4, group_size=2, no_signal=rule, signal_reward="right")
        buffer = ReplayBuffer(config, algorithm=AlgorithmConfig(preset=preset), num_groups=4)
        for _ in range(4):
            await buffer.admit()
        buffer.put(named(0, (1.0, 1.0), (0.0, 1.0)))
        buffer.put(named(1, (0.0, 1.0), (1.0, 1.0)))
        buffer.put(named(2, (0.0, 0.0), (0.0, 1.0)))
        buffer.put(named(3, (1.0, 1.0), (1.0, 1.0)))
        return await buffer.take()

    taken = asyncio.run(asyncio.wait_for(body(), 600))
    assert taken is not None
    assert [group.number for group in taken.groups] == [1]
    assert (taken.num_no_signal, dict(taken.reasons)) == (3, {"equal_signal_reward": 2, "all_equal": 1})


def test_the_reward_that_decides_is_only_asked_where_it_is_named() -> None:
    right, form = SignalTest(GRPO, reward="right"), SignalTest(GRPO, reward="form")
    group = named(0, (1.0, 1.0), (0.0, 1.0))
    assert (right.differs(group), form.differs(group), SignalTest(GRPO).differs(group)) == (False, True, True)
    assert not SignalTest(GRPO, reward="unknown").differs(group)


def test_what_is_masked_or_empty_has_no_signal() -> None:
    test = SignalTest(GRPO, mask_truncated=True)
    cut = make_group(0, (0.0, 0.5, 1.0), finish_reason="length")
    assert (test.passes([cut]), test.counts(cut), test.reason(cut)) == (False, False, "cut_off")
    whole = make_group(0, (0.0, 0.5, 1.0))
    middle = replace(cut, episodes=(cut.episodes[0], whole.episodes[1], cut.episodes[2]))
    assert (test.passes([middle]), test.counts(middle), test.reason(middle)) == (False, True, "cut_off")
    empty = make_group(0, token_ids=(), logprobs=(), versions=())
    assert (test.passes([empty]), test.reason(empty), test.outcome(empty)) == (False, "empty", "empty")
    lost = replace(whole, episodes=tuple(with_turn(each, is_delivered=False) for each in whole.episodes))
    assert (test.reason(lost), test.outcome(lost), test.outcome(cut)) == ("empty", "empty", "no_signal")


@pytest.mark.parametrize("rule", ["drop", "replace", "keep"])
def test_groups_without_a_token_are_counted_apart(rule: str) -> None:
    seen: list[NoSignalGroup] = []

    async def body() -> TakenBatch | None:
        buffer = ReplayBuffer(
            RolloutConfig(batch_groups=2, no_signal=rule), num_groups=3, on_no_signal=lambda each: seen.append(each)
        )
        for number in range(2):
            assert await buffer.admit() == number
        buffer.put(make_group(0, token_ids=(), logprobs=(), versions=()))
        assert buffer.uncommitted_drops == ((0, "empty"),)
        if rule == "replace":
            await buffer.admit()
            buffer.put(make_group(2))
        buffer.put(make_group(1))
        return await buffer.take()

    taken = asyncio.run(asyncio.wait_for(body(), 600))
    assert taken is not None
    assert (taken.drops, taken.num_empty, taken.num_no_signal) == (((0, "empty"),), 1, 0)
    assert [(each.outcome, each.reason) for each in seen] == [("empty", "empty")]


def length(**keys: Any) -> RewardConfig:
    return RewardConfig(kind="length", args={"max_tokens": 4}, **keys)


@pytest.mark.parametrize(
    ("functions", "task"),
    [
        ((RewardConfig(kind="number"), length()), ["number"]),
        ((length(),), ["length"]),
        ((RewardConfig(kind="number"), length(shaping=False)), ["number", "length"]),
        ((RewardConfig(kind="number"), RewardConfig(kind="tags", shaping=True)), ["number"]),
        ((RewardConfig(kind="tags", shaping=True), length()), ["length"]),
    ],
)
def test_which_rewards_only_shape(functions: tuple[RewardConfig, ...], task: list[str]) -> None:
    config = RewardsConfig(functions=functions, overlong=OverlongConfig(max_tokens=8, buffer=4))
    assert [each.label for each in config.task_functions] == task


def test_not_every_reward_may_only_shape() -> None:
    with pytest.raises(ValueError, match="does not only shape"):
        RewardsConfig(functions=(RewardConfig(kind="number", shaping=True),))
