"""What `benchmarks/episodes.py` runs in worker processes: a generator that answers at once, and a short episode."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

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
    turn = await agent.generate(task.messages)
    for number in range(num_turns - 1):
        turn = await agent.generate([{"role": "user", "content": f"And then? ({number})"}])
    return float(turn.seed % 2)
