"""What the buffer gives out: the groups that one step learns from, and what became of others meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forge.rollout.signal import DropReason, Reason
from forge.types import Episode, Group


@dataclass(frozen=True, slots=True)
class Scored:
    """What metrics keep of an episode: all that is known of those in dropped groups, which may be many."""

    reward: float
    parts: Mapping[str, float]
    num_tokens: int
    is_truncated: bool

    @classmethod
    def of(cls, episode: Episode) -> Scored:
        score = episode.score
        return cls(score.reward, score.parts, episode.num_tokens, episode.is_truncated)


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """What one step learns from.

    Attributes:
        index: the batch's number, which is the version of the weights that learn from it.
        groups: in the order of their numbers.
        drops: numbers that were dropped since the last batch, and why.
        num_stale: groups that had to go back to the queue since the last batch.
        num_no_signal: groups without signal since the last batch, dropped or (with `keep`) in this one. Groups without
            a token are counted apart (`num_empty`).
        dropped: the episodes of groups that were left out since the last batch for lack of signal.
        reasons: how many groups taught nothing since the last batch, by reason.
    """

    index: int
    groups: tuple[Group, ...]
    drops: tuple[tuple[int, DropReason], ...] = ()
    num_stale: int = 0
    num_no_signal: int = 0
    dropped: tuple[Scored, ...] = ()
    reasons: Mapping[Reason, int] = field(default_factory=dict)

    @property
    def scored(self) -> tuple[Scored, ...]:
        """Every episode that was scored for this batch, trained on or not: how well the policy does."""
        return (*(Scored.of(episode) for group in self.groups for episode in group.episodes), *self.dropped)

    @property
    def num_empty(self) -> int:
        """Groups without a token since the last batch."""
        return sum(why == "empty" for _, why in self.drops)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of `scored`."""
        return tuple(each.reward for each in self.scored)

    @property
    def staleness(self) -> tuple[int, ...]:
        """By how many versions each group is older than the weights that learn from it."""
        return tuple(self.index - group.version for group in self.groups)
