"""What a step says when its loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from forge.errors import NonFiniteError
from forge.trainer.row_building import Sums
from forge.types import Batch, Sample


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return names as text, those beyond `most` as their number."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def bad_names(batch: Batch, totals: Sums, *, fields: Sequence[str]) -> list[str]:
    """Return the samples whose own numbers are not finite; else those of the rows whose loss is not; else all."""
    own = [index for index, sample in enumerate(batch.samples()) if not _is_finite(sample, fields)]
    chosen = own or sorted(set(totals.bad_samples)) or range(len(batch))
    return [(batch.identities[index] if batch.identities else "") or f"sample {index}" for index in chosen]


def nonfinite_error(
    names: Sequence[str], *, step: int, loss: float, norm: float, at_floor: bool = False
) -> NonFiniteError:
    """Return the error of a step that was not taken. `at_floor`: its gradient overflows at the lowest loss scale."""
    rule = "loss and gradient must be finite; no step was taken"
    if at_floor:
        rule += ". The gradient overflows at training.loss_scaling.min_scale too"
    return NonFiniteError(
        f"step {step}: the loss is {loss:g} and the gradient's norm is {norm:g}",
        path=listed(names),
        value=loss if not math.isfinite(loss) else norm,
        rule=rule,
        repair="look at these samples, lower training.learning_rate, or set training.on_nonfinite=skip",
    )


def _is_finite(sample: Sample, fields: Sequence[str]) -> bool:
    """Whether the numbers of a sample that a loss looks at are finite. A NaN would spread to every row's loss."""
    counted = sample.loss_weights != 0
    values = [sample.loss_weights, *(sample.fields[name][counted] for name in fields)]
    return all(bool(torch.isfinite(tensor).all()) for tensor in values)
