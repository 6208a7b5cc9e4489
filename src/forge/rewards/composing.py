"""Rewards made of rewards, for modules of your own.

Adding up is the configuration's work: it lists rewards with weights. These are for what a sum cannot say.

    from forge.rewards import all_of, bound, gated, number, tags

    strict = gated(bound(number, within="answer"), by=tags)   # the number counts only in the right form

`kind: my_rewards:strict` then names it. What they return is a plain reward without arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from forge.types import Answer, Task

Reward: TypeAlias = Callable[..., float]
"""(prompt, completion, **arguments) -> a number."""


def bound(reward: Reward, /, **args: object) -> Reward:
    """The reward with arguments already given."""
    return partial(reward, **args)


def all_of(*rewards: Reward) -> Reward:
    """The least of the rewards: it is only as good as its worst part."""
    _need_some(rewards)

    def least(prompt: Task, completion: Answer) -> float:
        return min(reward(prompt, completion) for reward in rewards)

    return least


def any_of(*rewards: Reward) -> Reward:
    """The greatest of the rewards: one way of being right is enough."""
    _need_some(rewards)

    def greatest(prompt: Task, completion: Answer) -> float:
        return max(reward(prompt, completion) for reward in rewards)

    return greatest


def product_of(*rewards: Reward) -> Reward:
    """The rewards multiplied: for parts of 1 that scale each other."""
    _need_some(rewards)

    def product(prompt: Task, completion: Answer) -> float:
        return math.prod(reward(prompt, completion) for reward in rewards)

    return product


def gated(reward: Reward, *, by: Reward, threshold: float = 1.0, otherwise: float = 0.0) -> Reward:
    """The reward where `by` gives at least `threshold`, else `otherwise`. Behind a closed gate nothing runs."""

    def behind(prompt: Task, completion: Answer) -> float:
        return reward(prompt, completion) if by(prompt, completion) >= threshold else otherwise

    return behind


def rescaled(reward: Reward, *, low: float, high: float) -> Reward:
    """A reward from 0 to 1 as one from `low` to `high`: `low=-1, high=1` punishes what is wrong."""

    def between(prompt: Task, completion: Answer) -> float:
        return low + (high - low) * reward(prompt, completion)

    return between


def _need_some(rewards: tuple[Reward, ...]) -> None:
    if not rewards:
        raise TypeError("at least one reward is needed")
