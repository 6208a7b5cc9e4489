"""Whether a group has signal: decided by the advantages that the algorithm will compute of its rewards.

An advantage of 0 leaves the policy as it is. When that happens depends on the baseline:

| what a reward is compared with | advantages are 0 where |
|---|---|
| its group's mean, or that of the others of its group | all rewards of the group are equal |
| nothing | all rewards of the group are 0 |
| the batch: its mean is the baseline, or rewards without a baseline are whitened | all rewards of the batch are equal |

In the last case a group alone cannot tell: all groups of a batch have signal, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from forge.config.algorithm import AdvantageConfig
from forge.rollout.advantage import advantages
from forge.types import Episode, Group

Reason = Literal["all_zero", "all_equal", "equal_before_shaping", "cut_off", "failed", "refused"]
"""Why a group teaches nothing."""

REASONS: Final[dict[Reason, str]] = {
    "all_zero": "all rewards are 0",
    "all_equal": "all rewards are equal",
    "equal_before_shaping": "all rewards are equal before shaping",
    "cut_off": "only completions that rollout.mask_truncated leaves out could teach anything",
    "failed": "a reward failed",
    "refused": "no generator can answer the prompt",
}
_TOLERANCE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class SignalTest:
    """Tells which groups an algorithm can learn from.

    Attributes:
        advantage: how rewards become advantages.
        mask_truncated: whether completions that were cut off by length count for nothing.
        before_shaping: whether rewards must also differ before shaping, as dynamic sampling wants it.
    """

    advantage: AdvantageConfig
    mask_truncated: bool = False
    before_shaping: bool = False

    @property
    def is_of_batch(self) -> bool:
        """Whether only a whole batch tells: then `passes` is asked about all its groups at once."""
        config = self.advantage
        if config.baseline in ("group_mean", "leave_one_out"):  # such advantages add up to 0 in a group, and stay 0
            return config.whiten and config.scale == "others_std"  # except those that are divided one by one
        return config.baseline == "batch_mean" or config.whiten

    def is_counted(self, episode: Episode) -> bool:
        """Whether a completion is in the loss at all."""
        is_masked = self.mask_truncated and episode.completion.finish_reason == "length"
        return len(episode.completion) > 0 and not is_masked

    def counts(self, group: Group) -> bool:
        """Whether any completion of a group is in the loss."""
        return any(self.is_counted(episode) for episode in group.episodes)

    def passes(self, groups: Sequence[Group]) -> bool:
        """Whether a completion that counts has an advantage other than 0. Give one group, or all of a batch."""
        if not self._moves(groups, [group.rewards for group in groups]):
            return False
        return not self.before_shaping or self._moves(groups, [group.unshaped_rewards for group in groups])

    def _moves(self, groups: Sequence[Group], rewards: Sequence[Sequence[float]]) -> bool:
        found = advantages(_without_noise(rewards), self.advantage)
        return any(
            value != 0 and self.is_counted(episode)
            for group, values in zip(groups, found, strict=True)
            for episode, value in zip(group.episodes, values, strict=True)
        )

    def reason(self, group: Group) -> Reason:
        """Why a group does not pass."""
        if not self.counts(group):
            return "cut_off"
        if all(episode.score.failures for episode in group.episodes):
            return "failed"
        if _are_equal(group.rewards):
            return "all_zero" if _are_equal((0.0, *group.rewards)) else "all_equal"
        return "equal_before_shaping" if _are_equal(group.unshaped_rewards) else "cut_off"


def _without_noise(rewards: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
    """The rewards; where all differ by rounding alone, one number for all."""
    every = [reward for group in rewards for reward in group]
    if not _are_equal(every):
        return rewards
    value = 0.0 if _are_equal((0.0, *every)) else every[0]
    return [[value] * len(group) for group in rewards]


def _are_equal(values: Sequence[float]) -> bool:
    low, high = min(values), max(values)
    return high - low <= _TOLERANCE * max(1.0, abs(low), abs(high))
