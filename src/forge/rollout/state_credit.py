"""Advantages of turns that were taken in the same state: GiGPO's groups within a group (arXiv 2505.10978).

The advantage of a turn is that of its episode among the episodes of its group, plus `omega` times that of the turn
among all turns of the group that were taken in the same state. The second part is computed from what each of these
turns earned from then on, discounted by turns. A state that was met once has nothing to compare with: its part is 0.

What a state is, the trace can tell in two ways:

| `state` | turns are compared that | |
|---|---|---|
| `observation` | read the same messages since the turn before them | the paper's; an observation may hide two states |
| `history` | have the same tokens before them, read and sampled | exact without chance, but rarely equal |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, get_args

from forge.config import AlgorithmConfig
from forge.config.algorithm import AdvantageConfig
from forge.errors import ConfigError
from forge.rollout.advantage import advantages
from forge.rollout.turn_credit import TurnRewards
from forge.types import Episode, Group, Turn

State = Literal["observation", "history"]


def gigpo(
    groups: Sequence[Group],
    *,
    algorithm: AlgorithmConfig,
    gamma: float = 0.95,
    omega: float = 1.0,
    state: State = "observation",
) -> list[list[list[float]]]:
    """Return the advantage of every sampled token: its episode's, plus `omega` times that of its turn in its state.

    This is the advantage function `gigpo` (`algorithm.advantage.function`). Baseline, scale and epsilon of the section
    are those of both parts; `clip` limits their sum.
    """
    return [_of_group(group, algorithm.advantage, gamma=gamma, omega=omega, state=state) for group in groups]


def state_advantages(states: Sequence[object], returns: Sequence[float], config: AdvantageConfig) -> list[float]:
    """Return the advantage of each return among those of the same state; 0 where the state was met once."""
    places: dict[object, list[int]] = {}
    for place, state in enumerate(states):
        places.setdefault(state, []).append(place)
    found = [0.0] * len(returns)
    for same in places.values():
        (values,) = advantages([[returns[place] for place in same]], config)
        for place, value in zip(same, values, strict=True):
            found[place] = value
    return found


def state_of(episode: Episode, turn: Turn, state: State) -> object:
    """Return what identifies the state that a turn was taken in, among the turns of its group."""
    if state == "observation" and turn.messages:
        read = [each for each in turn.messages if each.get("role") != "assistant"]
        return json.dumps([[each.get("role"), each.get("content")] for each in read], sort_keys=True, default=str)
    if state == "observation":
        return turn.context_ids
    tokens: list[tuple[int, ...]] = [turn.context_ids]
    before = turn.parent
    while before is not None:
        parent = episode.turns[before]
        tokens += [parent.token_ids, parent.context_ids]
        before = parent.parent
    return tuple(token for part in reversed(tokens) for token in part)


def _of_group(group: Group, config: AdvantageConfig, *, gamma: float, omega: float, state: State) -> list[list[float]]:
    unclipped = config.model_copy(update={"clip": None})
    (of_episodes,) = advantages([group.rewards], unclipped)
    states: list[object] = []
    returns: list[float] = []
    for episode in group.episodes:
        earned = TurnRewards.of(episode).returns(gamma)
        counted = [turn for turn in episode.turns if turn.counts]
        states += [state_of(episode, turn, state) for turn in counted]
        returns += [earned[turn.index] for turn in counted]
    of_states = iter(state_advantages(states, returns, unclipped))
    limit = float("inf") if config.clip is None else config.clip
    found = []
    for episode, value in zip(group.episodes, of_episodes, strict=True):
        of_turns = [value + omega * (next(of_states) if turn.counts else 0.0) for turn in episode.turns]
        limited = [min(max(each, -limit), limit) for each in of_turns]
        found.append([each for each, turn in zip(limited, episode.turns, strict=True) for _ in turn.token_ids])
    return found


def _check_arguments(*, gamma: float = 0.95, omega: float = 1.0, state: str = "observation") -> None:
    checks = {
        "gamma": (gamma, 0 < gamma <= 1, "above 0 and at most 1", "0.95 is usual; 1 for no discount"),
        "omega": (omega, 0 <= omega < float("inf"), "a finite number of at least 0", "1 is usual"),
        "state": (state, state in get_args(State), f"one of {', '.join(get_args(State))}", "leave it out if in doubt"),
    }
    for name, (value, is_allowed, rule, repair) in checks.items():
        if not is_allowed:
            raise ConfigError(
                "an argument of `gigpo` is out of range",
                path=f"algorithm.advantage.args.{name}",
                value=value,
                rule=rule,
                repair=repair,
            )


gigpo.needs_batch = False  # type: ignore[attr-defined]
gigpo.check_arguments = _check_arguments  # type: ignore[attr-defined]
