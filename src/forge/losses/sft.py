"""The loss of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from forge.losses.base import LossTerms, TokenView
from forge.types import Batch


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The mean negative logprob of the tokens that count, weighted. Metrics: `nll`."""

    @property
    def fields(self) -> tuple[str, ...]:
        return ()

    @property
    def needs_entropy(self) -> bool:
        return False

    @property
    def is_nll(self) -> bool:
        return True

    def normalizer(self, batch: Batch) -> float:
        return batch.total_weight

    def __call__(self, tokens: TokenView) -> LossTerms:
        total = -tokens.sum(tokens.logprobs_T)
        return LossTerms(total, {"nll": total.detach()})
