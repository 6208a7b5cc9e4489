"""Advantages from a critic's values: generalised advantage estimates (arXiv 1506.02438) over tokens or over turns.

An episode is a sequence of actions. The value of an action is the critic's, of the state in which it was taken:

- `over: tokens`: an action is a sampled token. What a turn earned comes with its last token, and each token pays its
  own divergence from the reference (`kl.credit: token`). The critic learns the return of every token.
- `over: turns`: an action is a turn, whose tokens share its advantage. Its reward is what the turn earned, less the
  divergence of its tokens. The critic learns the return of each turn, at its first token.

What an episode earned beyond the rewards of single turns comes with its last action. What the policy only read is not
an action: the state after a turn is that before the next one, observation included. Turns that are not trained on are
part of what the policy reads; what they earned counts for the turn before them.

Where a branch forks, the state after the turn is worth the mean over its branches, and each branch ends with what the
whole episode earned. Where episodes have several agents, each agent's part is an episode of its own, and one critic
values all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from forge.config import AlgorithmConfig
from forge.errors import ConfigError, DataError
from forge.rollout.advantage import check_fraction, finish_tokens
from forge.rollout.advantage import gae as estimate_sequence
from forge.rollout.agent_views import parts_of
from forge.rollout.samples import (
    episode_rows,
    is_masked,
    name_of,
    plain_samples,
    sampled_values,
    samples_with,
    token_costs,
)
from forge.types import Batch, Episode, Group, Sample, Turn

if TYPE_CHECKING:
    from torch import Tensor

Unit = Literal["tokens", "turns"]
Bootstrap = Literal["environment", "always", "never"]
"""Which episodes that were cut off end with the critic's value instead of 0: those whose environment ended them before
the task was done, all that were cut off, or none."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """What an episode's T sampled tokens are credited with; 0 where a token is not trained on.

    Attributes:
        advantages: before whitening and clipping.
        returns: what the critic learns, where `is_target`.
        is_target: whether the critic learns the return at a token.
    """

    advantages: tuple[float, ...]
    returns: tuple[float, ...]
    is_target: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Estimator:
    """How values become advantages: the arguments of `gae`."""

    algorithm: AlgorithmConfig
    gamma: float = 1.0
    lam: float = 0.95
    over: Unit = "tokens"
    bootstrap: Bootstrap = "environment"

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Estimator:
        """Return what the section `algorithm` asks for."""
        return cls(algorithm, **algorithm.advantage.args)

    def estimate(self, episode: Episode, *, number: int = 0) -> Estimates:
        """Return the estimates of an episode, or of one agent's part of it. `number` is that of its group."""
        values = _values_of(episode, number)
        costs = token_costs(episode, self.algorithm, number=number)
        path = _Path.of(episode)
        found = _Found(episode.num_tokens)
        first: dict[int, tuple[float, float]] = {}
        for turn in reversed(path.turns):
            span = path.spans[turn.index]
            ahead = self._ahead(episode, path, turn, first)
            own = (costs[span], values[span])
            advantages, returns = self._of_turn(own, earned=path.earned[turn.index], ahead=ahead)
            found.put(span, advantages, returns, every=self.over == "tokens")
            first[turn.index] = (values[span.start], advantages[0])
        return found.estimates()

    def _ahead(
        self, episode: Episode, path: _Path, turn: Turn, first: Mapping[int, tuple[float, float]]
    ) -> tuple[float, float]:
        """Return value and advantage of what follows a turn: the mean over its branches, or the end."""
        following = path.following[turn.index]
        if following:
            pairs = [first[index] for index in following]
            value, advantage = (math.fsum(each) / len(pairs) for each in zip(*pairs, strict=True))
            return value, advantage
        cut_off = {"environment": episode.outcome == "truncated", "always": episode.is_truncated, "never": False}
        return (episode.end_values.get(turn.index, 0.0) if cut_off[self.bootstrap] else 0.0), 0.0

    def _of_turn(
        self, own: tuple[Sequence[float], Sequence[float]], *, earned: float, ahead: tuple[float, float]
    ) -> tuple[list[float], list[float]]:
        """Return advantages and returns of a turn's tokens. `own` has their costs and values."""
        costs, values = own
        rewards = [-cost for cost in costs]
        rewards[-1] += earned
        if self.over == "turns":
            rewards, values = [math.fsum(rewards)], values[:1]
        advantages, returns = estimate_sequence(
            rewards, values, gamma=self.gamma, lam=self.lam, last_value=ahead[0], last_advantage=ahead[1]
        )
        return (advantages, returns) if self.over == "tokens" else (advantages * len(costs), returns * len(costs))


class _Found:
    """Numbers for the T tokens of an episode, filled in turn by turn."""

    def __init__(self, num_tokens: int) -> None:
        self._advantages, self._returns = [0.0] * num_tokens, [0.0] * num_tokens
        self._is_target = [False] * num_tokens

    def put(self, span: slice, advantages: Sequence[float], returns: Sequence[float], *, every: bool) -> None:
        """Fill in a turn. Unless `every` token is a target of the critic, the first is."""
        self._advantages[span], self._returns[span] = advantages, returns
        self._is_target[span] = [every or place == 0 for place in range(len(advantages))]

    def estimates(self) -> Estimates:
        """Return what was filled in."""
        return Estimates(tuple(self._advantages), tuple(self._returns), tuple(self._is_target))


@dataclass(frozen=True, slots=True)
class _Path:
    """The actions of an episode.

    Attributes:
        turns: those that are trained on.
        spans: where the tokens of each are among the T sampled tokens, by index.
        following: the turns after each, by index: one, or several where a branch forks.
        earned: what each earned, by index, with what the episode earned in all where nothing follows.
    """

    turns: tuple[Turn, ...]
    spans: Mapping[int, slice]
    following: Mapping[int, Sequence[int]]
    earned: Mapping[int, float]

    @classmethod
    def of(cls, episode: Episode) -> _Path:
        turns = tuple(turn for turn in episode.turns if turn.counts)
        spans, start = {}, 0
        for turn in episode.turns:
            spans[turn.index] = slice(start, start + len(turn))
            start += len(turn)
        following: dict[int, list[int]] = {turn.index: [] for turn in turns}
        for turn in turns:
            before = _counted(episode, turn.previous)
            if before is not None:
                following[before].append(turn.index)
        of_all = episode.score.reward - math.fsum(episode.turn_rewards.values())
        earned = {index: 0.0 if after else of_all for index, after in following.items()}
        for index, reward in episode.turn_rewards.items():
            owner = _counted(episode, index)
            if owner is not None:
                earned[owner] += reward
        return cls(turns, spans, following, earned)


def _counted(episode: Episode, index: int | None) -> int | None:
    """Return a turn if it is trained on, else the last one before it that is; None where there is none."""
    while index is not None and not episode.turns[index].counts:
        index = episode.turns[index].previous
    return index


def _values_of(episode: Episode, number: int) -> tuple[float, ...]:
    if episode.values is None:
        raise DataError(
            "an episode has no values of a critic",
            path=name_of(episode, number),
            value=None,
            rule="needed with algorithm.advantage.function `gae`",
            repair="score its tokens with a critic first: forge.rollout.value_credit.with_values",
        )
    if len(episode.values) != episode.num_tokens:
        raise DataError(
            "values and sampled tokens do not belong together",
            path=name_of(episode, number),
            value=len(episode.values),
            rule=f"{episode.num_tokens} numbers, one for each sampled token",
            repair="score the episode as it is",
        )
    return episode.values


# ---- Advantages -----------------------------------------------------------------------------------------------------


def gae(
    groups: Sequence[Group],
    *,
    algorithm: AlgorithmConfig,
    mask_truncated: bool,
    gamma: float = 1.0,
    lam: float = 0.95,
    over: Unit = "tokens",
    bootstrap: Bootstrap = "environment",
) -> list[list[list[float]]]:
    """Return the advantage of every sampled token, whitened over the batch's tokens and clipped as the section says.

    This is the advantage function `gae` (`algorithm.advantage.function`). Episodes need values: see `with_values`.
    """
    estimator = Estimator(algorithm, gamma, lam, over, bootstrap)
    found, counts = [], []
    for group in groups:
        for episode in group.episodes:
            found.append(estimator.estimate(episode, number=group.number).advantages)
            is_left_out = is_masked(episode, mask_truncated=mask_truncated)
            counts.append([int(turn.counts and not is_left_out) for turn in episode.turns for _ in turn.token_ids])
    finished = iter(finish_tokens(found, algorithm.advantage, counts=counts))
    return [[next(finished) for _ in group.episodes] for group in groups]


def _check_arguments(
    *, gamma: float = 1.0, lam: float = 0.95, over: str = "tokens", bootstrap: str = "environment"
) -> None:
    path = "algorithm.advantage.args"
    check_fraction(f"{path}.gamma", gamma)
    check_fraction(f"{path}.lam", lam)
    for name, value, allowed in (("over", over, get_args(Unit)), ("bootstrap", bootstrap, get_args(Bootstrap))):
        if value not in allowed:
            raise ConfigError(
                "an argument of `gae` is not known",
                path=f"{path}.{name}",
                value=value,
                rule=f"one of {', '.join(allowed)}",
                repair="leave it out if in doubt",
            )


gae.needs_values = True  # type: ignore[attr-defined]
gae.check_arguments = _check_arguments  # type: ignore[attr-defined]


# ---- The critic's batches -------------------------------------------------------------------------------------------


def value_samples(groups: Sequence[Group]) -> list[Sample]:
    """Return the rows of all episodes, for a critic to score: in the order in which `with_values` wants the answers.

    No two groups have a sequence in common: completions of one prompt are scored together.
    """
    samples: list[Sample] = []
    first = 0
    for group in groups:
        own = [sample for each in group.episodes for sample in plain_samples(each, number=group.number)]
        numbers = [first + (sample.sequence or 0) for sample in own]
        samples += [replace(sample, sequence=number) for sample, number in zip(own, numbers, strict=True)]
        first = 1 + max(numbers, default=first)
    return samples


def with_values(groups: Sequence[Group], values: Sequence[Tensor]) -> list[Group]:
    """Return the groups with a critic's values. `values` has, for each row of `value_samples`, the value after each
    token: what `forward_values` returns."""
    each = iter(values)
    return [
        replace(group, episodes=tuple(_with_values(episode, each) for episode in group.episodes)) for group in groups
    ]


def _with_values(episode: Episode, answers: Iterator[Tensor]) -> Episode:
    import torch

    rows = episode_rows(episode)
    after = [next(answers) for _ in rows]
    before = [torch.cat([values.new_zeros(1), values[:-1]]) for values in after]
    ends = {row.turns[-1].index: float(values[-1]) for row, values in zip(rows, after, strict=True)}
    return replace(episode, values=sampled_values(episode, before), end_values=ends)


@dataclass(frozen=True, slots=True)
class CriticBatch:
    """What a critic learns from.

    Attributes:
        batch: the rows of the policy's batch, with the fields `returns` and `old_values`. Weights are 1 where the
            critic learns a return.
        values, returns: of the tokens with weight 1, for metrics.
    """

    batch: Batch
    values: tuple[float, ...]
    returns: tuple[float, ...]

    @classmethod
    def of(cls, groups: Sequence[Group], algorithm: AlgorithmConfig, *, mask_truncated: bool) -> CriticBatch:
        """Return the batch of groups that have values. Episodes that `mask_truncated` leaves out count for nothing."""
        estimator = Estimator.of(algorithm)
        samples: list[Sample] = []
        values: list[float] = []
        returns: list[float] = []
        for group in groups:
            for part in (part for episode in group.episodes for part in parts_of(episode)):
                found = estimator.estimate(part, number=group.number)
                assert part.values is not None
                is_left_out = is_masked(part, mask_truncated=mask_truncated)
                targets = [float(target and not is_left_out) for target in found.is_target]
                fields = {"returns": found.returns, "old_values": part.values, "targets": targets}
                samples += [_with_weights(sample) for sample in samples_with(part, group.number, fields)]
                values += [value for value, target in zip(part.values, targets, strict=True) if target]
                returns += [value for value, target in zip(found.returns, targets, strict=True) if target]
        return cls(Batch.of(samples), tuple(values), tuple(returns))

    def metrics(self) -> dict[str, float]:
        """Return how well the values before the update predicted the returns."""
        errors = [found - value for found, value in zip(self.returns, self.values, strict=True)]
        spread = _variance(self.returns)
        return {
            "value_mean": _mean(self.values),
            "return_mean": _mean(self.returns),
            "explained_variance": 1 - _variance(errors) / spread if spread > 0 else 0.0,
        }


def _with_weights(sample: Sample) -> Sample:
    fields = dict(sample.fields)
    return replace(sample, loss_weights=fields.pop("targets"), fields=fields)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return _mean([(value - mean) * (value - mean) for value in values])
