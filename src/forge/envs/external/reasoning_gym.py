"""reasoning-gym: its tasks as episodes, with its own score, and with further attempts where you allow them.

Tasks come from the prompt source (`task: reasoning_gym/NAME`) and the score from the reward `reasoning_gym`. Scoring
runs on a thread with a time limit. A score that raises, takes too long or is not a number is a `Fault`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from forge.config.base import ConfigModel
from forge.envs.agent import Agent
from forge.envs.external.adapting import options_of, program_of
from forge.envs.limits import Fault
from forge.envs.tool_threads import ToolExit, call_on_thread
from forge.envs.trace import Message
from forge.errors import ForgeError
from forge.registry import REWARDS
from forge.types import Task, Turn


class ReasoningGymOptions(ConfigModel):
    """The arguments of the episode `reasoning_gym`."""

    attempts: int = Field(default=1, ge=1, description="Answers that the policy may give.")
    feedback: str = Field(
        default="That is not right. Try again.", description="What it reads after an answer without a full score."
    )
    take: Literal["all", "boxed", "marker", "last_line"] = Field(
        default="all", description="Which part of an answer is scored, as for the reward."
    )
    within: str | None = Field(default=None, description="The tag that the scored part stands in, as for the reward.")
    partial: bool = Field(default=True, description="Whether less than a full score counts, as for the reward.")
    score_timeout_s: float = Field(default=30.0, gt=0, description="Seconds that scoring an answer may take.")


async def _score(score: Callable[..., float], task: Task, turn: Turn, limit_s: float) -> float:
    try:
        async with asyncio.timeout(limit_s):
            found = float(await call_on_thread(partial(score, task, turn), name="reasoning_gym"))
    except TimeoutError:
        message = f"scoring an answer to {task.id} took longer than {limit_s:g} s"
        raise Fault(message, kind="reasoning_gym_timeout", path=task.id) from None
    except ForgeError:  # the package or the task's metadata is missing
        raise
    except Exception as error:
        raised = error.error if isinstance(error, ToolExit) else error
        message = f"scoring an answer to {task.id} failed: {type(raised).__name__}: {raised}"
        raise Fault(message, kind="reasoning_gym_error", path=task.id) from error
    if not math.isfinite(found):
        raise Fault(f"the score of an answer to {task.id} is {found}", kind="reasoning_gym_schema", path=task.id)
    return found


async def _play(task: Task, agent: Agent, **args: Any) -> None:
    given = options_of(ReasoningGymOptions, args)
    reward = REWARDS.find("reasoning_gym", path="episode.kind")
    score = partial(reward, take=given.take, within=given.within, partial=given.partial)
    messages: Sequence[Message] = task.messages or ({"role": "user", "content": task.text or ""},)
    scored: tuple[float, Turn] | None = None
    try:
        for _ in range(given.attempts):
            turn = await agent.generate(messages)
            scored = await _score(score, task, turn, given.score_timeout_s), turn
            if scored[0] >= 1.0:
                break
            messages = [{"role": "user", "content": given.feedback}]
    finally:  # the last answer counts, even if a limit ended a further attempt
        if scored is not None:
            agent.add_reward(scored[0], turn=scored[1])


reasoning_gym_episode = program_of(_play, ReasoningGymOptions, "reasoning_gym_episode")
"""Plays a task of reasoning-gym; arguments as `ReasoningGymOptions`."""
