"""Tables of rectangle copies: built once per plan, run again and again with other base addresses."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from forge.errors import StoreError

MAX_DIMS: Final = 8
ITEMSIZES: Final = frozenset((1, 2, 4, 8, 16))
NO_SLOT: Final = -1
SAMPLES: Final = 32
"""How many elements of each piece are drawn: a reader of an eighth of it then sees one of them in 98 cases of 100."""
MIN_PART_BYTES: Final = 256 << 10
"""Less than this is not worth a thread of its own."""

COPY, DIGEST, STREAM, FROM_DST = 1, 2, 4, 8
"""What to do with the rows: flags that both engines understand."""

Walk = tuple[int, int, Sequence[int]]
"""A way through the elements: an index (which base, or which slot), a byte offset, a byte stride per dimension."""

NDIM, ITEM, CAST, SLOT, SRC_BASE, DST_BASE, SRC, DST, IMAGE, HEAD = range(10)
"""Where a row keeps what; then come shape, source, destination and image strides. The C kernel has the same."""


@lru_cache(maxsize=4096)
def row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the byte strides of a contiguous tensor."""
    strides = []
    step = itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def byte_offset(at: Sequence[int], strides: Sequence[int]) -> int:
    """Return where an element lies, counted from the first one."""
    return sum(map(int.__mul__, at, strides))


@dataclass(frozen=True, slots=True)
class TableSlice:
    """What one thread does: some rows of a table."""

    rects: CopyTable
    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class PieceLocations:
    """Where stored pieces lie in their segments, and how each is numbered there: what samples are drawn from."""

    starts: npt.NDArray[np.int64]
    """Byte offset of each piece in its segment; pieces are row-major and contiguous."""
    numels: npt.NDArray[np.int64]
    itemsizes: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    """The number of each piece within its own segment; it decides which elements are drawn."""

    @classmethod
    def of(
        cls,
        starts: Sequence[int],
        *,
        numels: Sequence[int],
        itemsizes: Sequence[int],
        numbers: Sequence[int] | None = None,
    ) -> PieceLocations:
        """Describe the pieces of one segment in order, or, with `numbers`, any pieces of any segments."""
        order = range(len(starts)) if numbers is None else numbers
        columns = [np.array(column, dtype=np.int64) for column in (starts, numels, itemsizes, order)]
        return cls(*columns)

    def __len__(self) -> int:
        return len(self.starts)


class CopyTable:
    """Rows of equally shaped rectangles: where to read, where to write, and where they lie in the tensor's image.

    Addresses are not part of it: a row names a base by its index, and the bases are given to each run. Sums of digests
    go to numbered slots, and rows may share one. Several threads may run one table at the same time.
    """

    __slots__ = ("_nbytes", "_slices", "_starts", "_table", "num_dst", "num_slots", "num_src", "total_bytes")

    def __init__(self, *, num_slots: int = 0) -> None:
        """Make an empty table; `num_slots` counts the slots to report even if no row names the last ones."""
        self._table = array("q")
        self._starts = array("q")
        self._nbytes = array("q")
        self._slices: dict[int, list[TableSlice]] = {}
        self.num_slots = num_slots
        self.num_src = 0
        self.num_dst = 0
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._starts)

    def add(
        self,
        shape: Sequence[int],
        *,
        itemsize: int,
        src: Walk,
        dst: Walk | None = None,
        image: Walk | None = None,
        cast: bool = False,
    ) -> None:
        """Append one rectangle.

        `src` and `dst` begin with the index of their base; without `dst` the row can only be digested. `image` begins
        with the slot and walks through the row-major bytes of the whole tensor as they are after the cast; without it
        the row has no digest. `itemsize` is the size of a written element. `cast` reads fp32 and writes bf16: rounded
        to nearest even, with one quiet NaN for all.
        """
        ndim = len(shape)
        dst_base, dst_offset, dst_strides = src if dst is None else dst
        slot, image_offset, image_strides = (NO_SLOT, 0, dst_strides) if image is None else image
        if ndim > MAX_DIMS:
            shape, strides = _joined(shape, (src[2], dst_strides, image_strides))
            src, (dst_strides, image_strides), ndim = (src[0], src[1], strides[0]), strides[1:], len(shape)
        if itemsize not in ITEMSIZES or (cast and itemsize != 2):
            raise StoreError(
                "cannot copy elements of this size",
                path="itemsize",
                value=itemsize,
                rule="2 with a cast to bf16" if cast else "1, 2, 4, 8 or 16 bytes",
                repair="view the tensor as bytes (uint8) first",
            )
        if not len(src[2]) == len(dst_strides) == len(image_strides) == ndim:
            raise StoreError(
                "a rectangle needs one stride per dimension",
                path="strides",
                value=(tuple(src[2]), tuple(dst_strides), tuple(image_strides)),
                rule=f"{ndim} strides each, for the shape {tuple(shape)}",
                repair="give byte strides of the same tensor that gave the shape",
            )
        nbytes = math.prod(shape) * itemsize
        head = (ndim, itemsize, cast, slot, src[0], dst_base, src[1], dst_offset, image_offset)
        self.append_row((*head, *shape, *src[2], *dst_strides, *image_strides), nbytes)

    def append_row(self, row: Sequence[int], nbytes: int) -> None:
        self._starts.append(len(self._table))
        self._table.extend(row)
        self._nbytes.append(nbytes)
        self.total_bytes += nbytes
        if row[SLOT] >= self.num_slots:
            self.num_slots = row[SLOT] + 1
        if row[SRC_BASE] >= self.num_src:
            self.num_src = row[SRC_BASE] + 1
        if row[DST_BASE] >= self.num_dst:
            self.num_dst = row[DST_BASE] + 1

    def row(self, index: int) -> list[int]:
        start = self._starts[index]
        return self._table[start : start + HEAD + 4 * self._table[start]].tolist()

    def each(self) -> Iterator[list[int]]:
        """Yield all rows, as plain numbers."""
        return (self.row(index) for index in range(len(self)))

    def reversed(self) -> CopyTable:
        """Return the same rectangles with their destinations as sources, and no destinations."""
        turned = CopyTable(num_slots=self.num_slots)
        for row in self.each():
            ndim = row[NDIM]
            shape, _, dst, image = (row[HEAD + ndim * part : HEAD + ndim * (part + 1)] for part in range(4))
            source, whole = (row[DST_BASE], row[DST], dst), (row[SLOT], row[IMAGE], image)
            turned.add(shape, itemsize=row[ITEM], src=source, image=whole)
        return turned

    def addresses(self) -> tuple[int, int]:
        """Return the addresses of the table and of the index of its rows; valid until a row is added."""
        return self._table.buffer_info()[0], self._starts.buffer_info()[0]

    def slices(self, num_threads: int) -> list[TableSlice]:
        """Cut the work into at most that many parts of about equal bytes."""
        parts = max(1, min(num_threads, self.total_bytes // MIN_PART_BYTES))
        if parts == 1:
            return [TableSlice(self, 0, len(self))]
        known = self._slices.get(parts)
        if known is None or known[0].rects.total_bytes != self.total_bytes:
            known = self._slices[parts] = self._cut(parts)
        return known

    def _cut(self, parts: int) -> list[TableSlice]:
        limit = max(MIN_PART_BYTES, self.total_bytes // (4 * parts))
        fine = CopyTable(num_slots=self.num_slots)
        ends: list[int] = []
        for index, nbytes in enumerate(self._nbytes):
            row = self.row(index)
            for small in split_row(row, limit) if nbytes > limit else (row,):
                fine.append_row(small, row_bytes(small))
                if fine.total_bytes * parts >= self.total_bytes * (len(ends) + 1):
                    ends.append(len(fine))
        ends[-1] = len(fine)
        return [TableSlice(fine, first, last) for first, last in zip([0, *ends], ends, strict=False) if first < last]


def row_bytes(row: Sequence[int]) -> int:
    return math.prod(row[HEAD : HEAD + row[NDIM]]) * row[ITEM]


def split_row(row: list[int], limit: int) -> Iterator[list[int]]:
    """Cut a row along its outer dimensions into rows of at most `limit` bytes, or of one element."""
    ndim, nbytes = row[NDIM], row_bytes(row)
    dim = next((d for d in range(ndim) if row[HEAD + d] > 1), None)
    if nbytes <= limit or dim is None:
        yield row
        return
    size = row[HEAD + dim]
    step = max(1, size * limit // nbytes)
    if step * row[ITEM] > 4096:  # keeps the parts of a contiguous run aligned
        step -= step % (4096 // row[ITEM])
    for at in range(0, size, step):
        part = list(row)
        part[HEAD + dim] = min(step, size - at)
        for field, strides in ((SRC, 1), (DST, 2), (IMAGE, 3)):
            part[field] += at * row[HEAD + strides * ndim + dim]
        yield from split_row(part, limit)


def _joined(shape: Sequence[int], walks: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Drop dimensions of size one, and join those without a gap between them."""
    dims: list[list[int]] = []
    for size, *strides in zip(shape, *walks, strict=True):
        if size == 1:
            continue
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1:], strides, strict=True)):
            dims[-1] = [dims[-1][0] * size, *strides]
        else:
            dims.append([size, *strides])
    if len(dims) > MAX_DIMS:
        raise StoreError(
            "a tensor has too many dimensions that cannot be joined",
            path="shape",
            value=tuple(shape),
            rule=f"at most {MAX_DIMS} dimensions after contiguous ones are joined",
            repair="make the tensor contiguous, or flatten some of its dimensions",
        )
    return [size for size, *_ in dims], [[dim[1 + walk] for dim in dims] for walk in range(len(walks))]
