"""Episodes: what a program made of one task, and how it is run."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from forge.envs.agent import Agent
from forge.envs.agent_scores import episode_score, score_agents
from forge.envs.limits import EpisodeOver, Fault, ReplayMismatch, reason_of
from forge.envs.state import EpisodeCounts, EpisodeState
from forge.errors import OptionError
from forge.types import DEFAULT_AGENT, AgentResult, EpisodeOutcome, Score, Task, Turn

Returned = float | Score | Mapping[str, float | Score] | None
"""What a program returns: its reward, rewards by agent where it declares agents, or None."""

Program = Callable[..., Awaitable[Returned]]
"""A coroutine function `(task, agent)`, or with one argument for each agent that it declares."""

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
        agents: what each agent earned, where the program declares agents. Then `score` is that of the first agent that
            learns, with the parts of all.
    """

    task: Task
    turns: tuple[Turn, ...]
    score: Score
    turn_rewards: Mapping[int, float]
    outcome: EpisodeOutcome
    counts: EpisodeCounts
    seconds: float
    num_replayed: int = 0
    agents: Mapping[str, AgentResult] = field(default_factory=dict)


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
        agents: the names of its agents, each an argument after the task; empty for one agent without a name.
    """

    function: Program
    name: str
    deterministic: bool = False
    limit_reward: float = 0.0
    time_is_task: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)
    oracle: Callable[..., Any] | None = None
    agents: tuple[str, ...] = ()

    async def __call__(self, task: Task, *agents: Agent) -> Returned:
        return await self.function(task, *agents, **self.args)

    def with_args(self, args: Mapping[str, Any]) -> EpisodeProgram:
        """Return the program with keyword arguments in addition to those that it has, checked against its signature.

        Of an argument that it has already, the new value is used.
        """
        merged = {**self.args, **args}
        try:
            inspect.signature(self.function).bind(None, *(self.agents or (None,)), **merged)
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
    agents: Sequence[str] = (),
) -> Callable[[Program], EpisodeProgram]: ...


def episode(
    function: Program | None = None,
    *,
    deterministic: bool = False,
    limit_reward: float = 0.0,
    time_is_task: bool = False,
    oracle: Callable[..., Any] | None = None,
    agents: Sequence[str] = (),
) -> EpisodeProgram | Callable[[Program], EpisodeProgram]:
    """Make a coroutine function `(task, agent)` an episode: `@episode`, or `@episode(deterministic=True)`.

    The program returns a number, a `Score`, or None after it called `agent.add_reward`. `oracle` knows right answers,
    for `forge env check`.

    With `agents=["solver", "critic"]` the function is `(task, solver, critic)`: it gets one `Agent` for each name, in
    this order, and returns rewards by name, or None after it called `add_reward` of each.
    """
    names = check_agent_names(agents)

    def make(function: Program) -> EpisodeProgram:
        name = getattr(function, "__qualname__", repr(function))
        if not inspect.iscoroutinefunction(function):
            raise OptionError(
                "an episode is a coroutine function",
                path=name,
                value=function,
                rule=_rule(names),
                repair="write `async def`",
            )
        _check_signature(function, name, names)
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
            agents=names,
        )

    return make if function is None else make(function)


def check_agent_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a program's agents; `OptionError` where they cannot be used."""
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    given: list[Any] = list(names) if is_list else [names]
    wrong = [name for name in given if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name))]
    if wrong or not is_list or len(set(given)) < len(given):
        raise OptionError(
            "these are not the names of agents",
            path="episode(agents=)",
            value=names,
            rule="a list of different names of letters, digits and underscores that start with a letter",
            repair='write @episode(agents=["solver", "critic"])',
        )
    return tuple(given)


def _rule(agents: Sequence[str]) -> str:
    return f"async def program(task, {', '.join(agents or (DEFAULT_AGENT,))})"


def _check_signature(function: Program, name: str, agents: tuple[str, ...]) -> None:
    """Refuse a function that does not take a task and its agents, or takes them in another order."""
    signature = inspect.signature(function)
    try:
        bound = signature.bind_partial(None, *(agents or (DEFAULT_AGENT,)))
    except TypeError:
        bound = None
    taken = {} if bound is None or not agents else bound.arguments
    swapped = [each for each, given in taken.items() if each in agents and given != each]
    if bound is None or swapped:
        raise OptionError(
            f"an episode takes a task and {'its agents, in their order' if agents else 'an agent'}",
            path=name,
            value=f"{name}{signature}",
            rule=_rule(agents),
            repair="give it these parameters first",
        )


async def run_episode(program: EpisodeProgram, state: EpisodeState) -> EpisodeRun:
    """Run one episode to its end and score it.

    Raises `Fault` for what was not the policy's doing, `RewardError` for a program without a valid reward, and whatever
    else the program raises.
    """
    loop = asyncio.get_running_loop()
    began, limit_s = loop.time(), state.limits.timeout_s
    returned: Returned = None
    closing: asyncio.TimerHandle | None = None
    try:
        async with asyncio.timeout(None) as close_timer, asyncio.timeout(limit_s) as timer:
            if limit_s is not None:
                # What a program does when its time is up, such as closing an environment, has a limit of its own. That
                # one begins only then: a loop that was held up until both are over would cancel the program only once.
                closing = loop.call_later(limit_s, lambda: close_timer.reschedule(loop.time() + CLOSE_LIMIT_S))
            participants = [Agent(state, name=name) for name in program.agents or (DEFAULT_AGENT,)]
            returned = await program(state.task, *participants)
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
        if closing is not None:
            closing.cancel()
        state.close()
    if state.over is not None:  # whatever the program did after it
        state.outcome = state.over.outcome
    agents = score_agents(program, state, returned)
    score = agents[DEFAULT_AGENT].score if not program.agents else episode_score(agents)
    assert score is not None
    turns, turn_rewards = _ordered(state, program.agents)
    return EpisodeRun(
        state.task,
        turns,
        score,
        turn_rewards,
        state.outcome,
        state.counts,
        loop.time() - began,
        state.journal.num_replayed,
        agents if program.agents else {},
    )


def _ordered(state: EpisodeState, agents: Sequence[str]) -> tuple[tuple[Turn, ...], dict[int, float]]:
    """Return turns by agent, branch and number instead of by arrival, and their rewards by their new index.

    Turns of an agent that is not the live policy keep their text only: their tokens may be another vocabulary's, and
    nothing learns from them.
    """
    rank = {name: number for number, name in enumerate(agents or (DEFAULT_AGENT,))}
    # within a branch, arrival is the order
    order = sorted(state.turns, key=lambda turn: (rank[turn.agent], turn.path, turn.index))
    place = {turn.index: number for number, turn in enumerate(order)}

    def moved(index: int | None) -> int | None:
        return None if index is None else place[index]

    turns = tuple(
        replace(
            turn if state.binding(turn.agent).is_live else turn.without_tokens(),
            index=place[turn.index],
            parent=moved(turn.parent),
            previous=moved(turn.previous),
        )
        for turn in order
    )
    return turns, {place[index]: value for index, value in sorted(state.turn_rewards.items())}
