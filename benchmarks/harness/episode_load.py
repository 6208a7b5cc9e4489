"""What `episodes.py` and `multi_agent.py` run in worker processes: a policy that answers at once, short episodes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import forge
from forge import Agent, Completion, ForgeActor, Task, endpoint
from forge.types import VersionSpan


class InstantGenerator(ForgeActor):
    """Answers every prompt with the same number of tokens, which depend on the seed alone."""

    def __init__(self, num_tokens: int, *, vocab_size: int) -> None:
        self._num_tokens, self._vocab_size = num_tokens, vocab_size

    @endpoint(concurrent=True)
    async def generate(self, *, token_ids: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        """Return one completion. It has no end token, so it was cut off by length."""
        count = min(self._num_tokens, sampling["max_tokens"])
        seed = hashlib.blake2b(str(sampling["seed"]).encode(), digest_size=64).digest()
        ids = tuple(100 + seed[place % 64] % (self._vocab_size - 100) for place in range(count))
        spans = (VersionSpan(0, 0, count),)
        return [Completion(tuple(token_ids), ids, (-1.0,) * count, None, "words", "length", versions=spans)]


@forge.episode
async def dialogue(task: Task, agent: Agent, *, num_turns: int = 4) -> float:
    """Asks again and again."""
    return await _conversation(task, agent, num_turns)


@forge.episode(agents=["one", "other"])
async def pair(task: Task, one: Agent, other: Agent, *, num_turns: int = 4) -> dict[str, float]:
    """Two of `dialogue` in one episode: each agent has a conversation of its own, at the same time."""
    first, second = await asyncio.gather(*(_conversation(task, each, num_turns) for each in (one, other)))
    return {"one": first, "other": second}


async def _conversation(task: Task, agent: Agent, num_turns: int) -> float:
    turn = await agent.generate(task.messages)
    for number in range(num_turns - 1):
        turn = await agent.generate([{"role": "user", "content": f"And then? ({number})"}])
    return float(turn.seed % 2)


class StepClock:
    """A sink that writes the clock and the CPU time of all of the run's processes at the end of every step."""

    def __init__(self, folder: Path, *, path: str) -> None:
        self._file = Path(path)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        if "time/step" not in values:
            return
        own = psutil.Process()
        cpu_s = sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))
        with self._file.open("a") as file:
            file.write(json.dumps({"step": step, "clock_s": time.perf_counter(), "cpu_s": cpu_s}) + "\n")

    def close(self) -> None:
        """Nothing is held open."""
