"""Small episodes for tests of the loop: they run in worker processes, which import this module."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import forge
from forge import Agent, Episode, Fault, Task


@forge.episode(deterministic=True)
async def dialogue(task: Task, agent: Agent, *, num_turns: int = 3) -> float:
    """Asks again a few times, and rewards even numbers of characters: each turn for itself."""
    turn = await agent.generate(task.messages)
    for _ in range(num_turns - 1):
        agent.add_reward(float(len(turn.text) % 2 == 0), name="even", turn=turn)
        turn = await agent.generate([{"role": "user", "content": "Again?"}])
    return float(len(turn.text) % 2 == 0)


@forge.episode
async def branching(task: Task, agent: Agent) -> float:
    """Two continuations of one answer, sampled at the same time."""
    await agent.generate(task.messages)
    others = [agent.fork(), agent.fork()]
    turns = [await other.generate([{"role": "user", "content": "Go on"}]) for other in others]
    return float(sum(len(turn.text) % 2 == 0 for turn in turns))


@forge.episode
async def failing(task: Task, agent: Agent, *, at: int = 0) -> float:
    """Faults for some groups, always."""
    turn = await agent.generate(task.messages)
    if int(task.id.rsplit(":", 1)[-1]) % 5 == at:
        raise Fault("the tool server cannot be reached", kind="server")
    return float(len(turn.text) % 2 == 0)


def longest_wins(task: Task, episodes: Sequence[Episode]) -> list[float]:
    """A group's reward: 1 for the longest."""
    most = max(episode.num_tokens for episode in episodes)
    return [float(episode.num_tokens == most) for episode in episodes]


@forge.episode
async def broken(task: Task, agent: Agent) -> float:
    """A program with a mistake."""
    turn = await agent.generate(task.messages)
    table: dict[str, float] = {"here": float(len(turn.text))}
    return table["nowhere"]


async def kill_once(marker: str, *, victim: str, checkpoint: str | None) -> None:
    """Kill this process or the controller, when a checkpoint is there, unless the marker says that it was done."""
    if Path(marker).exists():
        return
    Path(marker).touch()
    while checkpoint is not None and not Path(checkpoint).exists():  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.01)
    os.kill(os.getpid() if victim == "worker" else int(os.environ["FORGE_OWNER_PID"]), signal.SIGKILL)


@forge.episode(deterministic=True)
async def killing(
    task: Task, agent: Agent, *, marker: str, victim: str, task_id: str, checkpoint: str | None = None
) -> float:
    """As `dialogue`; once, in the middle of one task's episode, it kills its own process or the controller."""
    turn = await agent.generate(task.messages)
    turn = await agent.generate([{"role": "user", "content": "Again?"}])
    if task.id == task_id:
        await kill_once(marker, victim=victim, checkpoint=checkpoint)
    turn = await agent.generate([{"role": "user", "content": "And again?"}])
    return sum(turn.token_ids) % 7 / 7  # hardly ever the same for all of a group
