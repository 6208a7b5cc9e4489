"""Which bytes go where: from the boxes that are stored to the pieces that a reader wants. Pure geometry, no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from forge.errors import StoreError
from forge.store.boxes import Box, Piece


@dataclass(frozen=True, slots=True)
class Stored:
    """A box of a tensor as it lies in a segment: row-major and contiguous."""

    part: int
    """Which segment."""
    start: int
    """Where it begins in the segment, in bytes."""
    box: Box


@dataclass(frozen=True, slots=True)
class Copy:
    """One rectangle to copy."""

    stored: int
    """Which of the stored boxes it comes from, as a position in their list."""
    target: int
    """Which destination tensor it goes to."""
    shape: tuple[int, ...]
    src_at: tuple[int, ...]
    """Where it begins inside of the stored box."""
    dst_at: tuple[int, ...]
    """Where it begins inside of the local destination tensor."""


def plan(stored: Sequence[Stored], wanted: Sequence[Piece], *, target: int = 0) -> tuple[list[Copy], list[Box]]:
    """How to fill the wanted pieces of one tensor, and which parts of them nobody has stored.

    Only what a piece needs is copied, each element once: of identical stored boxes (replicas) the first is used. An
    empty list of missing boxes means that the copies fill every wanted piece. Missing boxes are disjoint within each
    wanted piece and given in coordinates of the whole tensor. Raises `StoreError` where stored boxes overlap without
    being identical, for then it is undefined which of them is right.
    """
    copies: list[Copy] = []
    missing: list[Box] = []
    shelf: _Shelf | None = None
    for piece in wanted:
        box, at = piece.box, piece.at
        if 0 in box.shape:
            continue
        if shelf is None:
            if stored and all(item.box == box for item in stored):
                copies.append(Copy(0, target, box.shape, (0,) * len(at), at))
                continue
            shelf = _Shelf(stored, len(at))
        lacking = box.numel
        found: list[Box] = []
        for number, source, shared in shelf.overlapping(box):
            lands = tuple([a - b + c for a, b, c in zip(shared.offset, box.offset, at, strict=True)])
            copies.append(Copy(number, target, shared.shape, shared.relative_to(source), lands))
            lacking -= shared.numel
            found.append(shared)
        if lacking:
            missing.extend(_remainder(box, found))
    return copies, missing


def _remainder(box: Box, found: list[Box]) -> list[Box]:
    rest = [box]
    for taken in found:
        rest = [part for whole in rest for part in whole.minus(taken)]
    return rest


class _Shelf:
    """The distinct stored boxes of one tensor, sorted along the dimension that tells them apart best."""

    def __init__(self, stored: Sequence[Stored], ndim: int) -> None:
        distinct: dict[Box, int] = {}
        for number, item in enumerate(stored):
            if 0 not in item.box.shape:
                distinct.setdefault(item.box, number)
        for box in distinct:
            if len(box.shape) != ndim:
                raise StoreError(
                    "A stored tensor and its destination have different numbers of dimensions.",
                    value=f"stored {box}, wanted {ndim} dimensions",
                    rule="a box of a tensor has as many dimensions as the tensor",
                    repair="Fetch into a tensor of the stored shape, or name the slice that is wanted.",
                )
        boxes = list(distinct)
        self._dim = max(range(ndim), key=lambda dim: len({box.offset[dim] for box in boxes})) if len(boxes) > 1 else -1
        if self._dim >= 0:
            boxes.sort(key=lambda box: box.offset[self._dim])
        self._rows = [(box, distinct[box], *self._span(box)) for box in boxes]
        self._starts = [start for _, _, start, _ in self._rows]
        # Boxes differ in length, so their ends need not be sorted; the furthest end so far is.
        self._reach = list(accumulate((end for _, _, _, end in self._rows), max))
        self._check_disjoint()

    def overlapping(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Of each stored box that shares elements with this one: its number, itself, and what they share."""
        start, end = self._span(box)
        for source, number, _, _ in self._rows[bisect_right(self._reach, start) : bisect_left(self._starts, end)]:
            shared = source.intersect(box)
            if shared is not None:
                yield number, source, shared

    def _check_disjoint(self) -> None:
        open_boxes: list[tuple[Box, int]] = []
        for box, _, start, end in self._rows:
            open_boxes = [row for row in open_boxes if row[1] > start]
            for other, _ in open_boxes:
                if other.intersect(box) is not None:
                    raise StoreError(
                        "The stored layout of a tensor is inconsistent: two of its boxes overlap.",
                        value=f"{other} and {box}",
                        rule="stored boxes are either identical (replicas) or disjoint",
                        repair="Publish a tensor from every rank with one and the same mesh and placements.",
                    )
            open_boxes.append((box, end))

    def _span(self, box: Box) -> tuple[int, int]:
        """From where to where a box reaches along the sorted dimension; all the same when there is none."""
        if self._dim < 0:
            return 0, 1
        start = box.offset[self._dim]
        return start, start + box.shape[self._dim]
