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
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        shape = tuple(min(a, b) - c for a, b, c in zip(self.end, other.end, start, strict=True))
        return None if any(size <= 0 for size in shape) else Box(start, shape)

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
