"""The loss of critics: the clipped squared error between values and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forge.losses.base import LossTerms, ValueView
from forge.losses.surrogates import clipped_value_loss
from forge.types import Batch

RETURNS, OLD_VALUES = "returns", "old_values"


@dataclass(frozen=True, slots=True)
class CriticLoss:
    """Makes the value of the state in which a token was sampled equal to the token's return.

    It reads the fields `returns` and `old_values` (the critic's values before the first update on the batch). It is
    the mean of `clipped_value_loss` over the tokens that count.

    Metrics: `clip_fraction`, the part of tokens whose value is farther than `clip` from its old one;
    `squared_error`, of the values as they are.
    """

    clip: float | None = 0.2

    @property
    def fields(self) -> tuple[str, ...]:
        return (RETURNS, OLD_VALUES)

    @property
    def values_at(self) -> Literal["before", "after"]:
        return "before"

    def normalizer(self, batch: Batch) -> float:
        """Return the number of tokens that count."""
        return batch.total_weight

    def __call__(self, tokens: ValueView) -> LossTerms:
        values = tokens.counted(tokens.values_T)
        returns, old = tokens.value(RETURNS), tokens.value(OLD_VALUES)
        is_far = (values - old).abs() > (float("inf") if self.clip is None else self.clip)
        return LossTerms(
            tokens.sum(clipped_value_loss(values, returns, old, clip=self.clip)),
            {
                "squared_error": tokens.sum((values - returns).square()).detach(),
                "clip_fraction": tokens.sum(is_far.to(values.dtype)).detach(),
            },
        )
