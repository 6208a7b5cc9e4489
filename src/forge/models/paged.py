"""Where the keys and values of sequences lie in a cache of pages, and which rows of a step belong to which sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

PAGE_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayout:
    """One step over S sequences, whose T new tokens are packed in a line, sequence after sequence.

    The keys and values of the new tokens are written to the cache first; then the last new token of a sequence sees all
    of the sequence's keys, the one before it sees one less, and so on. All tensors are contiguous and on the device of
    the cache.

    Attributes:
        query_starts: int32 [S + 1]: sequence s has the rows query_starts[s] to query_starts[s + 1] of the line, which
            may be none. The first is 0, the last T.
        context_lens: int32 [S]: the keys that each sequence has after this step, its new tokens included.
        table: int32 [S, P]: the pages of each sequence, in order. What lies beyond the context is not looked at.
        slots: int64 [T]: where each new token's key and value go: page * PAGE_TOKENS + the place within the page. A
            negative slot is not written.
    """

    query_starts: Tensor
    context_lens: Tensor
    table: Tensor
    slots: Tensor

    @property
    def num_sequences(self) -> int:
        return int(self.context_lens.shape[0])

    @classmethod
    def of_documents(cls, lengths: tuple[int, ...]) -> PagedLayout:
        """Whole documents that lie one after the other, each in pages of its own, from page 0 on."""
        sizes = torch.tensor(lengths, dtype=torch.int64)
        num_pages = (sizes + PAGE_TOKENS - 1) // PAGE_TOKENS
        first_pages = num_pages.cumsum(0) - num_pages
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(sizes, 0, dtype=torch.int32, out=starts[1:])
        width = int(num_pages.max()) if lengths else 0
        table = first_pages[:, None] + torch.arange(width)
        shifts = first_pages * PAGE_TOKENS - starts[:-1]
        slots = torch.arange(int(starts[-1])) + shifts.repeat_interleave(sizes)
        return cls(starts, sizes.to(torch.int32), table.to(torch.int32), slots)


def num_pages_of(lengths: tuple[int, ...]) -> int:
    """How many pages `PagedLayout.of_documents` lays these documents out in."""
    return sum(-(-length // PAGE_TOKENS) for length in lengths)
