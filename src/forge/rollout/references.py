"""What other models than the policy say about sampled tokens: the reference, whose divergence may be taken from
rewards, and the teacher of distillation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from forge.config import AlgorithmConfig
from forge.rollout.advantage import completion_kl
from forge.rollout.agent_views import agent_view, with_results
from forge.rollout.samples import plain_samples, sampled_values
from forge.types import AgentResult, Batch, Episode, Sample

if TYPE_CHECKING:
    from torch import Tensor

LogprobsFunction = Callable[[Batch, float], Awaitable["list[Tensor] | None"]]
"""Returns one float tensor [L] for each sample, at a temperature."""


A = TypeVar("A")
B = TypeVar("B")


async def both(one: Awaitable[A], other: Awaitable[B]) -> tuple[A, B]:
    """Await both at the same time; if one fails, the other is cancelled."""
    first, second = asyncio.ensure_future(one), asyncio.ensure_future(other)
    try:
        return await asyncio.gather(first, second)
    finally:
        first.cancel()
        second.cancel()


class References:
    """Scores episodes with the reference model and the teacher.

    Args:
        logprobs: asks the reference model; None without one.
        algorithm: says whether the divergence is taken from rewards.
        temperature: the one that tokens are sampled at, unless a call says another one.
        teacher: asks the teacher; None without one.
    """

    def __init__(
        self,
        logprobs: LogprobsFunction | None,
        *,
        algorithm: AlgorithmConfig,
        temperature: float,
        teacher: LogprobsFunction | None = None,
    ) -> None:
        self._reference, self._teacher = logprobs, teacher
        self._kl, self._temperature = algorithm.kl, temperature or 1.0

    async def compared(
        self, episodes: Sequence[Episode], *, number: int, temperature: float | None = None
    ) -> list[Episode]:
        """Return the episodes with the logprobs that the reference and the teacher give their sampled tokens, both
        asked at the same time. `temperature` is the one that these tokens were sampled at.

        Tokens that were not delivered are not trained on, and not scored: they get the policy's own logprobs, so that
        they add nothing to a divergence.
        """
        is_asked = self._reference is not None or self._teacher is not None
        samples = [plain_samples(episode, number=number) for episode in episodes] if is_asked else []
        chosen = self._temperature if temperature is None else temperature
        references, teachers = await both(
            self._logprobs(self._reference, episodes, samples, chosen),
            self._logprobs(self._teacher, episodes, samples, chosen),
        )
        return [
            replace(episode, ref_logprobs=reference, teacher_logprobs=teacher)
            for episode, reference, teacher in zip(episodes, references, teachers, strict=True)
        ]

    async def _logprobs(
        self,
        ask: LogprobsFunction | None,
        episodes: Sequence[Episode],
        samples: Sequence[Sequence[Sample]],
        temperature: float,
    ) -> list[tuple[float, ...] | None]:
        """Return one model's logprobs of each episode's sampled tokens; None for each without that model."""
        if ask is None:
            return [None] * len(episodes)
        every = [sample for rows in samples for sample in rows]
        found = await ask(Batch.of(every), temperature) if every else []
        assert found is not None  # rank 0 answers
        each = iter(found)
        return [
            sampled_values(episode, [next(each) for _ in rows], others=episode.logprobs)
            for episode, rows in zip(episodes, samples, strict=True)
        ]

    def charged(self, episode: Episode) -> Episode:
        """Take the divergence from the reward where the algorithm says so; where single tokens are charged, only report
        it here."""
        kl = self._kl
        if kl.place != "reward" or episode.ref_logprobs is None:
            return episode
        if episode.agents:
            return with_results(episode, {name: self._charged_agent(episode, name) for name in episode.agents})
        divergence = completion_kl(episode.logprobs, episode.ref_logprobs, kl.estimator, clamp=kl.clamp)
        score = replace(episode.score, parts={**episode.score.parts, "kl": -divergence})
        if kl.credit == "completion":
            score = replace(
                score,
                reward=score.reward - kl.coefficient * divergence,
                unshaped=score.reward if score.unshaped is None else score.unshaped,
            )
        return replace(episode, score=score)

    def _charged_agent(self, episode: Episode, name: str) -> AgentResult:
        """Return an agent's result with the divergence of its own tokens taken from its reward."""
        result = episode.agents[name]
        return replace(result, score=self.charged(agent_view(episode, name)).score) if result.learns else result
