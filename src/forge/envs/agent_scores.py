"""What an episode's agents earned: from what its program returned and added, one score for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from forge.envs.agent_checks import check_reward
from forge.envs.state import EpisodeState
from forge.errors import RewardError
from forge.types import DEFAULT_AGENT, AgentResult, Score

if TYPE_CHECKING:
    from forge.envs.episode import EpisodeProgram, Returned

RETURNED: Final = "reward"
"""The name of the reward that a program returns as a number."""


def score_agents(program: EpisodeProgram, state: EpisodeState, returned: Returned) -> dict[str, AgentResult]:
    """Return what each agent of a program earned. `RewardError` where one that learns has no valid reward."""
    if not program.agents:
        score = _score(program, state, DEFAULT_AGENT, returned)
        assert score is not None
        return {DEFAULT_AGENT: AgentResult(score)}
    if returned is None:
        returned = {}
    if not isinstance(returned, Mapping) or set(returned) - set(program.agents):
        raise RewardError(
            f"the episode {program.name} did not return rewards by agent",
            path=str(state.key),
            value=returned,
            rule=f"a mapping with names among {', '.join(program.agents)}, or None after add_reward",
            repair=f"return {{{program.agents[0]!r}: 1.0, …}}",
        )
    found = {}
    for name in program.agents:
        binding = state.binding(name)
        score = _score(program, state, name, returned.get(name), is_needed=binding.learns)
        found[name] = AgentResult(score, learns=binding.learns, policy=binding.label)
    return found


def episode_score(agents: Mapping[str, AgentResult]) -> Score:
    """Return the score of an episode with several agents: that of the first that learns (else the first that has one),
    with the parts of all, each after its agent's name."""
    scores = {name: result.score for name, result in agents.items() if result.score is not None}
    main = next((name for name, result in agents.items() if result.learns), next(iter(scores), None))
    parts: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, score in scores.items():
        parts[name] = score.reward
        parts |= {f"{name}/{part}": value for part, value in score.parts.items() if part != RETURNED}
        failures |= {f"{name}/{part}": why for part, why in score.failures.items()}
    if main is None:
        return Score(0.0, parts, failures)
    return replace(scores[main], parts=parts, failures=failures)


def _score(
    program: EpisodeProgram, state: EpisodeState, agent: str, returned: object, *, is_needed: bool = True
) -> Score | None:
    rewards = state.used(agent).rewards
    parts = dict(rewards)
    if isinstance(returned, Score):
        check_reward(returned.reward, RETURNED)
        parts = {**returned.parts, **{name: parts[name] + returned.parts.get(name, 0.0) for name in parts}}
        for name, value in returned.parts.items():
            check_reward(value, name)
        added = math.fsum(rewards.values())
        unshaped = None if returned.unshaped is None else check_reward(returned.unshaped, "unshaped") + added
        return replace(returned, reward=returned.reward + added, parts=parts, unshaped=unshaped)
    if returned is not None:
        parts[RETURNED] = parts.get(RETURNED, 0.0) + check_reward(returned, RETURNED)
    if not parts and state.outcome != "finished":
        parts["limit"] = program.limit_reward
    if not parts and not is_needed:
        return None
    if not parts:
        whom = f"{agent} no reward" if program.agents else "no reward"
        each = f"a reward for {agent}" if program.agents else "a number or a Score"
        raise RewardError(
            f"the episode {program.name} gave {whom}",
            path=str(state.key),
            value=None,
            rule=f"return {each}, or call {agent}.add_reward",
            repair="give every ending a reward; raise Fault where there is none because something else failed",
        )
    return Score(math.fsum(parts.values()), parts)
