"""Rollouts: from a number to a finished group. One coroutine per group; any number of them run at once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from forge.config import Sampling
from forge.observe import span
from forge.rollout.progress import RolloutProgress
from forge.rollout.references import References, both
from forge.types import INITIAL_VERSION, Completion, Episode, Group, Score, Task


class Policy(Protocol):
    """What a rollout needs of the generators."""

    async def generate(self, prompt: Task, *, sampling: Sampling) -> list[Completion]:
        """`sampling.n` completions of a prompt, in order."""
        ...

    async def extend(self, completion: Completion, *, sampling: Sampling) -> Completion:
        """The completion with more tokens, after an update cut it short."""
        ...


ScoreFunction = Callable[[Task, Sequence[Completion]], Awaitable[list[Score]]]
"""Returns one score for each completion; a reward that fails is reported in it, not raised."""


class Prompts(Protocol):
    """The prompts in their order."""

    def at(self, number: int) -> tuple[int, Task]:
        """The epoch and the prompt of a group."""
        ...


class Rollouter(RolloutProgress):
    """Rolls groups out, and knows what each of them waits for.

    Args:
        prompts: what to ask, by number.
        policy: generates completions.
        score: scores them.
        references: score what was sampled with the reference model and the teacher.
        sampling: how tokens are sampled; `n` is the size of a group. `sample_at` changes the temperature.
        seed: the run's. A group's tokens depend on it, on the group's number and on the weights, and on nothing else.
    """

    def __init__(
        self,
        prompts: Prompts,
        *,
        policy: Policy,
        score: ScoreFunction,
        references: References,
        sampling: Sampling,
        seed: int,
    ) -> None:
        super().__init__()
        self._prompts, self._policy, self._score = prompts, policy, score
        self._sampling, self._seed = sampling, seed
        self._references = references

    def sample_at(self, temperature: float) -> None:
        """Sample the groups that begin from now on at another temperature."""
        self._sampling = self._sampling.model_copy(update={"temperature": temperature})

    async def roll_out(self, number: int, *, oldest_version: int = INITIAL_VERSION) -> Group:
        """Generate, score and compare with the reference. Scores and reference are asked at the same time."""
        epoch, prompt = self._prompts.at(number)
        sampling = self._sampling.model_copy(update={"seed": group_seed(self._seed, number)})
        temperature = sampling.temperature
        try:
            with span("rollout", group=number):
                self.enter(number, "generating")
                completions = await self._generate(prompt, sampling)
                self.count(len(completions), sum(len(completion) for completion in completions))
                self.enter(number, "scoring")
                episodes = [Episode.single(prompt, completion, Score(0.0)) for completion in completions]
                scores, compared = await both(
                    self._score(prompt, completions),
                    self._references.compared(episodes, number=number, temperature=temperature),
                )
        finally:
            self.leave(number)
        finished = [
            self._references.charged(replace(episode, score=score))
            for episode, score in zip(compared, scores, strict=True)
        ]
        return Group(number, epoch, tuple(finished), temperature)

    async def _generate(self, prompt: Task, sampling: Sampling) -> list[Completion]:
        with self.generating():
            completions = await self._policy.generate(prompt, sampling=sampling)
            return list(await asyncio.gather(*(self._whole(each, sampling) for each in completions)))

    async def _whole(self, completion: Completion, sampling: Sampling) -> Completion:
        """Continue a completion that an update of the weights cut short, until it finishes."""
        while completion.finish_reason == "abort":
            left = None if sampling.max_tokens is None else sampling.max_tokens - len(completion)
            if left is not None and left <= 0:
                return replace(completion, finish_reason="length")
            seed = resumed_seed(sampling.seed or 0, completion.index, len(completion))
            wish = {"n": 1, "seed": seed, "max_tokens": left, "min_tokens": 0}
            completion = await self._policy.extend(completion, sampling=sampling.model_copy(update=wish))
        return completion


def resumed_seed(seed: int, index: int, num_tokens: int) -> int:
    """Return the seed with which a completion of a group continues after so many tokens; `seed` is the group's."""
    return group_seed(seed, index * 1_000_003 + num_tokens)


def group_seed(seed: int, number: int) -> int:
    """A seed for a group's draws: 63 bits that depend on the run's seed and the group's number alone."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
