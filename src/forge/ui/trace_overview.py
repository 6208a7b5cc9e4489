"""A whole trace in a bounded number of numbers: for how long each lane was busy with what, slice by slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from forge.ui.trace_spans import Floats, Ints, Spans

NUM_SLICES: Final = 2_048
MAX_PAIRS: Final = 2_048
"""Lanes with the names of their spans. Spans of more pairs count for the last one of their lane."""
_FIRST_US: Final = 1_000.0


@dataclass(frozen=True, slots=True)
class Busy:
    """What lanes did in slices of time: in each the name that took most of it.

    Attributes:
        lane, name, start: one for each slice of a lane in which it did anything.
        length: of a slice, in microseconds.
        share: the part of the slice that it took.
    """

    lane: Ints
    name: Ints
    start: Floats
    length: float
    share: Floats


class TraceOverview:
    """Adds up spans. When they reach beyond the last slice, every two become one."""

    def __init__(self) -> None:
        self.slice_us = _FIRST_US
        self._pairs: dict[tuple[int, int], int] = {}
        self._last_of: dict[int, int] = {}
        self._lanes: list[int] = []
        self._names: list[int] = []
        self._busy: NDArray[np.float32] = np.zeros((16, NUM_SLICES), np.float32)

    @property
    def num_bytes(self) -> int:
        """Memory of the numbers."""
        return self._busy.nbytes

    def add(self, spans: Spans) -> None:
        """Count spans."""
        if not len(spans):
            return
        while float(spans.end.max()) >= NUM_SLICES * self.slice_us:
            self._fold()
        pairs = self._pairs_of(spans)
        first = (spans.start / self.slice_us).astype(np.int64)
        last = np.minimum((spans.end / self.slice_us).astype(np.int64), NUM_SLICES - 1)
        inside = first == last
        np.add.at(self._busy, (pairs[inside], first[inside]), spans.length[inside].astype(np.float32))
        for row in np.flatnonzero(~inside):
            self._add_long(int(pairs[row]), float(spans.start[row]), float(spans.end[row]))

    def _add_long(self, pair: int, start: float, end: float) -> None:
        width = self.slice_us
        first, last = int(start / width), min(int(end / width), NUM_SLICES - 1)
        self._busy[pair, first] += (first + 1) * width - start
        self._busy[pair, first + 1 : last] += width
        self._busy[pair, last] += end - last * width

    def _fold(self) -> None:
        halves = self._busy.reshape(len(self._busy), NUM_SLICES // 2, 2).sum(axis=2)
        self._busy = np.concatenate([halves, np.zeros_like(halves)], axis=1)
        self.slice_us *= 2

    def _pairs_of(self, spans: Spans) -> Ints:
        keys, places = np.unique(np.stack([spans.lane, spans.name], axis=1), axis=0, return_inverse=True)
        numbers = np.array([self._pair(int(lane), int(name)) for lane, name in keys], np.int64)
        found: Ints = numbers[places.reshape(-1)]
        return found

    def _pair(self, lane: int, name: int) -> int:
        known = self._pairs.get((lane, name))
        if known is not None:
            return known
        if len(self._lanes) >= MAX_PAIRS:
            return self._last_of.get(lane, MAX_PAIRS - 1)
        if len(self._lanes) == len(self._busy):
            self._busy = np.concatenate([self._busy, np.zeros_like(self._busy)])
        self._pairs[lane, name] = self._last_of[lane] = len(self._lanes)
        self._lanes.append(lane)
        self._names.append(name)
        return len(self._lanes) - 1

    def between(self, start_us: float, end_us: float, *, points: int) -> Busy:
        """Return what lanes did in a part of the trace, in at most about so many slices of each."""
        first = max(0, int(start_us / self.slice_us))
        last = min(NUM_SLICES, int(np.ceil(end_us / self.slice_us)))
        step = max(1, -(-(last - first) // max(1, points)))
        last = first + -(-max(0, last - first) // step) * step
        count = len(self._lanes)
        busy = np.zeros((count, last - first), np.float32)
        have = self._busy[:count, first : min(last, NUM_SLICES)]
        busy[:, : have.shape[1]] = have
        sums = busy.reshape(count, -1, step).sum(axis=2)
        lanes, names = np.array(self._lanes, np.int64), np.array(self._names, np.int64)
        found: list[tuple[Ints, Ints, Ints, Floats]] = []
        for lane in np.unique(lanes):
            rows = np.flatnonzero(lanes == lane)
            most = sums[rows].argmax(axis=0)
            peak = sums[rows, :][most, np.arange(sums.shape[1])]
            slices = np.flatnonzero(peak > 0)
            chosen = names[rows[most[slices]]]
            share = peak[slices].astype(np.float64) / (step * self.slice_us)
            found.append((np.full(len(slices), lane, np.int64), chosen, slices, share))
        width = step * self.slice_us
        parts = [np.concatenate([each[place] for each in found] or [np.zeros(0)]) for place in range(4)]
        start = first * self.slice_us + parts[2].astype(np.float64) * width
        return Busy(parts[0].astype(np.int64), parts[1].astype(np.int64), start, width, np.minimum(1.0, parts[3]))

    def totals(self, start_us: float, end_us: float) -> list[tuple[int, int, float]]:
        """Return lane, name and microseconds of everything in a part of the trace."""
        first = max(0, int(start_us / self.slice_us))
        last = min(NUM_SLICES, int(np.ceil(end_us / self.slice_us)))
        sums = self._busy[: len(self._lanes), first:last].sum(axis=1)
        return [
            (lane, name, float(total))
            for lane, name, total in zip(self._lanes, self._names, sums, strict=True)
            if total > 0
        ]
