"""Environments that are stepped: reset, step, close."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

from forge.envs.agent import Agent
from forge.envs.episode import EpisodeProgram, episode
from forge.envs.limits import EpisodeOver
from forge.envs.tools import Tool
from forge.envs.trace import Message
from forge.errors import OptionError
from forge.registry import EPISODES
from forge.types import Task


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows.

    Attributes:
        messages: what the policy reads next.
        reward: what the last answer earned: a number, or several by name; None if there is nothing to say about it.
        terminated: whether the task has come to its own end.
        truncated: whether the environment ended it before; then the outcome is `truncated`.
        tools: tools that the policy may call in its next answer; their results are read before the environment steps.
        name: the name of a reward that is one number.
    """

    messages: Sequence[Message] = ()
    reward: float | Mapping[str, float] | None = None
    terminated: bool = False
    truncated: bool = False
    tools: Sequence[Tool | Callable[..., Any]] = ()
    name: str = "reward"

    @property
    def is_over(self) -> bool:
        return self.terminated or self.truncated

    @property
    def rewards(self) -> Mapping[str, float]:
        """The rewards by name; empty if there is none."""
        if self.reward is None:
            return {}
        return self.reward if isinstance(self.reward, Mapping) else {self.name: self.reward}


@runtime_checkable
class Env(Protocol):
    """An environment for one episode at a time. `forge.envs.limits.Fault` says that it failed itself."""

    async def reset(self, task: Task) -> Observation:
        """Begin a task."""
        ...

    async def step(self, message: Message) -> Observation:
        """Take the policy's answer, a message of the role `assistant`."""
        ...

    async def close(self) -> None:
        """Release everything. Called once at the end of every episode, however it ended."""
        ...


def episode_from_env(
    make: Callable[..., Env | Awaitable[Env]],
    *,
    deterministic: bool = False,
    limit_reward: float = 0.0,
    time_is_task: bool = False,
    **args: Any,
) -> EpisodeProgram:
    """Return the episode that plays an environment to its end: `episode_from_env(Maze, size=5)`.

    `make(**args)` makes one environment per episode, and may be a coroutine function. Each reward is that of the turn
    before it. A class may have a static method `oracle`. For the other options see `EpisodeProgram`.
    """
    if not callable(make):
        raise OptionError(
            "an environment is made anew for each episode",
            path="episode_from_env",
            value=type(make).__name__,
            rule="a class, or a function that returns an environment",
            repair="pass the class and its arguments: episode_from_env(Maze, size=5)",
        )

    async def play(task: Task, agent: Agent, **args: Any) -> None:
        made = make(**args)
        env = await made if inspect.isawaitable(made) else made
        if not isinstance(env, Env):
            raise OptionError(
                "this is not an environment",
                path=getattr(make, "__qualname__", repr(make)),
                value=type(env).__name__,
                rule="an object with the coroutine methods reset(task), step(message) and close()",
                repair="add what is missing",
            )
        try:
            await _play(env, task, agent)
        finally:
            closing: Any = env.close()
            if inspect.isawaitable(closing):  # a plain function has closed it already
                await closing

    play.__qualname__ = getattr(make, "__qualname__", "environment")
    play.__signature__ = _signature(play, make)  # type: ignore[attr-defined]  # so that arguments are checked early
    oracle = getattr(make, "oracle", None)
    program = episode(deterministic=deterministic, limit_reward=limit_reward, time_is_task=time_is_task, oracle=oracle)(
        play
    )
    return program.with_args(args) if args else program


def _signature(play: Callable[..., Any], make: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of an environment's episode: task and agent, then what `make` takes by name."""
    own = inspect.signature(play)
    task, agent, *_ = own.parameters.values()
    try:
        given = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # of some built-in classes nothing is known
        return own
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in given if each.kind in by_name]
    others = [each for each in given if each.kind is inspect.Parameter.VAR_KEYWORD]
    clashing = {"task", "agent"}.intersection(each.name for each in named)
    return own if clashing else own.replace(parameters=[task, agent, *named, *others])


def load_program(name: str, args: Mapping[str, Any], *, path: str = "episode.kind") -> EpisodeProgram:
    """Return the program that `module:attribute` names, with its arguments: an `@episode`, a coroutine function, or an
    environment's class."""
    return as_program(EPISODES.find(name, path=path), name=name, path=path).with_args(args)


def as_program(found: Any, *, name: str, path: str = "episode.kind") -> EpisodeProgram:
    """Return an object as a program: an `@episode`, a coroutine function, or an environment's class."""
    if isinstance(found, EpisodeProgram):
        return found
    if inspect.iscoroutinefunction(found):
        return episode(found)
    if inspect.isclass(found) and all(hasattr(found, method) for method in ("reset", "step", "close")):
        return episode_from_env(cast("Callable[..., Env]", found))
    raise OptionError(
        f"{name} is not an episode",
        path=path,
        value=type(found).__name__,
        rule="an @forge.episode, a coroutine function (task, agent), or a class with reset, step and close",
        repair="decorate the function with @forge.episode",
    )


async def _observe(env: Env, method: str, given: Any) -> Observation:
    """Return what an environment shows, or raise where its method is not as `Env` says."""
    made = getattr(env, method)(given)
    seen = await made if inspect.isawaitable(made) else made
    if isinstance(seen, Observation) and seen is not made:
        return seen
    raise OptionError(
        "an environment's method is not a coroutine function that returns an Observation",
        path=f"{type(env).__qualname__}.{method}",
        value=type(seen).__name__ if seen is not made else f"{type(seen).__name__}, from a plain function",
        rule=f"async def {method}(…) -> forge.Observation",
        repair="return Observation(messages, reward=…, terminated=…, truncated=…)",
    )


async def _play(env: Env, task: Task, agent: Agent) -> None:
    seen = await _observe(env, "reset", task)
    for name, value in seen.rewards.items():
        agent.add_reward(value, name=name)
    while not seen.is_over:
        if seen.tools:
            turn = await agent.run_tools(seen.messages, tools=seen.tools)
        else:
            turn = await agent.generate(seen.messages)
        seen = await _observe(env, "step", agent.messages[-1])
        for name, value in seen.rewards.items():
            agent.add_reward(value, name=name, turn=turn)
    if not seen.terminated:
        raise EpisodeOver("truncated", f"{type(env).__qualname__} ended the episode")


@dataclass(slots=True)
class CountingEnv:
    """The smallest environment, for examples and tests: count up to a number, one message at a time."""

    goal: int = 3
    _at: int = field(default=0, init=False)

    async def reset(self, task: Task) -> Observation:
        self._at = 0
        return Observation([{"role": "user", "content": f"Count to {self.goal}, one number in each answer."}])

    async def step(self, message: Message) -> Observation:
        is_next = str(message["content"]).strip() == str(self._at + 1)
        self._at += is_next
        is_done = self._at == self.goal or not is_next
        return Observation([{"role": "user", "content": "Next."}], reward=float(is_next), terminated=is_done)

    async def close(self) -> None:
        return None
