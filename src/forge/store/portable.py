"""What the C kernel does, in numpy: for machines without a compiler, with the same bytes and the same digests."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forge.store import proof
from forge.store.copy_table import (
    CAST,
    COPY,
    DIGEST,
    DST,
    DST_BASE,
    FROM_DST,
    HEAD,
    IMAGE,
    ITEM,
    NDIM,
    SAMPLES,
    SLOT,
    SRC,
    SRC_BASE,
    CopyTable,
    PieceLocations,
    TableSlice,
    split_row,
)

STEP_BYTES: Final = 4 << 20
"""Rows are worked on in parts of this size, which bounds the temporary memory."""

Elements = npt.NDArray[Any]
Bases = tuple["array[int]", "array[int]"]
"""Addresses that rows count from: of sources, of destinations."""


def view(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Elements:
    """Return raw memory as an array of opaque elements."""
    extent = itemsize + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_ubyte * extent).from_address(address)
    return np.ndarray(tuple(shape), dtype=f"V{itemsize}", buffer=memoryview(memory), strides=tuple(strides))


def narrowed(values: Elements) -> Elements:
    """Convert fp32 to bf16: nearest even, one quiet NaN for all."""
    bits = values.view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint32(0x7FC0), rounded).astype("<u2").view("V2")


def digest(values: Elements, offset: int, strides: Sequence[int]) -> int:
    """Return what contiguous elements add to the digest; offset and byte strides are those of the image."""
    at = np.full(values.shape, offset, dtype=np.uint64)
    for dim, stride in enumerate(strides):
        steps = np.arange(values.shape[dim], dtype=np.uint64) * np.uint64(stride)
        at += steps.reshape([-1 if other == dim else 1 for other in range(values.ndim)])
    bytes_at, itemsize = at.reshape(-1), values.itemsize
    if itemsize < 4:
        shift = np.uint64(8) * (bytes_at % np.uint64(4))
        return proof.weigh(
            values.reshape(-1).view(f"<u{itemsize}").astype(np.uint64) << shift, bytes_at >> np.uint64(2)
        )
    words = values.reshape(-1).view("<u4").astype(np.uint64).reshape(-1, itemsize // 4)
    words_at = (bytes_at >> np.uint64(2))[:, None] + np.arange(itemsize // 4, dtype=np.uint64)
    return proof.weigh(words, words_at)


class Portable:
    """Runs tables of rectangles with numpy."""

    name = "portable"

    def rows(self, part: TableSlice, bases: Bases, slots: proof.Words, flags: int) -> None:
        for index in range(part.first, part.last):
            row = part.rects.row(index)
            wanted = flags if row[SLOT] >= 0 else flags & ~DIGEST
            if 0 in row[HEAD : HEAD + row[NDIM]] or not wanted & (COPY | DIGEST):
                continue
            for small in split_row(row, STEP_BYTES):
                _one(small, bases, slots, wanted)

    def sample(self, base: int, locations: PieceLocations, seed: int) -> bytes:
        drawn = np.zeros((len(locations), SAMPLES, 8), dtype=np.uint8)
        for piece, positions in enumerate(_positions(locations, seed)):
            itemsize = int(locations.itemsizes[piece])
            size = min(itemsize, 8)
            for which, position in enumerate(positions):
                address = base + int(locations.starts[piece]) + position * itemsize
                drawn[piece, which, :size] = np.frombuffer(ctypes.string_at(address, size), dtype=np.uint8)
        return drawn.tobytes()

    def check(
        self, rects: CopyTable, dst: array[int], locations: PieceLocations, samples: bytes, seed: int
    ) -> list[int]:
        differing = set()
        positions = _positions(locations, seed)
        for row in map(rects.row, range(len(rects))):
            piece = row[SLOT]
            for which, position in enumerate(positions[piece] if piece >= 0 else ()):
                itemsize = 4 if row[CAST] else row[ITEM]
                place = _place(row, position * itemsize + int(locations.starts[piece]) - row[SRC])
                if place is None:
                    continue
                want = samples[8 * (SAMPLES * piece + which) :][: min(itemsize, 8)]
                if row[CAST]:
                    want = narrowed(np.frombuffer(want, dtype="V4")).tobytes()
                if ctypes.string_at(dst[row[DST_BASE]] + row[DST] + place, len(want)) != want:
                    differing.add(piece)
        return sorted(differing)


def _one(row: list[int], bases: Bases, slots: proof.Words, flags: int) -> None:
    src, dst = bases
    ndim, itemsize = row[NDIM], row[ITEM]
    shape, src_strides, dst_strides, image_strides = (row[HEAD + i * ndim : HEAD + (i + 1) * ndim] for i in range(4))
    if flags & FROM_DST:
        values = view(dst[row[DST_BASE]] + row[DST], shape, dst_strides, itemsize)
    else:
        values = view(src[row[SRC_BASE]] + row[SRC], shape, src_strides, 4 if row[CAST] else itemsize)
        if row[CAST]:
            values = narrowed(values.copy())
    if flags & COPY:
        view(dst[row[DST_BASE]] + row[DST], shape, dst_strides, itemsize)[...] = values
    if flags & DIGEST:
        slot = slice(row[SLOT], row[SLOT] + 1)
        slots[slot] += np.array([digest(values.copy(), row[IMAGE], image_strides)], dtype=np.uint64)


def _positions(locations: PieceLocations, seed: int) -> list[list[int]]:
    """Return which elements of each piece are drawn; none of an empty one."""
    return [
        [
            proof.splitmix64((seed + SAMPLES * number + which) & proof.MASK) % numel
            for which in range(SAMPLES if numel else 0)
        ]
        for number, numel in zip(locations.numbers.tolist(), locations.numels.tolist(), strict=True)
    ]


def _place(row: list[int], distance: int) -> int | None:
    """Return where the byte goes that is `distance` after the row's first in the source; None: outside."""
    ndim, place = row[NDIM], 0
    if distance < 0:
        return None
    for size, src_stride, dst_stride in zip(
        *(row[HEAD + i * ndim : HEAD + (i + 1) * ndim] for i in range(3)), strict=True
    ):
        if size == 1:
            continue
        at, distance = divmod(distance, src_stride)
        if at >= size:
            return None
        place += at * dst_stride
    return None if distance else place
