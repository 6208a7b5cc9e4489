"""The integrations that `tests/contract/test_environments.py` runs: each says how to play it, and how to break it.

To add one: write an `Integration` in a module of its own, and return it from `integrations`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forge import Observation, Task
from forge.envs.environment import episode_from_env
from forge.envs.episode import EpisodeProgram
from forge.envs.external.venvs import VenvError, python_of

Trouble = Literal["crash", "hang", "flood", "violation"]
TROUBLES: tuple[Trouble, ...] = ("crash", "hang", "flood", "violation")


class Unavailable(Exception):
    """What an integration needs is not on this machine and cannot be installed: its tests are skipped."""


def venv_or_unavailable(requirements: tuple[str, ...]) -> Path:
    """Return the Python of a venv. Raises `Unavailable` where it cannot be made."""
    found = _venv(requirements)
    if isinstance(found, VenvError):
        raise Unavailable(f"{requirements[0]} cannot be installed here: {found.message[-300:]}") from found
    return found


@functools.cache
def _venv(requirements: tuple[str, ...]) -> Path | VenvError:
    """Try once: without an index, pip takes long to give up."""
    try:
        return python_of(requirements)
    except VenvError as error:
        return error


@dataclass(frozen=True)
class Script:
    """One episode: what the policy answers, and what becomes of it.

    Attributes:
        answers: the policy's answers, in order; a call of a tool in the format of Hermes.
        reward: what the episode earns; None where it ends in a fault.
        fault: the kind of that fault.
        args: arguments of the program in addition to its own, such as short time limits.
        limits: fields of `EpisodeLimits`.
        metadata: replaces the task's.
    """

    answers: tuple[str, ...]
    reward: float | None = None
    fault: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None


async def nothing() -> None:
    """Close nothing."""


@dataclass(frozen=True)
class Integration:
    """An environment of another project, or our own, as the contract suite plays it.

    Attributes:
        name: for the test's id.
        open: returns the program, and raises `Unavailable` where it cannot. Called once, on the loop of all its tests.
        task: what every script plays. The same task and the same answers must give the same episode.
        good, bad: two scripts with at least two turns and different rewards.
        troubles: how the environment crashes, hangs, floods its output and violates its schema. A text instead of a
            script is the reason why it cannot.
        close: ends what episodes share, such as servers. Then no process, socket or task may be left.
    """

    name: str
    open: Callable[[], Awaitable[EpisodeProgram]]
    task: Task
    good: Script
    bad: Script
    troubles: Mapping[Trouble, Script | str]
    close: Callable[[], Awaitable[None]] = nothing


NUMBERS = ("one", "two", "three")


class TroubledCounting:
    """Count to three, one number in each answer. Some words make it fail."""

    num_open = 0

    def __init__(self) -> None:
        self._at = 0

    async def reset(self, task: Task) -> Observation:
        TroubledCounting.num_open += 1
        return Observation([{"role": "user", "content": f"Count to three, {task.metadata['who']}."}])

    async def step(self, message: Mapping[str, Any]) -> Observation:
        word = str(message["content"])
        if word == "crash":
            raise ConnectionResetError("the environment is gone")
        if word == "hang":
            await asyncio.Event().wait()
        if word == "flood":
            return Observation([{"role": "user", "content": "na " * 500_000}], reward=0.0)
        is_next = word == NUMBERS[self._at]
        self._at += 1
        return Observation(
            [{"role": "user", "content": "Next."}], reward=float(is_next), terminated=self._at == 3 or not is_next
        )

    async def close(self) -> None:
        TroubledCounting.num_open -= 1


async def _open_counting() -> EpisodeProgram:
    return episode_from_env(TroubledCounting)


async def _close_counting() -> None:
    assert TroubledCounting.num_open == 0, "an environment was not closed"


COUNTING = Integration(
    "forge",
    open=_open_counting,
    task=Task("count:1", metadata={"who": "Ada"}),
    good=Script(NUMBERS, reward=3.0),
    bad=Script(("one", "three"), reward=1.0),
    troubles={
        "crash": Script(("one", "crash"), fault="raised"),
        "hang": Script(("one", "hang"), fault="time", limits={"timeout_s": 1.0}),
        "flood": Script(("one", "flood"), reward=1.0),  # it does not fit into the context: the policy's turn is over
        "violation": "an environment of your own that returns another type is a mistake in the program: the run ends",
    },
    close=_close_counting,
)


def integrations() -> list[Integration]:
    """Return all integrations that the contract suite plays."""
    from gymnasium_envs import GYMNASIUM
    from mcp_envs import MCP
    from openenv_envs import OPENENV
    from program_envs import BLACK_BOX
    from reasoning_gym_envs import REASONING_GYM
    from textarena_envs import TEXTARENA
    from verifiers_envs import VERIFIERS

    return [COUNTING, BLACK_BOX, *OPENENV, GYMNASIUM, TEXTARENA, *MCP, VERIFIERS, REASONING_GYM]
