"""Where the keys and values of sequences lie in a cache of pages, and which rows of a step belong to which sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
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
        shares: int32 [S + 1, 4], what `find_shares` says of the table, or None. It changes no result: a GPU reads
            keys that neighbours have in common once for all of them, and not once for each.
    """

    query_starts: Tensor
    context_lens: Tensor
    table: Tensor
    slots: Tensor
    shares: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return int(self.context_lens.shape[0])

    @classmethod
    def of_documents(cls, lengths: tuple[int, ...]) -> PagedLayout:
        """Lay out whole documents that lie one after the other, each in pages of its own, from page 0 on."""
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
    """Return how many pages `PagedLayout.of_documents` lays these documents out in."""
    return sum(-(-length // PAGE_TOKENS) for length in lengths)


def shared_places(lengths: Sequence[int], prefixes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return where the tokens of documents are computed, in a row that holds each shared prefix once.

    Each document takes so many first tokens from the document before it, which may have taken them itself: documents in
    the order of a tree, depth first, share prefixes of any depth. The others are computed for it, one place after the
    other.

    Returns:
        int64 [T]: the place of each token of the documents; int64 [P]: for each place, the token it is computed for.
    """
    places: list[Tensor] = []
    own: list[Tensor] = []
    num_places = num_tokens = 0
    for length, prefix in zip(lengths, prefixes, strict=True):
        fresh = torch.arange(num_places, num_places + length - prefix)
        places.append(torch.cat([places[-1][:prefix], fresh]) if prefix else fresh)
        own.append(torch.arange(num_tokens + prefix, num_tokens + length))
        num_places, num_tokens = num_places + length - prefix, num_tokens + length
    nothing = torch.zeros(0, dtype=torch.int64)
    return torch.cat([nothing, *places]), torch.cat([nothing, *own])


def find_shares(table_SP: np.ndarray, context_lens_S: np.ndarray, *, chunk: int, max_members: int) -> np.ndarray:
    """Return which neighbours in a step begin with the same pages: int32 [S + 1, 4], for `gpu_attention.decode_attend`.

    Row 0 is (number of items, most chunks of an item, 0, 0). An item is a run of 2 to `max_members` neighbours with the
    same pages in their first chunks of `chunk` tokens; the chunks lie within the context of each. In row 1 + i the
    first three columns are item i: (first sequence, number of sequences, number of chunks). The fourth is about
    sequence i: how many chunks it has in common with the others of its item, 0 if it is in none.

    Sequences that share more with one neighbour than with the other go with the first, so that a prefix common to
    all, such as a system prompt, does not hide what the samples of one prompt have in common. A run too long for one
    item is cut into items of about the same size.
    """
    num_sequences = len(context_lens_S)
    shares = np.zeros((num_sequences + 1, 4), dtype=np.int32)
    if num_sequences < 2 or max_members < 2:
        return shares
    common = _common_chunks(table_SP, context_lens_S // chunk, pages_per_chunk=chunk // PAGE_TOKENS)
    if not common.any():
        return shares
    is_joined = np.zeros(num_sequences + 1, dtype=bool)  # with its predecessor; the edges have none
    is_joined[1:-1] = common > 0
    is_joined[2:-1] &= common[1:] >= common[:-1]
    is_joined[1:-2] &= common[:-1] >= common[1:]
    edges = np.flatnonzero(is_joined[1:] != is_joined[:-1])
    firsts = edges[::2]
    items = _cut(firsts, edges[1::2] - firsts + 1, common[firsts], max_members=max_members)
    sizes, chunks = items[:, 1], items[:, 2]
    shares[0, :2] = len(items), chunks.max(initial=0)
    shares[1 : len(items) + 1, :3] = items
    places = np.arange(sizes.sum()) + np.repeat(items[:, 0] - (np.cumsum(sizes) - sizes), sizes)
    shares[1 + places, 3] = np.repeat(chunks, sizes)
    return shares


def _common_chunks(table: np.ndarray, num_full: np.ndarray, *, pages_per_chunk: int) -> np.ndarray:
    """Return how many first chunks each sequence shares with the one after it: int64 [S - 1]."""
    most = np.minimum(num_full[1:], num_full[:-1]).astype(np.int64)
    most[table[1:, 0] != table[:-1, 0]] = 0
    width = int(most.max()) * pages_per_chunk
    is_same = np.zeros((len(most), width + 1), dtype=bool)
    np.equal(table[1:, :width], table[:-1, :width], out=is_same[:, :width])
    common: np.ndarray = np.minimum(is_same.argmin(axis=1) // pages_per_chunk, most)
    return common


def _cut(firsts: np.ndarray, sizes: np.ndarray, chunks: np.ndarray, *, max_members: int) -> np.ndarray:
    """Cut runs into items [N, 3] of `max_members` at most; one that is left alone is dropped."""
    num_items = -(-sizes // max_members)
    number = np.arange(num_items.sum()) - np.repeat(np.cumsum(num_items) - num_items, num_items)
    run_sizes, run_items = np.repeat(sizes, num_items), np.repeat(num_items, num_items)
    begins, ends = number * run_sizes // run_items, (number + 1) * run_sizes // run_items
    items = np.stack([np.repeat(firsts, num_items) + begins, ends - begins, np.repeat(chunks, num_items)], axis=1)
    found: np.ndarray = items[items[:, 1] > 1]
    return found
