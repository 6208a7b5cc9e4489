"""Which tokens may be drawn: the k likeliest, and the fewest whose probabilities reach p.

Both find a *threshold* and how many of the tokens that lie exactly on it may stay; where more do, those of lower ids
stay. So a sort of a whole vocabulary, with its indices, is never needed, equal logits (frequent in half precision) do
not make the set larger than asked for, and the set depends on its own row alone.

Shapes: S rows, V the vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ONE_BITS = 0x3F800000  # 1.0 as the bits of a float32; the bits of numbers from 0 to 1 are ordered as the numbers are
_FEW = 1024  # so many probabilities are sorted sooner than divided further


def keep_above(logits_SV: Tensor, floor_S1: Tensor) -> None:
    """Set the logits of each row that are below its floor to -inf, in place."""
    if logits_SV.is_cuda:
        logits_SV.masked_fill_(logits_SV < floor_S1, -math.inf)
    else:
        logits = logits_SV.numpy()
        np.copyto(logits, -np.inf, where=logits < floor_S1.numpy())


def keep_top_k(logits_SV: Tensor, k_S: Tensor, *, largest_k: int) -> None:
    """Set all but the k largest logits of each row to -inf, in place.

    `largest_k` is the largest of those in `k_S` that are below V; rows with V or more keep everything. It comes from
    the host, so that a GPU need not be asked.
    """
    vocab_size = logits_SV.shape[1]
    top_SK = logits_SV.topk(largest_k, dim=-1).values
    is_cut_S1 = (k_S < vocab_size)[:, None]
    last_S1 = (k_S.clamp(max=largest_k) - 1)[:, None]
    threshold_S1 = torch.where(is_cut_S1, top_SK.gather(1, last_S1), -math.inf)
    num_above_S1 = (top_SK > threshold_S1).sum(-1, keepdim=True)
    room_S1 = torch.where(is_cut_S1, k_S[:, None] - num_above_S1, vocab_size)
    _cut(logits_SV, logits_SV, threshold_S1, room_S1)


def keep_top_p(logits_SV: Tensor, p_S: Tensor) -> None:
    """Set all but the likeliest tokens of each row, as few as reach the probability p together, to -inf, in place.

    `p_S` is float64; rows with 1 or more keep everything.
    """
    probs_SV = torch.softmax(logits_SV, dim=-1)
    if probs_SV.is_cuda:
        threshold_S1, room_S1 = nucleus_by_halving(probs_SV, p_S)
    else:
        threshold_S1, room_S1 = nucleus_by_sorting(probs_SV, p_S)
    _cut(logits_SV, probs_SV, threshold_S1, room_S1)


def nucleus_by_sorting(probs_SV: Tensor, p_S: Tensor) -> tuple[Tensor, Tensor]:
    """The threshold [S, 1] of each row's probabilities, and how many tokens on it may stay. For the CPU."""
    found = [_nucleus(row, float(p)) for row, p in zip(probs_SV.numpy(), p_S.numpy(), strict=True)]
    thresholds = torch.tensor([threshold for threshold, _ in found], dtype=probs_SV.dtype)
    return thresholds[:, None], torch.tensor([room for _, room in found])[:, None]


def _nucleus(probs: NDArray[Any], p: float) -> tuple[float, int]:
    if p >= 1.0:
        return 0.0, len(probs)
    # Tokens below (1 - p) / V cannot make up 1 - p together: those that are needed are among the others. Half of that
    # leaves room for rounding.
    likely = np.compress(probs >= 0.5 * (1.0 - p) / len(probs), probs)
    likely, wanted = _near_the_end(likely, p * float(probs.sum(dtype=np.float64)))
    likely = np.sort(likely)[::-1]
    last = int(np.searchsorted(np.cumsum(likely, dtype=np.float64), wanted))
    if last >= len(likely):
        return 0.0, len(probs)  # the row is not of numbers; what is drawn from it says so
    threshold = likely[last]
    return float(threshold), last + 1 - int(np.count_nonzero(likely[: last + 1] > threshold))


def _near_the_end(likely: NDArray[Any], wanted: float) -> tuple[NDArray[Any], float]:
    """A few of the probabilities, those around the one at which all from the largest on reach `wanted`; and what they
    have to reach themselves."""
    while len(likely) > _FEW:
        smallest, largest = float(likely.min()), float(likely.max())
        pivot = likely.dtype.type(math.sqrt(smallest * largest))
        if not smallest < pivot <= largest:
            break
        is_above = likely >= pivot
        above = np.compress(is_above, likely)
        reached = float(above.sum(dtype=np.float64))
        if reached >= wanted:
            likely = above
        else:
            likely, wanted = np.compress(~is_above, likely), wanted - reached
    return likely, wanted


def nucleus_by_halving(probs_SV: Tensor, p_S: Tensor) -> tuple[Tensor, Tensor]:
    """The same without sorting and without asking the device for anything: halve the range of thresholds 31 times."""
    wanted_S1 = p_S[:, None] * probs_SV.sum(-1, keepdim=True, dtype=torch.float64)
    low_S1 = torch.zeros_like(wanted_S1, dtype=torch.int32)
    high_S1 = torch.full_like(low_S1, _ONE_BITS + 1)
    for _ in range(31):
        middle_S1 = low_S1 + (high_S1 - low_S1) // 2
        reached_S1 = torch.where(probs_SV >= middle_S1.view(torch.float32), probs_SV, 0.0)
        is_enough_S1 = reached_S1.sum(-1, keepdim=True, dtype=torch.float64) >= wanted_S1
        low_S1 = torch.where(is_enough_S1, middle_S1, low_S1)
        high_S1 = torch.where(is_enough_S1, high_S1, middle_S1)
    threshold_S1 = low_S1.view(torch.float32)
    above_S1 = torch.where(probs_SV > threshold_S1, probs_SV, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    room_S1 = ((wanted_S1 - above_S1) / threshold_S1).ceil().clamp(1, probs_SV.shape[1]).to(torch.int64)
    is_cut_S1 = (p_S < 1.0)[:, None]
    return torch.where(is_cut_S1, threshold_S1, 0.0), torch.where(is_cut_S1, room_S1, probs_SV.shape[1])


def _cut(logits_SV: Tensor, values_SV: Tensor, threshold_S1: Tensor, room_S1: Tensor) -> None:
    """Set logits to -inf where the value is below the threshold, or on it when there is no room left."""
    cut = cut_by_counting if logits_SV.is_cuda else cut_by_row
    cut(logits_SV, values_SV, threshold_S1, room_S1)


def cut_by_counting(logits_SV: Tensor, values_SV: Tensor, threshold_S1: Tensor, room_S1: Tensor) -> None:
    """For a GPU: counts the values on the threshold whether or not there are too many."""
    ties_SV = values_SV == threshold_S1
    is_surplus_SV = ties_SV & (ties_SV.cumsum(-1, dtype=torch.int32) > room_S1)
    logits_SV.masked_fill_(is_surplus_SV.logical_or_(values_SV < threshold_S1), -math.inf)


def cut_by_row(logits_SV: Tensor, values_SV: Tensor, threshold_S1: Tensor, room_S1: Tensor) -> None:
    """For the CPU: looks for values on the threshold that are too many only in rows that have such."""
    arrays = [each.numpy() for each in (logits_SV, values_SV, threshold_S1, room_S1)]
    for logits, values, threshold, room in zip(*arrays, strict=True):
        if room[0] >= len(values):
            continue
        ties = values == threshold
        surplus = np.flatnonzero(ties)[room[0] :] if np.count_nonzero(ties) > room[0] else None
        np.copyto(logits, -np.inf, where=values < threshold)  # these may be the values: they are read no more
        if surplus is not None:
            logits[surplus] = -np.inf
