"""Advantages per turn: what each turn of an episode is credited with.

The return of a turn is what the episode earned from that turn on: everything except what its predecessors earned
themselves. The baseline is the mean return at the same depth over the *other* episodes of the group; an episode that
ended earlier contributes 0. The baseline does not depend on the episode that it is subtracted from, so with gamma = 1
and without scaling the gradient is unbiased, also where episodes differ in their number of turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forge.types import Episode, Group


@dataclass(frozen=True, slots=True)
class TurnRewards:
    """What one episode earned.

    Attributes:
        previous: for each turn, the index of the turn before it in its branch; None for the first. A fork's first turn
            follows the turn that it was forked after.
        rewards: what single turns earned, by index.
        total: what the episode earned in all, the rewards of single turns included.
    """

    previous: tuple[int | None, ...]
    total: float
    rewards: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, episode: Episode) -> TurnRewards:
        """Return what an episode earned."""
        return cls(tuple(each.previous for each in episode.turns), episode.score.reward, episode.turn_rewards)

    def depths(self) -> list[int]:
        """Return how many turns come before each turn."""
        depths: list[int] = []
        for before in self.previous:
            depths.append(0 if before is None else depths[before] + 1)
        return depths

    def returns(self, gamma: float = 1.0) -> list[float]:
        """Return what was earned from each turn on. A reward d turns later counts gamma to the power d."""
        depths = self.depths()
        last = max(depths, default=0)
        of_all = self.total - math.fsum(self.rewards.values())
        found = []
        for turn, depth in enumerate(depths):
            past = self._before(turn)
            later = [
                value * gamma ** max(depths[other] - depth, 0)
                for other, value in self.rewards.items()
                if other not in past
            ]
            found.append(math.fsum([*later, of_all * gamma ** (last - depth)]))
        return found

    def _before(self, turn: int) -> set[int]:
        found: set[int] = set()
        before = self.previous[turn]
        while before is not None:
            found.add(before)
            before = self.previous[before]
        return found


def turn_advantages(group: Sequence[TurnRewards], *, gamma: float = 1.0, baseline: bool = True) -> list[list[float]]:
    """Return the advantage of every turn of every episode of a group.

    With `baseline`, a group of one has nothing to compare with: its advantages are its returns.
    """
    returns = [episode.returns(gamma) for episode in group]
    if not baseline or len(group) < 2:
        return returns
    by_depth = [_by_depth(episode, values) for episode, values in zip(group, returns, strict=True)]
    sums: dict[int, list[float]] = {}
    for means in by_depth:
        for depth, mean in means.items():
            sums.setdefault(depth, []).append(mean)
    found = []
    for episode, values, means in zip(group, returns, by_depth, strict=True):
        others = {depth: (math.fsum(sums[depth]) - mean) / (len(group) - 1) for depth, mean in means.items()}
        found.append([value - others[depth] for value, depth in zip(values, episode.depths(), strict=True)])
    return found


def _by_depth(episode: TurnRewards, returns: Sequence[float]) -> dict[int, float]:
    """Return the mean return of the turns at each depth; there are several where an episode forked."""
    found: dict[int, list[float]] = {}
    for depth, value in zip(episode.depths(), returns, strict=True):
        found.setdefault(depth, []).append(value)
    return {depth: math.fsum(values) / len(values) for depth, values in found.items()}


def turn(groups: Sequence[Group], *, gamma: float = 1.0, baseline: bool = True) -> list[list[list[float]]]:
    """Return the advantage of every sampled token: that of its turn, compared with the others of its group.

    This is the advantage function `turn` (`algorithm.advantage.function`). Without scaling and with gamma 1 the
    gradient is unbiased.
    """
    return [_of_tokens(group, gamma=gamma, baseline=baseline) for group in groups]


turn.needs_batch = False  # type: ignore[attr-defined]


def _of_tokens(group: Group, *, gamma: float, baseline: bool) -> list[list[float]]:
    values = turn_advantages([TurnRewards.of(each) for each in group.episodes], gamma=gamma, baseline=baseline)
    return [
        [value for each, value in zip(episode.turns, of_turns, strict=True) for _ in each.token_ids]
        for episode, of_turns in zip(group.episodes, values, strict=True)
    ]
