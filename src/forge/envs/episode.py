"""Episodes: what a program made of one task, and how it is run."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, overload

from forge.envs.agent import Agent
from forge.envs.agent_checks import check_reward
from forge.envs.limits import EpisodeOver, Fault, ReplayMismatch, reason_of
from forge.envs.state import EpisodeCounts, EpisodeState
from forge.errors import OptionError, RewardError
from forge.types import EpisodeOutcome, Score, Task, Turn

Program = Callable[[Task, Agent], Awaitable[float | Score | None]]
RETURNED: Final = "reward"
"""The name of the reward that a program returns as a number."""

CLOSE_LIMIT_S = 30.0
"""How long a program may take to end after its time was up or it was cancelled."""


@dataclass(frozen=True, slots=True)
class EpisodeRun:
    """A finished episode.

    Attributes:
        task: what was to be done.
        turns: its completions as a tree, ordered by branch and turn, whatever order they arrived in.
        score: what it earned in all.
        turn_rewards: what each turn earned itself, by index; the rest of the score belongs to the whole.
        outcome: how it ended.
        counts: what it used.
        seconds: how long it took.
        num_replayed: entries that came from a journal.
    """

    task: Task
    turns: tuple[Turn, ...]
    score: Score
    turn_rewards: Mapping[int, float]
    outcome: EpisodeOutcome
    counts: EpisodeCounts
    seconds: float
    num_replayed: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeProgram:
    """An episode's program with what it declares. Make one with `episode`; calling it calls the program.

    Attributes:
        function: the program.
        name: what messages and records call it.
        deterministic: whether it does the same when it is run again with the same turns, so that its journal can be
            replayed after a crash.
        limit_reward: what an episode earns that a limit ended before it was given any reward.
        time_is_task: whether running out of `timeout_s` is the policy's doing. Otherwise it is a fault.
        args: keyword arguments for the program.
        oracle: knows right answers, for `forge env check`: a function (task) -> list of answers, or (task, messages) ->
            the next answer; None where there is none.
    """

    function: Program
    name: str
    deterministic: bool = False
    limit_reward: float = 0.0
    time_is_task: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)
    oracle: Callable[..., Any] | None = None

    async def __call__(self, task: Task, agent: Agent) -> float | Score | None:
        return await self.function(task, agent, **self.args)

    def with_args(self, args: Mapping[str, Any]) -> EpisodeProgram:
        """Return the program with keyword arguments in addition to those that it has, checked against its signature.

        Of an argument that it has already, the new value is used.
        """
        merged = {**self.args, **args}
        try:
            inspect.signature(self.function).bind(None, None, **merged)
        except TypeError as error:
            raise OptionError(
                f"the episode {self.name} does not take these arguments: {error}",
                path="episode.args",
                value=merged,
                rule=f"keyword arguments of {self.name}{inspect.signature(self.function)}",
                repair="correct episode.args",
            ) from None
        return replace(self, args=merged)


@overload
def episode(function: Program) -> EpisodeProgram: ...


@overload
def episode(
    *,
    deterministic: bool = False,
    limit_reward: float = 0.0,
    time_is_task: bool = False,
    oracle: Callable[..., Any] | None = None,
) -> Callable[[Program], EpisodeProgram]: ...


def episode(
    function: Program | None = None,
    *,
    deterministic: bool = False,
    limit_reward: float = 0.0,
    time_is_task: bool = False,
    oracle: Callable[..., Any] | None = None,
) -> EpisodeProgram | Callable[[Program], EpisodeProgram]:
    """Make a coroutine function `(task, agent)` an episode: `@episode`, or `@episode(deterministic=True)`.

    The program returns a number, a `Score`, or None after it called `agent.add_reward`. `oracle` knows right answers,
    for `forge env check`.
    """

    def make(function: Program) -> EpisodeProgram:
        name = getattr(function, "__qualname__", repr(function))
        if not inspect.iscoroutinefunction(function):
            raise OptionError(
                "an episode is a coroutine function",
                path=name,
                value=function,
                rule="async def program(task, agent)",
                repair="write `async def`",
            )
        try:
            inspect.signature(function).bind_partial(None, None)
        except TypeError:
            raise OptionError(
                "an episode takes a task and an agent",
                path=name,
                value=f"{name}{inspect.signature(function)}",
                rule="async def program(task, agent)",
                repair="give it these two parameters first",
            ) from None
        if not math.isfinite(limit_reward):
            raise OptionError(
                "limit_reward is not a finite number",
                path=f"episode {name}: limit_reward",
                value=limit_reward,
                rule="a finite number",
                repair="leave it out for 0",
            )
        return EpisodeProgram(
            function,
            name,
            deterministic=deterministic,
            limit_reward=limit_reward,
            time_is_task=time_is_task,
            oracle=oracle if oracle is not None else getattr(function, "oracle", None),
        )

    return make if function is None else make(function)


async def run_episode(program: EpisodeProgram, state: EpisodeState) -> EpisodeRun:
    """Run one episode to its end and score it.

    Raises `Fault` for what was not the policy's doing, `RewardError` for a program without a valid reward, and whatever
    else the program raises.
    """
    loop = asyncio.get_running_loop()
    began, limit_s = loop.time(), state.limits.timeout_s
    returned: float | Score | None = None
    try:
        # What a program does when its time is up, such as closing an environment, has a limit of its own.
        close_s = None if limit_s is None else limit_s + CLOSE_LIMIT_S
        async with asyncio.timeout(close_s), asyncio.timeout(limit_s) as timer:
            returned = await program(state.task, Agent(state))
    except Exception as error:
        reason = reason_of(error)  # programs run branches in task groups
        if timer.expired() and not isinstance(reason, Fault | ReplayMismatch):
            if not program.time_is_task:
                raise Fault(f"the episode took longer than {limit_s:g} s", kind="time", path=str(state.key)) from None
            state.outcome = "time_limit"
        elif isinstance(reason, EpisodeOver):
            state.end(reason)
        elif reason is error:
            raise
        else:
            raise reason from error
    finally:
        state.close()
    if state.over is not None:  # whatever the program did after it
        state.outcome = state.over.outcome
    score = _score(program, state, returned)
    turns, turn_rewards = _ordered(state)
    seconds = loop.time() - began
    replayed = state.journal.num_replayed
    return EpisodeRun(state.task, turns, score, turn_rewards, state.outcome, state.counts, seconds, replayed)


def _score(program: EpisodeProgram, state: EpisodeState, returned: float | Score | None) -> Score:
    parts = dict(state.rewards)
    if isinstance(returned, Score):
        check_reward(returned.reward, RETURNED)
        parts = {**returned.parts, **{name: parts[name] + returned.parts.get(name, 0.0) for name in parts}}
        for name, value in returned.parts.items():
            check_reward(value, name)
        added = math.fsum(state.rewards.values())
        unshaped = None if returned.unshaped is None else check_reward(returned.unshaped, "unshaped") + added
        return replace(returned, reward=returned.reward + added, parts=parts, unshaped=unshaped)
    if returned is not None:
        parts[RETURNED] = parts.get(RETURNED, 0.0) + check_reward(returned, RETURNED)
    if not parts and state.outcome != "finished":
        parts["limit"] = program.limit_reward
    if not parts:
        raise RewardError(
            f"the episode {program.name} gave no reward",
            path=str(state.key),
            value=None,
            rule="return a number or a Score, or call agent.add_reward",
            repair="give every ending a reward; raise Fault where there is none because something else failed",
        )
    return Score(math.fsum(parts.values()), parts)


def _ordered(state: EpisodeState) -> tuple[tuple[Turn, ...], dict[int, float]]:
    """Return turns by branch and number instead of by arrival, and their rewards by their new index."""
    order = sorted(state.turns, key=lambda turn: (turn.path, turn.index))  # within a branch, arrival is the order
    place = {turn.index: number for number, turn in enumerate(order)}

    def moved(index: int | None) -> int | None:
        return None if index is None else place[index]

    turns = tuple(
        replace(turn, index=place[turn.index], parent=moved(turn.parent), previous=moved(turn.previous))
        for turn in order
    )
    return turns, {place[index]: value for index, value in sorted(state.turn_rewards.items())}
