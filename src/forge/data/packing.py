"""Filling rows with samples, best fit first, among a bounded number of samples that wait."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Packer(Generic[T]):
    """Takes items of known length from `draw` and lays them into rows of at most `capacity`.

    A row begins with the item that has waited longest; then, as long as one fits, the longest that fits is added. At
    most `lookahead` items wait at any time, so an item comes at most that many places early, and leaves within that
    many rows. No item is lost or repeated. With `packing` off a row is one item, in order.
    """

    def __init__(
        self, draw: Callable[[], tuple[T, int] | None], *, capacity: int, lookahead: int, packing: bool = True
    ) -> None:
        self._draw = draw
        self._capacity = capacity
        self._lookahead = lookahead if packing else 1
        self._packing = packing
        self._waiting: dict[int, tuple[T, int]] = {}
        self._by_length: list[tuple[int, int]] = []
        self._arrived = 0
        self._ended = False

    def add(self, item: T, length: int) -> None:
        """Let an item wait. Only a resume does so from outside, with what waited when the state was taken."""
        self._waiting[self._arrived] = (item, length)
        bisect.insort(self._by_length, (length, -self._arrived))
        self._arrived += 1

    def waiting(self) -> list[T]:
        """What waits, in order of arrival."""
        return [item for item, _ in self._waiting.values()]

    def next_row(self) -> list[T]:
        """The next row; empty when everything was given."""
        self._fill()
        if not self._waiting:
            return []
        oldest = next(iter(self._waiting))
        room = self._capacity - self._waiting[oldest][1]
        row = [self._take(oldest)]
        while self._packing:
            self._fill()
            place = bisect.bisect_left(self._by_length, (room + 1, -self._arrived))
            if place == 0:
                break
            length, arrival = self._by_length[place - 1]
            row.append(self._take(-arrival))
            room -= length
        return row

    def _fill(self) -> None:
        while not self._ended and len(self._waiting) < self._lookahead:
            drawn = self._draw()
            if drawn is None:
                self._ended = True
            else:
                self.add(*drawn)

    def _take(self, arrival: int) -> T:
        item, length = self._waiting.pop(arrival)
        del self._by_length[bisect.bisect_left(self._by_length, (length, -arrival))]
        return item
