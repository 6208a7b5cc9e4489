"""One agent's part of an episode, as an episode of its own: what advantages, losses and signal tests work with.

The sequence of a loss is such a part: an episode times an agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from forge.envs.agent_scores import episode_score
from forge.types import AgentResult, Episode, Group, Score


def agent_names(groups: Sequence[Group]) -> tuple[str, ...]:
    """Return the names of the agents of groups, in the order in which the program declares them; none without names."""
    return tuple(groups[0].episodes[0].agents) if groups else ()


def agent_view(episode: Episode, name: str) -> Episode:
    """Return one agent's part of an episode: its turns, what it earned, and the values of its tokens."""
    result = episode.agents[name]
    own = [turn for turn in episode.turns if turn.agent == name]
    place = {turn.index: number for number, turn in enumerate(own)}
    turns = tuple(
        replace(
            turn,
            index=place[turn.index],
            parent=None if turn.parent is None else place[turn.parent],
            previous=None if turn.previous is None else place[turn.previous],
        )
        for turn in own
    )
    return replace(
        episode,
        turns=turns,
        score=result.score or Score(0.0),
        advantage=result.advantage,
        ref_logprobs=_own_values(episode, name, episode.ref_logprobs),
        values=_own_values(episode, name, episode.values),
        end_values={place[index]: value for index, value in episode.end_values.items() if index in place},
        teacher_logprobs=_own_values(episode, name, episode.teacher_logprobs),
        token_advantages=_own_values(episode, name, episode.token_advantages),
        turn_rewards={place[index]: value for index, value in episode.turn_rewards.items() if index in place},
        agents={},
    )


def _own_values(episode: Episode, name: str, values: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return those of the episode's T values that belong to an agent's tokens."""
    if values is None:
        return None
    found: list[float] = []
    start = 0
    for turn in episode.turns:
        if turn.agent == name:
            found += values[start : start + len(turn)]
        start += len(turn)
    return tuple(found)


def parts_of(episode: Episode) -> list[Episode]:
    """Return what is learned from in an episode: the parts of the agents that learn, or the episode itself."""
    if not episode.agents:
        return [episode]
    return [agent_view(episode, name) for name, result in episode.agents.items() if result.learns]


def view_group(group: Group, name: str) -> Group:
    """Return one agent's part of a group."""
    return replace(group, episodes=tuple(agent_view(episode, name) for episode in group.episodes))


def with_results(episode: Episode, results: Mapping[str, AgentResult]) -> Episode:
    """Return the episode with other results of its agents, and the score that follows from them."""
    return replace(episode, agents=results, score=episode_score(results))
