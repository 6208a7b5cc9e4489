"""The loss scale of a trainer that computes in float16.

float16 has 5 bits of exponent: numbers below 3e-8 become 0, those from 65,520 on infinite. Most gradients of a language
model are below the first. So the loss is multiplied by a scale before the backward pass, and gradients, which are
summed in float32, are divided by it before they are clipped. All scales are powers of two: nothing is rounded by this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from forge.config.training import LossScalingConfig
from forge.trainer.microbatches import RowPlan
from forge.trainer.row_building import Sums
from forge.types import Batch


@dataclass(frozen=True, slots=True)
class LossScale:
    """The scale at one moment. All ranks have the same: it follows from norms of gradients, which all ranks share.

    Attributes:
        value: what losses are multiplied by.
        num_good: steps in a row, up to the last, that did not overflow at this scale.
    """

    value: float = 1.0
    num_good: int = 0

    def after_step(self, config: LossScalingConfig) -> LossScale:
        """Return the scale after a step whose gradient did not overflow: higher every `growth_interval` steps."""
        if self.num_good + 1 < config.growth_interval:
            return replace(self, num_good=self.num_good + 1)
        return LossScale(min(self.value * config.growth_factor, config.max_scale))

    def after_overflow(self, config: LossScalingConfig) -> LossScale | None:
        """Return the scale after an overflow; None if it cannot be lowered any more."""
        if self.value <= config.min_scale:
            return None
        return LossScale(max(self.value * config.backoff_factor, config.min_scale))


@dataclass(frozen=True, slots=True)
class Attempt:
    """The gradient of a batch at one loss scale.

    Attributes:
        plan: which rows there were.
        batch: the batch, with what the loss added to it.
        totals: the loss and its metrics over all ranks, not scaled.
        norm: the norm of the gradient, not scaled.
        scale: the scale, which the gradients still have.
    """

    plan: RowPlan
    batch: Batch
    totals: Sums
    norm: float
    scale: LossScale

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.totals.loss) and math.isfinite(self.norm)

    @property
    def has_overflowed(self) -> bool:
        """Whether the gradient is not finite though the loss is: a lower scale may help."""
        return math.isfinite(self.totals.loss) and not math.isfinite(self.norm)

    def factor(self, max_grad_norm: float | None) -> float:
        """Return what gradients are to be multiplied by: without their scale, and clipped."""
        clip = max_grad_norm / self.norm if max_grad_norm is not None and self.norm > max_grad_norm else 1.0
        return clip / self.scale.value


@dataclass(frozen=True, slots=True)
class Scaled:
    """What came of a batch at one or more loss scales.

    Attributes:
        last: the last attempt. Its gradients are those to step with, if it is finite.
        scale: the scale of the next step.
        num_overflows: how many attempts overflowed.
        is_failure: whether loss or gradient is not finite, and a lower scale cannot help.
        is_scaled: whether losses are scaled at all.
    """

    last: Attempt
    scale: LossScale
    num_overflows: int
    is_failure: bool
    is_scaled: bool = True

    @property
    def metrics(self) -> dict[str, float]:
        """The scale that the step used, and how often it overflowed before; nothing where losses are not scaled."""
        if not self.is_scaled:
            return {}
        return {"loss_scale": self.last.scale.value, "overflows": float(self.num_overflows)}


def compute_scaled(
    compute: Callable[[LossScale], Attempt], scale: LossScale, *, config: LossScalingConfig | None
) -> Scaled:
    """Compute a batch's gradient, again at a lower scale for as long as it overflows and retries are left.

    Without a configuration there is one attempt, at the scale that is given.
    """
    num_overflows = 0
    while True:
        last = compute(scale)
        if config is None or not last.has_overflowed:
            next_scale = scale.after_step(config) if config is not None and last.is_finite else scale
            return Scaled(last, next_scale, num_overflows, not last.is_finite, config is not None)
        num_overflows += 1
        lower = scale.after_overflow(config)
        if lower is None or num_overflows > config.max_retries:
            return Scaled(last, lower or scale, num_overflows, is_failure=lower is None)
        scale = lower
