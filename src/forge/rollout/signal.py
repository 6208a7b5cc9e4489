"""Whether a group has signal: decided by the advantages that the algorithm will compute of its rewards.

An advantage of 0 leaves the policy as it is. When that happens depends on the baseline:

| what a reward is compared with | advantages are 0 where |
|---|---|
| its group's mean, or that of the others of its group | all rewards of the group are equal |
| nothing | all rewards of the group are 0 |
| the batch, whose mean is the baseline, or over which advantages are whitened | all rewards of the batch are equal |

In the last case one group does not decide: all groups of a batch have signal, or none. Whitening does not count where
the advantages of each group add up to 0. Where the divergence is taken from single tokens (`algorithm.kl.credit`), it
is a part of their advantages, and so a signal; and so is what a teacher adds to them (`algorithm.distillation`). With a
critic every completion that counts in the loss has signal.

With `rollout.signal_reward`, a group has no signal either where that one reward has the same value in all its episodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from forge.config.algorithm import AlgorithmConfig
from forge.errors import RolloutError
from forge.rollout.agent_credit import AgentCredit
from forge.rollout.agent_views import agent_names, parts_of, view_group, with_results
from forge.rollout.credit import AdvantageFunction, assign_advantages, needs_batch, needs_values
from forge.rollout.samples import is_masked
from forge.types import Episode, Group

Reason = Literal[
    "all_zero", "all_equal", "equal_signal_reward", "equal_before_shaping", "cut_off", "empty", "failed", "refused"
]
"""Why a group teaches nothing."""

REASONS: Final[dict[Reason, str]] = {
    "all_zero": "all rewards are 0",
    "all_equal": "all rewards are equal",
    "equal_signal_reward": "all values of the reward that rollout.signal_reward names are equal",
    "equal_before_shaping": "all rewards are equal before shaping",
    "cut_off": "only completions that rollout.mask_truncated leaves out could teach anything",
    "empty": "no episode has a token: nothing was sampled, or no answer was delivered",
    "failed": "a reward failed",
    "refused": "no generator can answer the prompt",
}
_TOLERANCE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class SignalTest:
    """Tells which groups an algorithm can learn from.

    Attributes:
        algorithm: how rewards become advantages.
        mask_truncated: whether completions that were cut off by length count for nothing.
        before_shaping: whether rewards must also differ before shaping, as dynamic sampling wants it.
        reward: the name of the reward that must differ within a group; None for the sum of all.
        advantage: computes advantages; None for what the algorithm names.
        agents: how episodes with several agents are credited.
    """

    algorithm: AlgorithmConfig
    mask_truncated: bool = False
    before_shaping: bool = False
    reward: str | None = None
    advantage: AdvantageFunction | None = None
    agents: AgentCredit | None = None

    @property
    def is_of_batch(self) -> bool:
        """Whether only a whole batch decides: then `passes` is asked about all its groups at once."""
        if needs_values(self.algorithm, self.advantage):
            return False
        compares = self.agents is None or self.agents.compares_groups
        return compares and needs_batch(self.algorithm, self.advantage)

    def is_counted(self, episode: Episode) -> bool:
        """Whether a completion is in the loss at all."""
        return any(map(self._is_part_counted, parts_of(episode)))

    def _is_part_counted(self, part: Episode) -> bool:
        return part.num_trained_tokens > 0 and not is_masked(part, mask_truncated=self.mask_truncated)

    def counts(self, group: Group) -> bool:
        """Whether any completion of a group is in the loss."""
        return any(self.is_counted(episode) for episode in group.episodes)

    def differs(self, group: Group) -> bool:
        """Whether the reward that must differ within a group does, for an agent that learns. One that an episode does
        not have is 0 there."""
        name = self.reward
        return name is None or not all(
            _are_equal([episode.score.parts.get(name, 0.0) for episode in each.episodes]) for each in _learners(group)
        )

    def outcome(self, group: Group) -> Literal["no_signal", "empty"]:
        """What the ledger says of a group that does not pass."""
        return "empty" if _is_empty(group) else "no_signal"

    def passes(self, groups: Sequence[Group]) -> bool:
        """Whether a completion that counts has an advantage other than 0. Give one group, or all of a batch.

        With a critic any completion that counts has signal: the critic has not seen its reward.
        """
        if needs_values(self.algorithm, self.advantage):
            return any(map(self.counts, groups))
        if not self._moves(groups, self.algorithm):
            return False
        return not self.before_shaping or self._moves([_unshaped(group) for group in groups], self._without_kl)

    @property
    def _without_kl(self) -> AlgorithmConfig:
        kl = self.algorithm.kl.model_copy(update={"coefficient": 0.0})
        return self.algorithm.model_copy(update={"kl": kl})

    def _moves(self, groups: Sequence[Group], algorithm: AlgorithmConfig) -> bool:
        found = assign_advantages(
            _without_noise(groups),
            algorithm,
            mask_truncated=self.mask_truncated,
            function=self.advantage,
            agents=self.agents,
        )
        parts = (part for group in found for episode in group.episodes for part in parts_of(episode))
        return any(_is_moved(each) and self._is_part_counted(each) for each in parts)

    def reason(self, group: Group) -> Reason:
        """Why a group does not pass."""
        if _is_empty(group):
            return "empty"
        if not self.counts(group):
            return "cut_off"
        if all(episode.score.failures for episode in group.episodes):
            return "failed"
        learners = _learners(group)
        if all(_are_equal(each.rewards) for each in learners):
            return "all_zero" if all(_are_equal((0.0, *each.rewards)) for each in learners) else "all_equal"
        if not self.differs(group):
            return "equal_signal_reward"
        is_shaped = all(_are_equal(each.unshaped_rewards) for each in learners)
        return "equal_before_shaping" if is_shaped else "cut_off"


def _is_empty(group: Group) -> bool:
    return all(episode.num_trained_tokens == 0 for episode in group.episodes)


def _is_moved(episode: Episode) -> bool:
    return any(episode.token_advantages or (episode.advantage,))


def _scored_agents(group: Group) -> tuple[str | None, ...]:
    """Return the agents that have rewards; None stands for the one without a name."""
    if not agent_names([group]):
        return (None,)
    first = group.episodes[0].agents
    return tuple(name for name in first if all(each.agents[name].score is not None for each in group.episodes))


def _learners(group: Group) -> list[Group]:
    """Return the parts of a group's agents that learn; the group itself where agents have no names."""
    names = [name for name, result in group.episodes[0].agents.items() if result.learns]
    return [view_group(group, name) for name in names] or [group]


def _of_agent(group: Group, name: str | None) -> Group:
    return group if name is None else view_group(group, name)


def _unshaped(group: Group) -> Group:
    for name in _scored_agents(group):
        group = _rewarded(group, _of_agent(group, name).unshaped_rewards, agent=name)
    return group


def _without_noise(groups: Sequence[Group]) -> Sequence[Group]:
    """The groups; where all rewards (of an agent) differ by rounding alone, with one number for all."""
    for name in _scored_agents(groups[0]):
        every = [reward for group in groups for reward in _of_agent(group, name).rewards]
        if _are_equal(every):
            value = 0.0 if _are_equal((0.0, *every)) else every[0]
            groups = [_rewarded(group, [value] * len(group.episodes), agent=name) for group in groups]
    return groups


def _rewarded(group: Group, rewards: Sequence[float], *, agent: str | None) -> Group:
    if agent is not None:
        episodes = zip(group.episodes, rewards, strict=True)
        return replace(group, episodes=tuple(_with_agent_reward(each, agent, reward) for each, reward in episodes))
    scores = (replace(each.score, reward=reward) for each, reward in zip(group.episodes, rewards, strict=True))
    return replace(group, episodes=tuple(replace(e, score=s) for e, s in zip(group.episodes, scores, strict=True)))


def _with_agent_reward(episode: Episode, agent: str, reward: float) -> Episode:
    result = episode.agents[agent]
    assert result.score is not None
    changed = replace(result, score=replace(result.score, reward=reward))
    return with_results(episode, {**episode.agents, agent: changed})


def _are_equal(values: Sequence[float]) -> bool:
    low, high = min(values), max(values)
    return high - low <= _TOLERANCE * max(1.0, abs(low), abs(high))


DropReason = Literal["no_signal", "empty", "failed", "refused"]
"""Why a group is dropped: no signal, no token, a failed reward, a prompt that no generator can answer."""

_TRY: Final = "give a completion to `forge rewards try`"
_ADVICE: Final[dict[Reason, str]] = {
    "all_zero": "the task is too hard, completions are cut off before the answer, or the reward never matches what the "
    f"policy writes: {_TRY}, try easier prompts or a longer generator.sampling.max_tokens",
    "all_equal": "the task is solved, or the reward does not distinguish completions: try harder prompts, a larger "
    "rollout.group_size or a higher generator.sampling.temperature",
    "equal_signal_reward": "every group is solved by all its completions or by none, or no episode has a reward of "
    "that name: try other prompts, a `curriculum`, a larger rollout.group_size, or another rollout.signal_reward",
    "equal_before_shaping": "only length terms distinguish completions: try other prompts, or "
    "rollout.no_signal=drop, which learns from length terms, too",
    "cut_off": "raise generator.sampling.max_tokens, or set rollout.mask_truncated=false",
    "empty": "the episode's program ends before its first turn, or its clients never get an answer: try it with "
    "`forge episode try`",
    "failed": f"correct the reward, and {_TRY} before the next run",
    "refused": "shorten the prompts, or raise training.max_seq_len; the warnings before this name each prompt",
}


@dataclass(frozen=True, slots=True)
class NoSignalGroup:
    """A group that teaches nothing.

    Attributes:
        number: the group's.
        outcome: what the ledger says if it is dropped.
        reason: why it teaches nothing.
        group: what was sampled; None where nothing was.
        is_kept: whether it is trained on all the same (`rollout.no_signal: keep`).
    """

    number: int
    outcome: DropReason
    reason: Reason
    group: Group | None = None
    is_kept: bool = False


class NoSignalTally:
    """Counts the groups in a row that taught nothing, and says why they did not."""

    def __init__(self) -> None:
        self.recorded_in: Path | None = None
        """Where some of the groups can be read."""
        self.restart()

    def restart(self) -> None:
        """Begin again: a group had signal."""
        self.num_groups = 0
        self._reasons: Counter[Reason] = Counter()
        self._num_completions = self._num_failed = 0
        self._failures: Counter[tuple[str, str]] = Counter()
        self._messages: dict[tuple[str, str], str] = {}

    def add(self, no_signal: NoSignalGroup, *, recorded_in: Path | None = None) -> None:
        """Count a group. `recorded_in` is the file that it was written to, if it was."""
        self.num_groups += 1
        self._reasons[no_signal.reason] += 1
        self.recorded_in = recorded_in or self.recorded_in
        for episode in no_signal.group.episodes if no_signal.group is not None else ():
            self._num_completions += 1
            self._num_failed += bool(episode.score.failures)
            for name, message in episode.score.failures.items():
                kind = (name, message.partition(":")[0])  # an exception's type: messages may differ in every call
                self._failures[kind] += 1
                self._messages.setdefault(kind, message)

    def summary(self) -> str:
        """How many groups for which reason, and which failure of a reward was most frequent."""
        text = ", ".join(f"{REASONS[reason]} ({_groups(count)})" for reason, count in self._reasons.most_common())
        if self._failures:
            (kind, count), *_ = self._failures.most_common(1)
            text += (
                f"; rewards failed on {self._num_failed} of {self._num_completions} completions, "
                f"most often ({count} times) {kind[0]!r}: {self._messages[kind]}"
            )
        return text

    def error(self, message: str, *, path: str, rule: str) -> RolloutError:
        """An error that says what was counted, and what helps against the most frequent reason."""
        ((reason, _),) = self._reasons.most_common(1)
        if self._num_failed * 2 > self._num_completions:
            reason = "failed"
        look = "" if self.recorded_in is None else f"look at {self.recorded_in}; "
        return RolloutError(
            message,
            path=path,
            value=f"{_groups(self.num_groups)}: {self.summary()}",
            rule=rule,
            repair=look + _ADVICE[reason],
        )


def _groups(count: int) -> str:
    return f"{count} group" if count == 1 else f"{count} groups"
