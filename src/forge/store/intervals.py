"""Sets of byte ranges, such as the bytes of a segment that a reader needs. They never change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from forge.store.copy_table import HEAD, ITEM, NDIM, SRC

Ends = npt.NDArray[np.int64]
GAP: Final = 256
"""Ranges with less between them are joined: pieces are aligned to it, and their padding is not worth a range."""


class Intervals:
    """Disjoint half-open ranges in rising order."""

    __slots__ = ("ends", "starts")

    def __init__(self, starts: Ends, ends: Ends) -> None:
        """Use `of`, `joined` or `empty`: these arrays must be sorted, disjoint, and without empty ranges."""
        self.starts, self.ends = starts, ends

    @classmethod
    def empty(cls) -> Intervals:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]], *, gap: int = 0) -> Intervals:
        """Return the union of ranges that are given as offset and length."""
        pairs = np.array(list(ranges), dtype=np.int64).reshape(-1, 2)
        return cls.joined(pairs[:, 0], pairs[:, 0] + pairs[:, 1], gap=gap)

    @classmethod
    def joined(cls, starts: Ends, ends: Ends, *, gap: int = 0) -> Intervals:
        """Return the union of any ranges; those with less than `gap` between them become one."""
        is_full = ends > starts
        starts, ends = starts[is_full], ends[is_full]
        if not len(starts):
            return cls.empty()
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        is_first = np.concatenate(([True], starts[1:] >= ends[:-1] + max(gap, 1)))
        firsts = np.flatnonzero(is_first)
        return cls(starts[firsts], ends[np.append(firsts[1:] - 1, len(ends) - 1)])

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield offset and length of each range."""
        return zip(self.starts.tolist(), (self.ends - self.starts).tolist(), strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(f"{start}+{size}" for start, size in list(self)[:4])
        return f"Intervals({shown}{', …' if len(self) > 4 else ''})"

    @property
    def num_bytes(self) -> int:
        return int((self.ends - self.starts).sum())

    def __or__(self, other: Intervals) -> Intervals:
        return Intervals.joined(np.concatenate((self.starts, other.starts)), np.concatenate((self.ends, other.ends)))

    def __sub__(self, other: Intervals) -> Intervals:
        """Return what is in this set and not in the other."""
        if not len(self) or not len(other):
            return self
        # The gaps of the other set, each clipped to every range of this one that it meets.
        gap_starts = np.concatenate(([np.iinfo(np.int64).min], other.ends))
        gap_ends = np.concatenate((other.starts, [np.iinfo(np.int64).max]))
        first = np.searchsorted(gap_ends, self.starts, side="right")
        last = np.searchsorted(gap_starts, self.ends, side="left")
        counts = last - first
        mine = np.repeat(np.arange(len(self)), counts)
        within = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts)
        gaps = first[mine] + within
        starts, ends = np.maximum(self.starts[mine], gap_starts[gaps]), np.minimum(self.ends[mine], gap_ends[gaps])
        is_full = ends > starts
        return Intervals(starts[is_full], ends[is_full])

    def covers(self, other: Intervals) -> bool:
        """Return whether every byte of the other set is in this one."""
        at = np.searchsorted(self.starts, other.starts, side="right") - 1
        return bool(len(other) == 0 or (at.min() >= 0 and (self.ends[at] >= other.ends).all()))

    def __reduce__(self) -> tuple[object, ...]:
        return _unpacked, (np.concatenate((self.starts, self.ends)).tobytes(),)


def _unpacked(data: bytes) -> Intervals:
    starts, ends = np.frombuffer(data, dtype=np.int64).reshape(2, -1)
    return Intervals(starts, ends)


Runs = tuple[Ends, Ends]
"""Where runs of bytes begin and end."""


def runs_of(start: int, shape: Sequence[int], strides: Sequence[int], *, size: int) -> Runs:
    """Return the runs of bytes of a rectangle of elements of this size, whose first is at `start`."""
    inner, run = len(shape), size
    while inner > 0 and (strides[inner - 1] == run or shape[inner - 1] == 1):  # dimensions without a gap belong to it
        inner -= 1
        run *= shape[inner]
    starts = np.array([start] if 0 not in shape else [], dtype=np.int64)
    for extent, stride in zip(shape[:inner], strides[:inner], strict=True):
        starts = (starts[:, None] + np.arange(extent, dtype=np.int64) * stride).ravel()
    return starts, starts + run


def source_runs(row: Sequence[int]) -> Runs:
    """Return the runs of bytes that a row of a copy table reads from its source."""
    ndim = row[NDIM]
    return runs_of(row[SRC], row[HEAD : HEAD + ndim], row[HEAD + ndim : HEAD + 2 * ndim], size=row[ITEM])


def union_of(runs: Sequence[Runs]) -> Intervals:
    """Return all runs as a set, with the padding between pieces that follow one another."""
    if not runs:
        return Intervals.empty()
    starts, ends = (np.concatenate(column) for column in zip(*runs, strict=True))
    return Intervals.joined(starts, ends, gap=GAP)
