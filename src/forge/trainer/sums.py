"""What the rows of a step add up to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from forge.trainer.row_building import Row


@dataclass(slots=True)
class Sums:
    """What is added up over rows, and over ranks: loss, metrics, and which samples are not finite."""

    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    bad_samples: tuple[int, ...] = ()

    @classmethod
    def of_row(cls, row: Row, scaled: Tensor, metrics: Mapping[str, Tensor]) -> Sums:
        """Waits for the device; so it is called when all rows of a step are under way."""
        loss = float(scaled)
        plain = {name: float(tensor) for name, tensor in metrics.items()}
        return cls(loss, plain, () if math.isfinite(loss) else row.sample_indices)

    def __add__(self, other: Sums) -> Sums:
        metrics = dict(self.metrics)
        for name, value in other.metrics.items():
            metrics[name] = _merged(name, metrics.get(name), value)
        return Sums(self.loss + other.loss, metrics, self.bad_samples + other.bad_samples)


def _merged(name: str, old: float | None, new: float) -> float:
    if old is None:
        return new
    if name.endswith("_max"):
        return max(old, new)
    return min(old, new) if name.endswith("_min") else old + new
