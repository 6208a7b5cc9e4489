"""What is done to the logits of rows that ask for more than a temperature.

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
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forge.config import Sampling
from forge.generator.native.truncation import keep_above, keep_top_k, keep_top_p

if TYPE_CHECKING:
    from forge.generator.native.sampler import SampleRow


def is_shaped(row: SampleRow, vocab_size: int) -> bool:
    """Whether anything but the temperature shapes what is drawn next."""
    sampling = row.sampling
    is_cut = sampling.top_p < 1.0 or 0 < sampling.top_k < vocab_size or sampling.min_p > 0.0
    return is_penalised(sampling) or must_go_on(row) or (is_cut and not sampling.is_greedy)


def is_penalised(sampling: Sampling) -> bool:
    """Whether tokens that were there before count differently."""
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)


def must_go_on(row: SampleRow) -> bool:
    """Whether the next token may not be one that ends the completion."""
    return len(row.token_ids) < row.sampling.min_tokens and len(row.stop_ids) > 0


class _Known:
    """What is known of one row.

    Attributes:
        slot: its place among the counts.
        tokens: the tokens of prompt and completion, each once; `seen` is the same as a set.
        num_counted: how many of the tokens that were drawn have been counted.
    """

    __slots__ = ("num_counted", "seen", "slot", "tokens")

    def __init__(self, slot: int, prompt_ids: Sequence[int]) -> None:
        self.slot, self.num_counted = slot, 0
        self.seen = set(prompt_ids)
        self.tokens = array("q", self.seen)


class Tally:
    """How often each row that is penalised has each token, on the device, token by token as they come.

    `counts` is int32 [slots, V]; `pairs` names what a penalty can change, as row * V + token, int64 [M]: every token
    that is in a row's prompt or completion, once. Rows are numbered as `follow` was given them.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self._rows: dict[SampleRow, _Known] = {}
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.pairs = torch.zeros(0, dtype=torch.int64, device=device)

    def follow(self, rows: Sequence[SampleRow]) -> Tensor:
        """Count for these rows from now on, and for no others; the slot of each, int64 [P]."""
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
        """What came since the last call: places in `counts`, laid flat, of tokens that were drawn; and new `pairs`."""
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
        """Take in what `fresh` named, from the device."""
        if len(places):
            ones = torch.ones(len(places), dtype=torch.int32, device=self.device)
            self.counts.view(-1).index_add_(0, places, ones)
        if len(pairs):
            self.pairs = torch.cat([self.pairs, pairs])

    def _start(self, index: int) -> int:
        return index * self.vocab_size

    def _resize(self, num_rows: int, taken: set[int]) -> None:
        if num_rows == 0:
            size = 0  # the memory of a large vocabulary is worth giving back
        elif num_rows > len(self.counts):
            size = max(num_rows, 2 * len(self.counts))
        else:
            return
        old = self.counts
        self.counts = torch.zeros(size, self.vocab_size, dtype=torch.int32, device=self.device)
        if taken:
            self.counts[: len(old)].copy_(old)


class Shaping:
    """What is to be done to some of the rows of a batch. Made anew whenever one of its rows comes, goes or changes."""

    def __init__(self, rows: Sequence[SampleRow], places: Sequence[int], tally: Tally) -> None:
        """`rows` are those to be shaped and `places` where each is in the batch."""
        device, self._tally = tally.device, tally
        self._vocab_size = tally.vocab_size
        samplings = [row.sampling for row in rows]
        self.places_S = torch.tensor(list(places), dtype=torch.int64, device=device)
        scales = [1.0 if each.is_greedy else 1.0 / each.temperature for each in samplings]
        self._scale_S1 = None if set(scales) == {1.0} else _column(scales, device)
        self._ruled_out = self._ends(rows, device)
        self._read_penalties(rows, device)
        self._read_cuts(samplings, device)

    def apply(self, logits_BV: Tensor, *, out_SV: Tensor) -> Tensor:
        """The logits that the shaped rows draw from, divided by their temperatures; written to `out_SV`."""
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
            if must_go_on(row)
            for token in sorted(row.stop_ids)
            if 0 <= token < self._vocab_size
        ]
        return torch.tensor(flat, dtype=torch.int64, device=device) if flat else None

    def _read_penalties(self, rows: Sequence[SampleRow], device: torch.device) -> None:
        found = [(index, row) for index, row in enumerate(rows) if is_penalised(row.sampling)]
        slots = self._tally.follow([row for _, row in found])
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
        row_M = self._tally.pairs // self._vocab_size
        token_M = self._tally.pairs - row_M * self._vocab_size
        count_M = self._tally.counts.view(-1)[slots_P[row_M] * self._vocab_size + token_M]
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
