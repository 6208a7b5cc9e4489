"""Give the episodes of a batch their advantages, as the section `algorithm` says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from forge.config import AlgorithmConfig, InvalidConfig
from forge.config.problems import argument_problems
from forge.errors import DataError
from forge.registry import ADVANTAGES, call
from forge.rollout.advantage import Credit, advantages, token_advantages
from forge.rollout.agent_credit import AgentCredit
from forge.rollout.agent_views import agent_names
from forge.rollout.distillation import taught
from forge.rollout.samples import is_masked, name_of, token_costs
from forge.types import Episode, Group

Advantage = float | Sequence[float]
"""The advantage of an episode: one number, or one for each token of its completion."""

AdvantageFunction = Callable[..., Sequence[Sequence[Advantage]]]
"""Computes the advantages of all groups of a batch: for each group, one `Advantage` for each episode.

It is called with the groups, with the arguments of the configuration, and with those that its signature names of
`algorithm` (the section) and `mask_truncated`. Its attribute `needs_batch` says whether advantages of a group depend
on the other groups of its batch; without the attribute they do. `needs_batch = False` lets a run find out which groups
have signal, one by one. `needs_values = True` says that it reads a critic's values, which are known when a batch is
trained on: it is never called to find out about signal. Its attribute `check_arguments`, where it has one, is called
with the arguments of the configuration before the run starts.
"""


def find_advantage(algorithm: AlgorithmConfig) -> AdvantageFunction:
    """Return the function that the section `algorithm.advantage` names, with its arguments checked."""
    section, function = algorithm.advantage, _named(algorithm)
    problems = argument_problems(
        function, section.args, path="algorithm.advantage.args", what="the function", num_given=1, offered=_OFFERED
    )
    if problems:
        raise InvalidConfig(problems)
    check = getattr(function, "check_arguments", None)
    if check is not None:
        check(**section.args)
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
    agents: AgentCredit | None = None,
) -> list[Group]:
    """Return the groups with the advantages of their episodes.

    Where episodes have several agents, each is compared with itself, as `agents` says.

    With `mask_truncated`, tokens of completions that were cut off do not count where advantages are whitened over
    tokens, since they do not count in the loss. Their rewards count in baselines and deviations all the same.
    `function` computes the advantages; None for what `algorithm.advantage.function` names.
    """
    function = function or _named(algorithm)
    assign = partial(_assign, algorithm=algorithm, mask_truncated=mask_truncated, function=function)
    return (agents or AgentCredit()).assign(groups, assign) if agent_names(groups) else assign(groups)


def _assign(
    groups: Sequence[Group], *, algorithm: AlgorithmConfig, mask_truncated: bool, function: AdvantageFunction
) -> list[Group]:
    distillation = algorithm.distillation
    found: Sequence[Sequence[Advantage]]
    if distillation.is_alone:
        found = [[0.0] * len(group.episodes) for group in groups]
    else:
        offered = {"algorithm": algorithm, "mask_truncated": mask_truncated}
        found = call(function, groups, args=algorithm.advantage.args, offered=offered)
    _check_number(len(found), len(groups), path="advantages", what="one entry for each group")
    assigned = []
    for group, values in zip(groups, found, strict=True):
        where = f"advantages of group {group.number}"
        _check_number(len(values), len(group.episodes), path=where, what="one for each episode")
        episodes = [_with_advantage(*each, group=group) for each in zip(group.episodes, values, strict=True)]
        if distillation.is_used:
            episodes = [taught(episode, distillation, number=group.number) for episode in episodes]
        assigned.append(replace(group, episodes=tuple(episodes)))
    return assigned


def needs_values(algorithm: AlgorithmConfig, function: AdvantageFunction | None = None) -> bool:
    """Return whether advantages depend on a critic's values."""
    return bool(getattr(function or _named(algorithm), "needs_values", False))


def needs_batch(algorithm: AlgorithmConfig, function: AdvantageFunction | None = None) -> bool:
    """Return whether the advantages of a group depend on the other groups of its batch."""
    if algorithm.distillation.is_alone:
        return False
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

    Where the divergence from the reference is charged to tokens, or advantages are discounted, each token has its own.
    """
    rewards = [group.rewards for group in groups]
    is_counted = [[not is_masked(each, mask_truncated=mask_truncated) for each in group.episodes] for group in groups]
    if algorithm.charges_tokens or algorithm.advantage.gamma != 1:
        costs = [[token_costs(each, algorithm, number=group.number) for each in group.episodes] for group in groups]
        credit: Credit = "token" if algorithm.kl.credit == "completion" else algorithm.kl.credit
        tokens = token_advantages(rewards, algorithm.advantage, costs=costs, credit=credit, is_counted=is_counted)
        return [list(group) for group in tokens]
    num_tokens = [
        [each.num_trained_tokens if counted else 0 for each, counted in zip(group.episodes, counts, strict=True)]
        for group, counts in zip(groups, is_counted, strict=True)
    ]
    return [list(group) for group in advantages(rewards, algorithm.advantage, num_tokens=num_tokens)]


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
