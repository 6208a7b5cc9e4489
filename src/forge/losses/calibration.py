"""Calibration of a reward model: whether its confidence in a pair is how often it is right.

With the rewards c of the chosen and r of the rejected answer, the confidence is sigmoid(|c - r|), which is between 0.5
and 1, and the model is right where c > r. Pairs are sorted into bins of equal width by confidence. Each bin is three
sums, so that they add up over micro-batches, ranks and batches like any other metric of a loss; `calibration` makes
means of them only at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX: Final = "calibration_"
_PARTS: Final = ("share", "confidence", "accuracy")


def bin_names(num_bins: int) -> tuple[str, ...]:
    """Return the names of the sums of all bins."""
    return tuple(f"{_PREFIX}{part}_{number}" for number in range(num_bins) for part in _PARTS)


def bin_sums(margins: Tensor, counts: Tensor, *, num_bins: int) -> dict[str, Tensor]:
    """Return for each bin the number of pairs in it, their summed confidence, and how many of them are right.

    `margins` is c - r of each pair; `counts` is 1 for a pair that counts, else 0.
    """
    import torch

    if num_bins == 0:
        return {}
    confidence = torch.sigmoid(margins.abs())
    places = ((confidence - 0.5) * (2 * num_bins)).to(torch.int64).clamp(0, num_bins - 1)
    columns = torch.stack([counts, counts * confidence, counts * (margins > 0)], dim=-1)
    sums = torch.zeros(num_bins, len(_PARTS), dtype=columns.dtype, device=columns.device).index_add(0, places, columns)
    return dict(zip(bin_names(num_bins), sums.reshape(-1).unbind(), strict=True))


def without_bins(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are not sums of bins: a training batch has too few pairs for them."""
    return {name: value for name, value in metrics.items() if not name.startswith(_PREFIX)}


def calibration(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with the calibration in place of the sums of bins, which must be divided by the number of pairs.

    `ece` is the expected calibration error: the mean over pairs of |accuracy - confidence| of their bin. Each bin with
    pairs in it, named by where it begins, has its `share` of the pairs, its mean `confidence` and its `accuracy`.
    """
    found = without_bins(metrics)
    num_bins = sum(name.startswith(f"{_PREFIX}share_") for name in metrics)
    if num_bins == 0:
        return found
    bins: dict[str, float] = {}
    error = 0.0
    for number in range(num_bins):
        share, confidence, right = (metrics[f"{_PREFIX}{part}_{number}"] for part in _PARTS)
        error += abs(right - confidence)
        if share > 0:
            label = f"calibration/{0.5 + 0.5 * number / num_bins:.3f}"
            values = (share, confidence / share, right / share)
            bins |= {f"{label}_{part}": value for part, value in zip(_PARTS, values, strict=True)}
    return {**found, "ece": error, **bins}
