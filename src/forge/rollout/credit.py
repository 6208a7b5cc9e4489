"""Give the episodes of a batch their advantages, as the section `algorithm` says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from forge.config import AlgorithmConfig, InvalidConfig
from forge.config.problems import argument_problems
from forge.errors import DataError
from forge.registry import ADVANTAGES, call
from forge.rollout.advantage import Credit, advantages, token_advantages, token_kl
from forge.rollout.samples import is_masked, name_of
from forge.types import Episode, Group

Advantage = float | Sequence[float]
"""The advantage of an episode: one number, or one for each token of its completion."""

AdvantageFunction = Callable[..., Sequence[Sequence[Advantage]]]
"""Computes the advantages of all groups of a batch: for each group, one `Advantage` for each episode.

It is called with the groups, with the arguments of the configuration, and with those that its signature names of
`algorithm` (the section) and `mask_truncated`. Its attribute `needs_batch` says whether advantages of a group depend
on the other groups of its batch; without the attribute they do. `needs_batch = False` lets a run find out which groups
have signal, one by one.
"""


def find_advantage(algorithm: AlgorithmConfig) -> AdvantageFunction:
    """Return the function that the section `algorithm.advantage` names, with its arguments checked."""
    section, function = algorithm.advantage, _named(algorithm)
    problems = argument_problems(
        function, section.args, path="algorithm.advantage.args", what="the function", num_given=1, offered=_OFFERED
    )
    if problems:
        raise InvalidConfig(problems)
    return function


def _named(algorithm: AlgorithmConfig) -> AdvantageFunction:
    return ADVANTAGES.find(algorithm.advantage.function, path="algorithm.advantage.function")


_OFFERED = ("algorithm", "mask_truncated")


def assign_advantages(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    *,
    mask_truncated: bool,
    function: AdvantageFunction | None = None,
) -> list[Group]:
    """Return the groups with the advantages of their episodes.

    With `mask_truncated`, tokens of completions that were cut off do not count where advantages are whitened over
    tokens, since they do not count in the loss. Their rewards count in baselines and deviations all the same.
    `function` computes the advantages; None for what `algorithm.advantage.function` names.
    """
    offered = {"algorithm": algorithm, "mask_truncated": mask_truncated}
    function = function or _named(algorithm)
    found = call(function, groups, args=algorithm.advantage.args, offered=offered)
    _check_number(len(found), len(groups), path="advantages", what="one entry for each group")
    assigned = []
    for group, values in zip(groups, found, strict=True):
        where = f"advantages of group {group.number}"
        _check_number(len(values), len(group.episodes), path=where, what="one for each episode")
        episodes = [_with_advantage(*each, group=group) for each in zip(group.episodes, values, strict=True)]
        assigned.append(replace(group, episodes=tuple(episodes)))
    return assigned


def needs_batch(algorithm: AlgorithmConfig, function: AdvantageFunction | None = None) -> bool:
    """Return whether the advantages of a group depend on the other groups of its batch."""
    function = function or _named(algorithm)
    if function is not baseline:
        return bool(getattr(function, "needs_batch", True))
    config = algorithm.advantage
    if config.baseline in ("group_mean", "leave_one_out"):
        # Such advantages add up to 0 in a group, and stay 0 when the batch is whitened, unless they are weighed.
        is_weighed = config.scale == "others_std" or config.whiten_over == "tokens" or algorithm.charges_tokens
        return config.whiten and is_weighed
    return config.baseline == "batch_mean" or config.whiten


def baseline(groups: Sequence[Group], *, algorithm: AlgorithmConfig, mask_truncated: bool) -> list[list[Advantage]]:
    """Return (reward - baseline) / scale for each episode, as the section `algorithm` says.

    Where the divergence from the reference is charged to tokens, each token has its own advantage.
    """
    rewards = [group.rewards for group in groups]
    is_counted = [[not is_masked(each, mask_truncated=mask_truncated) for each in group.episodes] for group in groups]
    if algorithm.kl.credit != "completion" and algorithm.charges_tokens:
        costs = [[_costs(episode, algorithm, group=group) for episode in group.episodes] for group in groups]
        credit: Credit = algorithm.kl.credit
        tokens = token_advantages(rewards, algorithm.advantage, costs=costs, credit=credit, is_counted=is_counted)
        return [list(group) for group in tokens]
    num_tokens = [
        [each.num_trained_tokens if counted else 0 for each, counted in zip(group.episodes, counts, strict=True)]
        for group, counts in zip(groups, is_counted, strict=True)
    ]
    return [list(group) for group in advantages(rewards, algorithm.advantage, num_tokens=num_tokens)]


def _costs(episode: Episode, algorithm: AlgorithmConfig, *, group: Group) -> list[float]:
    """Return what each token's divergence from the reference costs."""
    kl = algorithm.kl
    if episode.ref_logprobs is None:
        raise DataError(
            "an episode has no logprobs of the reference model",
            path=name_of(episode, group.number),
            value=None,
            rule="needed with algorithm.kl.place `reward`",
            repair="roll groups out with a reference model",
        )
    return [
        kl.coefficient * each for each in token_kl(episode.logprobs, episode.ref_logprobs, kl.estimator, clamp=kl.clamp)
    ]


def _with_advantage(episode: Episode, value: Advantage, *, group: Group) -> Episode:
    where = f"advantages of {name_of(episode, group.number)}"
    values = (value,) if isinstance(value, int | float) else tuple(value)
    if not all(map(math.isfinite, values)):
        raise DataError(
            "an advantage is not a finite number",
            path=where,
            value=next(each for each in values if not math.isfinite(each)),
            rule="finite",
            repair="correct the function that computes advantages; where there is nothing to compare, give 0",
        )
    if isinstance(value, int | float):
        return replace(episode, advantage=float(value))
    _check_number(len(values), episode.num_tokens, path=where, what="one for each sampled token")
    mean = math.fsum(values) / len(values) if values else 0.0
    return replace(episode, advantage=mean, token_advantages=values)


def _check_number(found: int, wanted: int, *, path: str, what: str) -> None:
    if found != wanted:
        raise DataError(
            "the number of advantages is wrong",
            path=path,
            value=found,
            rule=f"{what}: {wanted}",
            repair="correct the function that computes advantages",
        )
