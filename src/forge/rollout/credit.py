"""Give the episodes of a batch their advantages, as the section `algorithm` says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from forge.config import AlgorithmConfig
from forge.errors import DataError
from forge.rollout.advantage import Credit, advantages, token_advantages, token_kl
from forge.rollout.samples import is_masked, name_of, sampler_logprobs
from forge.types import Episode, Group


def assign_advantages(groups: Sequence[Group], algorithm: AlgorithmConfig, *, mask_truncated: bool) -> list[Group]:
    """Return the groups with the advantages of their episodes.

    With `mask_truncated`, tokens of completions that were cut off do not count where advantages are whitened over
    tokens, since they do not count in the loss. Their rewards count in baselines and deviations all the same.
    """
    rewards = [group.rewards for group in groups]
    if algorithm.kl.credit != "completion" and algorithm.charges_tokens:
        costs = [[_costs(episode, algorithm, group=group) for episode in group.episodes] for group in groups]
        is_counted = [
            [not is_masked(each, mask_truncated=mask_truncated) for each in group.episodes] for group in groups
        ]
        credit: Credit = algorithm.kl.credit
        tokens = token_advantages(rewards, algorithm.advantage, costs=costs, credit=credit, is_counted=is_counted)
        return [
            _changed(group, [_with_tokens(*each) for each in zip(group.episodes, values, strict=True)])
            for group, values in zip(groups, tokens, strict=True)
        ]
    num_tokens = [
        [0 if is_masked(each, mask_truncated=mask_truncated) else len(each.completion) for each in group.episodes]
        for group in groups
    ]
    found = advantages(rewards, algorithm.advantage, num_tokens=num_tokens)
    return [
        _changed(group, [replace(each, advantage=value) for each, value in zip(group.episodes, values, strict=True)])
        for group, values in zip(groups, found, strict=True)
    ]


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
    logprobs = sampler_logprobs(episode.completion)
    return [kl.coefficient * each for each in token_kl(logprobs, episode.ref_logprobs, kl.estimator, clamp=kl.clamp)]


def _with_tokens(episode: Episode, values: Sequence[float]) -> Episode:
    mean = math.fsum(values) / len(values) if values else 0.0
    return replace(episode, advantage=mean, token_advantages=tuple(values))


def _changed(group: Group, episodes: Sequence[Episode]) -> Group:
    return replace(group, episodes=tuple(episodes))
