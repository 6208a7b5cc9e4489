"""Advantages per turn, checked by hand and against the exact gradient of a tabular policy."""

from __future__ import annotations

import itertools
import math

import pytest

from forge.rollout.turn_credit import TurnRewards, turn_advantages

CHAIN = (None, 0, 1)


def test_returns_are_what_was_earned_from_a_turn_on():
    episode = TurnRewards(CHAIN, total=6.0, rewards={0: 1.0, 1: 2.0})  # 3 belongs to the whole
    assert episode.returns() == [6.0, 5.0, 3.0]
    assert episode.returns(0.5) == [1 + 1 + 0.75, 2 + 1.5, 3.0]
    assert TurnRewards((), 1.0).returns() == []


def test_a_fork_is_not_credited_with_what_came_before_it():
    forked = TurnRewards((None, 0, 0), total=7.0, rewards={0: 1.0, 1: 2.0, 2: 4.0})
    assert forked.depths() == [0, 1, 1]
    assert forked.returns() == [7.0, 6.0, 6.0]


def test_the_baseline_is_that_of_the_others_and_those_that_ended_give_0():
    long, short = TurnRewards(CHAIN, 3.0), TurnRewards((None,), 1.0)
    assert turn_advantages([long, short]) == [[2.0, 3.0, 3.0], [-2.0]]
    assert turn_advantages([long, short], baseline=False) == [[3.0, 3.0, 3.0], [1.0]]
    assert turn_advantages([short]) == [[1.0]]


def test_one_turn_each_is_leave_one_out():
    rewards = [1.0, 0.0, 0.5, 2.0]
    found = turn_advantages([TurnRewards((None,), value) for value in rewards])
    expected = [value - (sum(rewards) - value) / 3 for value in rewards]
    assert [each for (each,) in found] == pytest.approx(expected, abs=1e-15)


# A policy over two actions per state: 0 stops, 1 goes on. States are turns 0, 1 and 2; after turn 2 it is over.
THETA = (0.3, -0.7, 1.1)
STEP_REWARD, FINAL = (0.5, -1.0, 2.0), {1: 1.0, 2: -0.5, 3: 3.0}


def probability(turn: int, action: int) -> float:
    goes_on = 1 / (1 + math.exp(-THETA[turn]))
    return goes_on if action else 1 - goes_on


def score(turn: int, action: int) -> float:
    """The derivative of log probability with respect to theta[turn]."""
    return action - probability(turn, 1)


def trajectories():
    for length in (1, 2, 3):
        for last in (0, 1) if length == 3 else (0,):
            actions = [1] * (length - 1) + [last]
            chance = math.prod(probability(turn, action) for turn, action in enumerate(actions))
            rewards = {turn: STEP_REWARD[turn] * action for turn, action in enumerate(actions)}
            total = sum(rewards.values()) + FINAL[length] * (1 + last)
            previous = tuple(None if turn == 0 else turn - 1 for turn in range(length))
            yield actions, chance, TurnRewards(previous, total, rewards)


def exact_gradient() -> list[float]:
    gradient = [0.0, 0.0, 0.0]
    for actions, chance, episode in trajectories():
        for turn, action in enumerate(actions):
            gradient[turn] += chance * score(turn, action) * episode.total
    return gradient


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("baseline", [True, False])
def test_the_gradient_is_unbiased(size, baseline):
    expected = [size * each for each in exact_gradient()]
    found = [0.0, 0.0, 0.0]
    for group in itertools.product(list(trajectories()), repeat=size):
        chance = math.prod(each[1] for each in group)
        advantages = turn_advantages([each[2] for each in group], baseline=baseline)
        for (actions, _, _), values in zip(group, advantages, strict=True):
            for turn, action in enumerate(actions):
                found[turn] += chance * score(turn, action) * values[turn]
    assert sum(chance for _, chance, _ in trajectories()) == pytest.approx(1.0)
    assert found == pytest.approx(expected, abs=1e-12)


def test_comparing_with_those_that_still_run_would_be_biased():
    """The test above can fail: without the 0 of episodes that ended, the baseline depends on when they stopped."""
    groups = list(itertools.product(list(trajectories()), repeat=2))
    found = [0.0, 0.0, 0.0]
    for group in groups:
        chance = group[0][1] * group[1][1]
        values = [each[2].returns() for each in group]
        for this, other in ((0, 1), (1, 0)):
            for turn, action in enumerate(group[this][0]):
                base = values[other][turn] if turn < len(values[other]) else values[this][turn]
                found[turn] += chance * score(turn, action) * (values[this][turn] - base)
    assert found != pytest.approx([2 * each for each in exact_gradient()], abs=1e-6)
