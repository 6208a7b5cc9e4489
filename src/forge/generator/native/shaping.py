"""Shape the logits of rows that ask for more than a temperature: penalties and truncation.

The order is that of vLLM 0.32.0's sampler, so that one `Sampling` means the same with either engine:

1. end tokens are ruled out while the completion is shorter than `min_tokens`;
2. penalties: repetition (prompt and completion), then frequency, then presence (completion only);
3. temperature;
4. `min_p`, relative to the likeliest token that is left;
5. `top_k`;
6. `top_p`, of the probabilities that are left.

At temperature 0 the last three are left out, as they keep the likeliest token.

Shapes: S rows that are shaped, V the vocabulary.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forge.config import Sampling

if TYPE_CHECKING:
    from forge.generator.native.sampler import SampleRow


def is_shaped(row: SampleRow, vocab_size: int) -> bool:
    """Return whether anything but the temperature shapes the next token's distribution."""
    sampling = row.sampling
    is_cut = sampling.top_p < 1.0 or 0 < sampling.top_k < vocab_size or sampling.min_p > 0.0
    return is_penalised(sampling) or must_continue(row) or (is_cut and not sampling.is_greedy)


def is_penalised(sampling: Sampling) -> bool:
    """Return whether tokens that occurred before are penalised."""
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)


def must_continue(row: SampleRow) -> bool:
    """Return whether the next token may not end the completion."""
    return len(row.token_ids) < row.sampling.min_tokens and len(row.stop_ids) > 0


class _Known:
    """What is known of one row.

    Attributes:
        slot: its place among the counts.
        tokens: the tokens of prompt and completion, each once; `seen` is the same as a set.
        num_counted: how many of the sampled tokens have been counted.
    """

    __slots__ = ("num_counted", "seen", "slot", "tokens")

    def __init__(self, slot: int, prompt_ids: Sequence[int]) -> None:
        self.slot, self.num_counted = slot, 0
        self.seen = set(prompt_ids)
        self.tokens = array("q", self.seen)


class TokenCounts:
    """How often each penalised row has each token, on the device, updated token by token.

    `counts` is int32 [slots, V]; `pairs` names what a penalty can change, as row * V + token, int64 [M]: every token
    that is in a row's prompt or completion, once. Rows are numbered as `follow` was given them.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self._rows: dict[SampleRow, _Known] = {}
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.pairs = torch.zeros(0, dtype=torch.int64, device=device)

    def follow(self, rows: Sequence[SampleRow]) -> Tensor:
        """Count for these rows alone from now on. Return the slot of each, int64 [P]."""
        kept = {row: self._rows[row] for row in rows if row in self._rows}
        taken = {known.slot for known in kept.values()}
        self._resize(len(rows), taken)
        free = iter([slot for slot in range(len(self.counts)) if slot not in taken])
        for row in rows:
            if row not in kept:
                kept[row] = _Known(next(free), row.prompt_ids)
                self.counts[kept[row].slot].zero_()
        self._rows = {row: kept[row] for row in rows}
        known_rows = enumerate(self._rows.values())
        pairs = [np.frombuffer(known.tokens, np.int64) + self._start(index) for index, known in known_rows]
        joined = np.concatenate(pairs) if pairs else np.zeros(0, dtype=np.int64)
        self.pairs = torch.from_numpy(joined).to(self.device)
        slots = [known.slot for known in self._rows.values()]
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def fresh(self) -> tuple[list[int], list[int]]:
        """Return what came since the last call: flat indices in `counts` of sampled tokens, and new `pairs`."""
        places: list[int] = []
        pairs: list[int] = []
        for index, (row, known) in enumerate(self._rows.items()):
            for token in row.token_ids[known.num_counted :]:
                places.append(known.slot * self.vocab_size + token)
                if token not in known.seen:
                    known.seen.add(token)
                    known.tokens.append(token)
                    pairs.append(self._start(index) + token)
            known.num_counted = len(row.token_ids)
        return places, pairs

    def add(self, places: Tensor, pairs: Tensor) -> None:
        """Add what `fresh` returned, from the device."""
        if len(places):
            ones = torch.ones(len(places), dtype=torch.int32, device=self.device)
            self.counts.view(-1).index_add_(0, places, ones)
        if len(pairs):
            self.pairs = torch.cat([self.pairs, pairs])

    def _start(self, index: int) -> int:
        return index * self.vocab_size

    def _resize(self, num_rows: int, taken: set[int]) -> None:
        if num_rows == 0:
            size = 0  # the memory of a large vocabulary is worth releasing
        elif num_rows > len(self.counts):
            size = max(num_rows, 2 * len(self.counts))
        else:
            return
        old = self.counts
        self.counts = torch.zeros(size, self.vocab_size, dtype=torch.int32, device=self.device)
        if taken:
            self.counts[: len(old)].copy_(old)


class Shaping:
    """The shaping of some rows of a batch. Created anew whenever one of its rows comes, goes or changes."""

    def __init__(self, rows: Sequence[SampleRow], places: Sequence[int], token_counts: TokenCounts) -> None:
        """`rows` are those to be shaped and `places` where each is in the batch."""
        device, self._token_counts = token_counts.device, token_counts
        self._vocab_size = token_counts.vocab_size
        samplings = [row.sampling for row in rows]
        self.places_S = torch.tensor(list(places), dtype=torch.int64, device=device)
        scales = [1.0 if each.is_greedy else 1.0 / each.temperature for each in samplings]
        self._scale_S1 = None if set(scales) == {1.0} else _column(scales, device)
        self._ruled_out = self._ends(rows, device)
        self._read_penalties(rows, device)
        self._read_cuts(samplings, device)

    def apply(self, logits_BV: Tensor, *, out_SV: Tensor) -> Tensor:
        """Write the shaped rows' logits, divided by their temperatures, to `out_SV`, and return them."""
        logits_SV = torch.index_select(logits_BV, 0, self.places_S, out=out_SV)
        if self._ruled_out is not None:
            logits_SV.view(-1).index_fill_(0, self._ruled_out, -math.inf)
        if self._penalised is not None:
            self._penalise(logits_SV, self._penalised)
        if self._scale_S1 is not None:
            logits_SV.mul_(self._scale_S1)
        if self._log_min_p_S1 is not None:
            keep_above(logits_SV, logits_SV.amax(-1, keepdim=True) + self._log_min_p_S1)
        if self._k_S is not None:
            keep_top_k(logits_SV, self._k_S, largest_k=self._largest_k)
        if self._p_S is not None:
            keep_top_p(logits_SV, self._p_S)
        return logits_SV

    def _ends(self, rows: Sequence[SampleRow], device: torch.device) -> Tensor | None:
        flat = [
            index * self._vocab_size + token
            for index, row in enumerate(rows)
            if must_continue(row)
            for token in sorted(row.stop_ids)
            if 0 <= token < self._vocab_size
        ]
        return torch.tensor(flat, dtype=torch.int64, device=device) if flat else None

    def _read_penalties(self, rows: Sequence[SampleRow], device: torch.device) -> None:
        found = [(index, row) for index, row in enumerate(rows) if is_penalised(row.sampling)]
        slots = self._token_counts.follow([row for _, row in found])
        self._penalised: tuple[Tensor, Tensor] | None = None
        if not found:
            return
        self._penalised = (torch.tensor([index for index, _ in found], device=device), slots)
        factors = [(row.sampling.repetition_penalty, row.sampling.frequency_penalty) for _, row in found]
        self._repetition_P, self._frequency_P = torch.tensor(factors, dtype=torch.float32, device=device).unbind(1)
        presences = [row.sampling.presence_penalty for _, row in found]
        self._presence_P = torch.tensor(presences, dtype=torch.float32, device=device)

    def _penalise(self, logits_SV: Tensor, where: tuple[Tensor, Tensor]) -> None:
        """Change the logits of the M tokens that rows have already; the others are as they were."""
        index_P, slots_P = where
        row_M = self._token_counts.pairs // self._vocab_size
        token_M = self._token_counts.pairs - row_M * self._vocab_size
        count_M = self._token_counts.counts.view(-1)[slots_P[row_M] * self._vocab_size + token_M]
        place_M = index_P[row_M] * self._vocab_size + token_M
        logits = logits_SV.view(-1)
        logit_M, repetition_M = logits[place_M], self._repetition_P[row_M]
        logit_M = torch.where(logit_M > 0, logit_M / repetition_M, logit_M * repetition_M)
        logit_M = logit_M - self._frequency_P[row_M] * count_M
        logit_M = logit_M - self._presence_P[row_M] * (count_M > 0)
        logits.index_copy_(0, place_M, logit_M)

    def _read_cuts(self, samplings: Sequence[Sampling], device: torch.device) -> None:
        size = self._vocab_size
        floors = [0.0 if each.is_greedy else each.min_p for each in samplings]
        ks = [size if each.is_greedy or each.top_k == 0 else min(each.top_k, size) for each in samplings]
        ps = [1.0 if each.is_greedy else each.top_p for each in samplings]
        logs = [math.log(floor) if floor > 0 else -math.inf for floor in floors]
        self._log_min_p_S1 = _column(logs, device) if any(floors) else None
        self._largest_k = max((k for k in ks if k < size), default=0)
        self._k_S = torch.tensor(ks, dtype=torch.int64, device=device) if self._largest_k else None
        self._p_S = torch.tensor(ps, dtype=torch.float64, device=device) if min(ps) < 1.0 else None


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]


# ---- Truncation ------------------------------------------------------------------------------------------------------


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
    """Return the threshold [S, 1] of each row's probabilities, and how many tokens on it may stay. For the CPU."""
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
        return 0.0, len(probs)  # the row is not of numbers; `Sampled.fetch` reports it
    threshold = likely[last]
    return float(threshold), last + 1 - int(np.count_nonzero(likely[: last + 1] > threshold))


def _near_the_end(likely: NDArray[Any], wanted: float) -> tuple[NDArray[Any], float]:
    """Return the probabilities around the one at which the largest together reach `wanted`, and what these few have to
    reach themselves."""
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
    """Return the same without sorting and without waiting for the device: halve the range of thresholds 31 times."""
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
