"""Which documents lie in a row of tokens, and how the layers of a model find out.

A row is a line of tokens [1, L] that holds several documents, one after the other. The layers are handed a *key*, a
tensor with one whole number, and look the row up in the model's `RowRegistry`. A tensor passes through pipelines,
activation checkpointing and torch.compile as any input does; an object would be split, forgotten or guarded on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, count
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Documents:
    """Where the documents of a row begin and end.

    Attributes:
        lengths: the real documents, in order.
        num_padding: tokens after them, each a document of its own that no other token sees.
        offsets: int32 [D + 1] on the compute device, padding included, as kernels for packed attention want them.
    """

    lengths: tuple[int, ...]
    num_padding: int
    offsets: Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...], *, num_padding: int = 0, device: torch.device | str = "cpu") -> Documents:
        ends = (0, *accumulate(lengths + (1,) * num_padding))
        return cls(lengths, num_padding, torch.tensor(ends, dtype=torch.int32, device=device))

    @property
    def longest(self) -> int:
        return max(self.lengths, default=1)


@dataclass(frozen=True, eq=False)
class Sharing:
    """How a row that holds shared prefixes once becomes whole documents.

    Attributes:
        places: int64 [E]: which place of the row each token of the documents, and of padding, is computed at.
        own: int64 [L]: for each place of the row, the token among those E that it stands for.
        prefixes: how many of its first tokens each document takes from the document before it, which may have taken
            them itself. The same in other words, for a kernel that wants no copies.
        queries: the row itself, cut into what is computed for each document: its last tokens.
    """

    places: Tensor
    own: Tensor
    prefixes: tuple[int, ...]
    queries: Documents

    @classmethod
    def of(cls, documents: Documents, prefixes: tuple[int, ...], *, places: Tensor, own: Tensor) -> Sharing:
        """Make it for documents that take so many tokens each from the one before them."""
        fresh = (length - prefix for length, prefix in zip(documents.lengths, prefixes, strict=True))
        queries = Documents.of(tuple(fresh), num_padding=documents.num_padding, device=places.device)
        return cls(places, own, prefixes, queries)

    @cached_property
    def copies(self) -> tuple[Tensor, Tensor]:
        """The tokens among E by the place that they are computed at, ascending [E]; where each place's begin [L + 1].

        Every layer of a row asks for it. Nothing is waited for on a GPU.
        """
        ordered, tokens = torch.sort(self.places, stable=True)
        bounds = torch.arange(self.own.shape[0] + 1, device=ordered.device)
        return tokens, torch.searchsorted(ordered, bounds)


@dataclass(frozen=True, slots=True, eq=False)
class RowTask:
    """One row, and what is wanted of it.

    Attributes:
        documents: where its documents are.
        positions: int64 [1, L]; each document counts from 0.
        index: int64 [N]: the places of the row whose next token, or whose value, is asked about; a place may be asked
            about several times.
        targets: int64 [N]: those tokens. A scalar head does not look at them.
        candidates: int64 [N, K], or None: further tokens at those places whose logprobs are wanted.
        num_top: so many of the likeliest tokens of each place are wanted instead of anything else; 0 for none.
        weights: float [N], or None. With weights the head returns their sum of -logprob, and works out the gradient on
            the way; without, it returns logprobs (and entropies) that any loss may be made from.
        entropy: whether entropies are wanted too.
        temperature: what logits are divided by: one number, or float64 [N], one for each target.
        as_row: whether the head returns one tensor [1, L, 2] of logprobs and entropies, or [1, L, 1] of values, 0 where
            nothing was asked: stages of a pipeline must give the same shape each time.
        sharing: how attention finds whole documents, where the row holds what they have in common once.
    """

    documents: Documents
    positions: Tensor
    index: Tensor
    targets: Tensor
    weights: Tensor | None = None
    entropy: bool = False
    temperature: float | Tensor = 1.0
    as_row: bool = False
    sharing: Sharing | None = None
    candidates: Tensor | None = None
    num_top: int = 0


class PackedRow(Protocol):
    """What every kind of row has: a trainer's is a `RowTask`, a generator's a `PagedRow`."""

    @property
    def positions(self) -> Tensor: ...

    @property
    def index(self) -> Tensor: ...


@dataclass(slots=True)
class RowRegistry:
    """The rows that are under way, by key."""

    _rows: dict[int, PackedRow] = field(default_factory=dict)
    _keys: count[int] = field(default_factory=count)

    def enter(self, row: PackedRow) -> Tensor:
        """Add a row and return its key, int64 [1, 1] in host memory."""
        key = next(self._keys)
        self._rows[key] = row
        return torch.tensor([[key]])

    def find(self, key: Tensor) -> Any:
        """Return the row of a key, of the kind that was entered."""
        return self._rows[int(key.reshape(-1)[0])]

    def clear(self) -> None:
        """Forget all rows: their backward passes are done."""
        self._rows.clear()
