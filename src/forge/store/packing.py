"""How the pieces of a layout lie in a segment: one after the other, aligned, each contiguous in row-major order."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from forge.store.boxes import Held, Piece
from forge.store.records import ALIGN, HEADER, Layout


@dataclass(frozen=True, slots=True)
class Packed:
    """One written piece and its place in the segment."""

    number: int
    """Of the piece in its layout."""
    tensor: int
    """Of its tensor in its layout."""
    piece: Piece
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Where every written piece of a layout is, and how large the segment must be."""

    pieces: tuple[Packed, ...]
    size: int


@functools.cache
def itemsize(dtype: str) -> int:
    """Bytes of one element, from the dtype's name alone: the registry has no torch."""
    if dtype == "bool":
        return 1
    bits = re.match(r"[a-z]+(\d+)", dtype)
    if bits is None:
        raise ValueError(f"no dtype is named {dtype!r}")
    return max(8, int(bits[1])) // 8


def pieces_of(layout: Layout) -> Iterator[tuple[int, int, Held, Piece]]:
    """Number of the piece, number of its tensor, and both, for every piece of a layout."""
    number = 0
    for tensor, held in enumerate(layout.helds):
        for piece in held.pieces:
            yield number, tensor, held, piece
            number += 1


@functools.lru_cache(maxsize=64)
def packing(layout: Layout, written: tuple[int, ...] | None) -> Packing:
    """Where those pieces of `layout` are that are `written` (all, if None)."""
    chosen = None if written is None else frozenset(written)
    packed, at = [], HEADER
    for number, tensor, held, piece in pieces_of(layout):
        if chosen is not None and number not in chosen:
            continue
        num_bytes = piece.box.numel * itemsize(held.dtype)
        packed.append(Packed(number, tensor, piece, at, num_bytes))
        at += -(-num_bytes // ALIGN) * ALIGN
    return Packing(tuple(packed), at)
