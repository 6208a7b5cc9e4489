"""Rectangles: which part of a tensor somebody holds or wants. Pure geometry, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle inside a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """What both cover; None if that is nothing."""
        start: list[int] = []
        shape: list[int] = []
        for a, a_size, b, b_size in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            low = a if a > b else b
            high = min(a + a_size, b + b_size)
            if high <= low:
                return None
            start.append(low)
            shape.append(high - low)
        return Box(tuple(start), tuple(shape))

    def minus(self, other: Box) -> list[Box]:
        """What is left of this box without the other: disjoint boxes, none of them empty."""
        shared = self.intersect(other)
        if shared is None:
            return [] if 0 in self.shape else [self]
        left: list[Box] = []
        offset, shape = list(self.offset), list(self.shape)
        for dim, (low, size) in enumerate(zip(shared.offset, shared.shape, strict=True)):
            for start, end in ((offset[dim], low), (low + size, offset[dim] + shape[dim])):
                if start < end:
                    left.append(
                        Box((*offset[:dim], start, *offset[dim + 1 :]), (*shape[:dim], end - start, *shape[dim + 1 :]))
                    )
            offset[dim], shape[dim] = low, size
        return left

    def relative_to(self, other: Box) -> tuple[int, ...]:
        """Where this box begins, counted from the beginning of the other."""
        return tuple(a - b for a, b in zip(self.offset, other.offset, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the global tensor, and where it lies in the local tensor of the rank that holds it."""

    box: Box
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of one tensor."""

    shape: tuple[int, ...]
    """The shape of the whole tensor, over all ranks."""
    dtype: str
    pieces: tuple[Piece, ...]
    """Empty where this rank holds nothing of it."""
