"""The reference model's part in a rollout: its logprobs of sampled tokens, and the divergence taken from rewards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from forge.config import AlgorithmConfig
from forge.rollout.advantage import completion_kl
from forge.rollout.samples import plain_samples, sampled_values
from forge.types import Batch, Episode

if TYPE_CHECKING:
    from torch import Tensor

LogprobsFunction = Callable[[Batch, float], Awaitable["list[Tensor] | None"]]
"""Returns one float tensor [L] for each sample, at a temperature."""


class References:
    """Scores episodes with the reference model.

    Args:
        logprobs: asks the reference model; None without one.
        algorithm: says whether the divergence is taken from rewards.
        temperature: the one that tokens are sampled at.
    """

    def __init__(self, logprobs: LogprobsFunction | None, *, algorithm: AlgorithmConfig, temperature: float) -> None:
        self._ask, self._kl, self._temperature = logprobs, algorithm.kl, temperature or 1.0

    async def logprobs(self, episodes: Sequence[Episode], *, number: int) -> list[tuple[float, ...] | None]:
        """Return the reference's logprobs of each episode's sampled tokens; None for each without a reference.

        Tokens that were not delivered are not trained on, and not scored: they get the policy's own logprobs, so that
        they add nothing to a divergence.
        """
        if self._ask is None:
            return [None] * len(episodes)
        samples = [plain_samples(episode, number=number) for episode in episodes]
        every = [sample for rows in samples for sample in rows]
        found = await self._ask(Batch.of(every), self._temperature) if every else []
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
        divergence = completion_kl(episode.logprobs, episode.ref_logprobs, kl.estimator, clamp=kl.clamp)
        score = replace(episode.score, parts={**episode.score.parts, "kl": -divergence})
        if kl.credit == "completion":
            score = replace(
                score,
                reward=score.reward - kl.coefficient * divergence,
                unshaped=score.reward if score.unshaped is None else score.unshaped,
            )
        return replace(episode, score=score)
