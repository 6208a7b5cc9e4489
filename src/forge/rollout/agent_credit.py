"""Advantages where episodes have several agents: each is compared with itself.

| rule | what an agent's reward is compared with |
|---|---|
| `group` | the same agent in the other episodes of the group, as `algorithm.advantage` says |
| `baseline` | a running mean of its rewards in earlier batches, which a checkpoint keeps |
| `zero_sum` | nothing of its own: its advantage is the negative of its opponent's |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from forge.config.agents import AgentConfig, RunningBaselineConfig
from forge.errors import DataError, RewardError
from forge.rollout.agent_views import agent_names, view_group
from forge.types import Episode, Group

AssignFunction = Callable[[Sequence[Group]], list[Group]]
"""Gives the episodes of groups their advantages, as the section `algorithm` says."""

_TOLERANCE: Final = 1e-6
"""How far the rewards of two opponents may be from adding up to 0, in relation to their size."""


@dataclass(slots=True)
class RunningBaseline:
    """The mean reward of an agent in earlier batches, of which later ones count more.

    Attributes:
        config: how much of it stays when a batch is added, and where it starts.
        value: the baseline of the next batch.
        num_batches: the batches in it.
    """

    config: RunningBaselineConfig
    value: float
    num_batches: int = 0

    def add(self, rewards: Sequence[float]) -> None:
        """Add the rewards of a batch that was learned from. The first batch replaces the start."""
        mean, kept = math.fsum(rewards) / len(rewards), self.config.decay if self.num_batches else 0.0
        self.value = kept * self.value + (1 - kept) * mean
        self.num_batches += 1


@dataclass(frozen=True, slots=True)
class AgentCredit:
    """How the agents of a run's episodes are credited, and the running baselines.

    Attributes:
        agents: the settings of agents, by name; those of others are the defaults.
        names: the agents that the program declares.
        baselines: those of agents with `advantage: baseline`.
    """

    agents: Mapping[str, AgentConfig] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    baselines: dict[str, RunningBaseline] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name, agent in self.agents.items():
            if agent.advantage == "baseline":
                self.baselines[name] = RunningBaseline(agent.baseline, agent.baseline.start)

    def rule(self, name: str) -> str:
        """Return what an agent's reward is compared with."""
        return self.agents[name].advantage if name in self.agents else "group"

    @property
    def compares_groups(self) -> bool:
        """Whether any agent is compared as `algorithm.advantage` says."""
        return not self.names or any(self.rule(name) == "group" for name in self.names)

    def assign(self, groups: Sequence[Group], assign: AssignFunction) -> list[Group]:
        """Return groups with the advantages of all agents that learn. `assign` computes them for one agent's groups."""
        names = agent_names(groups)
        places = {name: _learned_places(groups, name) for name in names}
        views = {name: [view_group(groups[at], name) for at in places[name]] for name in names}
        found: dict[str, list[Group]] = {}
        for name in names:
            if self.rule(name) == "baseline":
                found[name] = self._from_baseline(name, views[name])
            elif self.rule(name) == "group" and _has_scores([groups[at] for at in places[name]], name):
                found[name] = assign(views[name])
        for name in names:
            if self.rule(name) == "zero_sum":
                (opponent,) = (other for other in names if other != name)
                if opponent not in found:
                    raise _no_reward(name, opponent)
                found[name] = _opposed(name, views[name], opponent, found[opponent])
        credited = [(name, dict(zip(places[name], parts, strict=True))) for name, parts in found.items()]
        return [
            replace(
                group,
                episodes=tuple(
                    _merged(episode, {name: parts[at].episodes[member] for name, parts in credited if at in parts})
                    for member, episode in enumerate(group.episodes)
                ),
            )
            for at, group in enumerate(groups)
        ]

    def _from_baseline(self, name: str, groups: Sequence[Group]) -> list[Group]:
        value = self.baselines[name].value
        return [
            replace(
                group,
                episodes=tuple(replace(each, advantage=each.score.reward - value) for each in group.episodes),
            )
            for group in groups
        ]

    def learned_from(self, groups: Sequence[Group]) -> None:
        """Add a batch that was learned from to the running baselines."""
        for name, baseline in self.baselines.items():
            own = [view_group(group, name) for group in groups if _learns(group, name)]
            rewards = [each.score.reward for group in own for each in group.episodes]
            if rewards:
                baseline.add(rewards)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: nothing without running baselines."""
        return {name: [each.value.hex(), each.num_batches] for name, each in self.baselines.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint. A baseline that it does not have starts anew."""
        for name, (value, num_batches) in state.items():
            if name in self.baselines:
                self.baselines[name].value = float.fromhex(value)
                self.baselines[name].num_batches = int(num_batches)


def _learned_places(groups: Sequence[Group], name: str) -> Sequence[int]:
    """Return which groups an agent is credited in: where it learns in some only (`episode.league`), in those."""
    learned = [at for at, group in enumerate(groups) if _learns(group, name)]
    return learned or range(len(groups))


def _learns(group: Group, name: str) -> bool:
    return any(episode.agents[name].learns for episode in group.episodes)


def _has_scores(groups: Sequence[Group], name: str) -> bool:
    return all(each.agents[name].score is not None for group in groups for each in group.episodes)


def _no_reward(name: str, opponent: str) -> RewardError:
    return RewardError(
        f"{opponent} has no reward",
        path=f"episode.agents.{name}.advantage",
        value="zero_sum",
        rule=f"a reward for {opponent}, too: the negative of what {name} earns",
        repair=f"return a reward for both, or set episode.agents.{name}.advantage to group",
    )


def _opposed(name: str, groups: Sequence[Group], opponent: str, opposite: Sequence[Group]) -> list[Group]:
    """Return the groups of an agent with the negative advantages of its opponent."""
    found = []
    for group, other in zip(groups, opposite, strict=True):
        pairs = list(zip(group.episodes, other.episodes, strict=True))
        for own, against in pairs:
            _check_zero_sum(name, own, opponent, against, group=group.number)
        opposed = tuple(replace(own, advantage=-against.advantage, token_advantages=None) for own, against in pairs)
        found.append(replace(group, episodes=opposed))
    return found


def _check_zero_sum(name: str, own: Episode, opponent: str, against: Episode, *, group: int) -> None:
    rewards = {name: own.score.reward, opponent: against.score.reward}
    total, size = math.fsum(rewards.values()), max(map(abs, rewards.values()))
    if abs(total) > _TOLERANCE * max(1.0, size):
        raise RewardError(
            "the rewards of a zero-sum game do not add up to 0",
            path=f"group {group}, sample {own.member} ({own.task.id})",
            value=rewards,
            rule=f"0 for {name} and {opponent} together with episode.agents.{name}.advantage `zero_sum`",
            repair=f"correct the rewards, or set episode.agents.{name}.advantage to group",
        )
    if against.token_advantages is not None:
        raise DataError(
            "the opponent's tokens have advantages of their own",
            path=f"episode.agents.{name}.advantage",
            value="zero_sum",
            rule="one advantage for an episode: it is negated for all tokens of the opponent",
            repair="set it to group, or use an advantage function that gives one number for an episode",
        )


def _merged(episode: Episode, parts: Mapping[str, Episode]) -> Episode:
    """Return an episode with the advantages of its agents: one for each token, 0 where nothing is learned from it."""
    learned = {name: part for name, part in parts.items() if episode.agents[name].learns}
    values = {
        name: iter(part.token_advantages or (part.advantage,) * part.num_tokens) for name, part in learned.items()
    }
    tokens = [
        next(values[turn.agent]) if turn.agent in values else 0.0 for turn in episode.turns for _ in turn.token_ids
    ]
    agents = {
        name: replace(result, advantage=learned[name].advantage) if name in learned else result
        for name, result in episode.agents.items()
    }
    first = next((part.advantage for part in learned.values()), 0.0)
    return replace(episode, advantage=first, token_advantages=tuple(tokens), agents=agents)
