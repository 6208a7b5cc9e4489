"""The metrics of one run in memory: a column of numbers for each metric, with one row for each step.

A table is filled from a metrics file, from front to back, while others read it. Its size is bounded: where it has more
than `max_cells` numbers, every two rows become one, their mean.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from forge.observe.jsonl import MetricsLine
from forge.observe.sink import NUM_TOKENS

MAX_CELLS: Final = 24_000_000
"""96 MB of numbers."""
MAX_COLUMNS: Final = 4_000
MAX_ODD: Final = 1_000
"""Steps that are remembered for a metric at which it was NaN or infinite."""
_FIRST_CAPACITY: Final = 256
_SLACK: Final = MAX_CELLS
"""So many numbers more there may be while lines are added: pairs are merged when all are, as far as this goes."""
_MAX_STEP: Final = 1 << 53

Floats = NDArray[np.float32]
N = TypeVar("N", bound=np.generic)


@dataclass(frozen=True, slots=True)
class TableRows:
    """What a table held at one moment. The arrays are not changed afterwards, except the last row.

    Attributes:
        generation: changes when rows that were read before are no longer the same ones.
        steps, times: of each row; seconds since 1970.
        tokens: trained on up to each row.
        columns: one number for each row, NaN where the step had none.
        odd: for each metric the steps at which it was NaN or infinite.
        merged: how many steps the oldest rows stand for.
    """

    generation: int
    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    tokens: NDArray[np.float64]
    columns: Mapping[str, Floats]
    odd: Mapping[str, tuple[int, ...]]
    merged: int = 1

    def __len__(self) -> int:
        return len(self.steps)

    def between(self, first: float | None, last: float | None) -> tuple[int, int]:
        """Return the rows `[start, end)` with steps from `first` to `last`; None for no bound."""
        start = 0 if first is None else int(np.searchsorted(self.steps, first, "left"))
        end = len(self) if last is None else int(np.searchsorted(self.steps, last, "right"))
        return start, max(start, end)


class MetricTable:
    """Takes lines of a metrics file. May be filled by one thread and read by others."""

    def __init__(self, *, max_cells: int = MAX_CELLS) -> None:
        self._max_cells = max_cells
        self._lock = threading.Lock()
        self.generation = 0
        self.num_refused = 0
        """Metrics that were left out because there were too many of them."""
        self._clear()

    def _clear(self) -> None:
        self._count, self._capacity, self._merged = 0, _FIRST_CAPACITY, 1
        self._steps: NDArray[np.int64] = np.zeros(self._capacity, np.int64)
        self._times: NDArray[np.float64] = np.zeros(self._capacity, np.float64)
        self._tokens: NDArray[np.float64] = np.zeros(self._capacity, np.float64)
        self._columns: dict[str, Floats] = {}
        self._odd: dict[str, list[int]] = {}
        self._total_tokens = 0.0
        self._is_sorted = True

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        """Forget all rows: the file is another one."""
        with self._lock:
            self._clear()
            self.generation += 1

    def add(self, lines: Iterable[MetricsLine]) -> None:
        """Add lines. Those of the step that came last join its row."""
        with self._lock:
            for line in lines:
                if 0 <= line.step < _MAX_STEP and math.isfinite(line.time):
                    num_new = min(len(line.values.keys() - self._columns.keys()), MAX_COLUMNS - len(self._columns))
                    self._make_room(self._max_cells + _SLACK, num_new)
                    self._add(line)
            if not self._is_sorted:
                self._sort()
            self._make_room(self._max_cells, 0)

    def _make_room(self, max_cells: int, num_new: int) -> None:
        """Merge rows until all columns, and so many new ones, have at most `max_cells` numbers."""
        while self._count * (len(self._columns) + num_new + 6) > max_cells and self._count > 2:
            if not self._is_sorted:
                self._sort()
            else:
                self._merge_pairs()

    def rows(self) -> TableRows:
        """Return what the table holds now."""
        with self._lock:
            count = self._count
            return TableRows(
                self.generation,
                self._steps[:count],
                self._times[:count],
                self._tokens[:count],
                {name: column[:count] for name, column in self._columns.items()},
                {name: tuple(steps) for name, steps in self._odd.items()},
                self._merged,
            )

    # ---- Filling

    def _add(self, line: MetricsLine) -> None:
        row = self._count - 1
        if row < 0 or self._steps[row] != line.step:
            self._is_sorted = self._is_sorted and (row < 0 or bool(self._steps[row] < line.step))
            row = self._new_row()
            self._steps[row], self._times[row] = line.step, line.time
        for name, value in line.values.items():
            if not isinstance(value, int | float):
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._new_column(name)
                if column is None:
                    continue
            number = float(value) if abs(value) < 3e38 else math.nan
            if math.isnan(number):
                self._note_odd(name, line.step)
            else:
                column[row] = number
                if name == NUM_TOKENS:
                    self._total_tokens += number
        self._tokens[row] = self._total_tokens

    def _note_odd(self, name: str, step: int) -> None:
        steps = self._odd.setdefault(name, [])
        if len(steps) < MAX_ODD:
            steps.append(step)

    def _new_row(self) -> int:
        if self._count == self._capacity:
            self._capacity *= 2
            self._steps, self._times, self._tokens = (
                np.concatenate([each, np.zeros_like(each)]) for each in (self._steps, self._times, self._tokens)
            )
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate([column, np.full(len(column), np.nan, np.float32)])
        self._count += 1
        return self._count - 1

    def _new_column(self, name: str) -> Floats | None:
        if len(self._columns) >= MAX_COLUMNS:
            self.num_refused += 1
            return None
        column = self._columns[name] = np.full(self._capacity, np.nan, np.float32)
        return column

    # ---- Order and size

    def _sort(self) -> None:
        """Put rows in the order of steps. Of a step with several rows the later numbers win."""
        count = self._count
        order = np.argsort(self._steps[:count], kind="stable")
        steps = self._steps[:count][order]
        starts = np.flatnonzero(np.r_[True, steps[1:] != steps[:-1]])
        last = np.r_[starts[1:], count] - 1
        self._shrink(len(starts))
        for name, column in self._columns.items():
            self._columns[name] = self._padded(_last_known(column[:count][order], starts))
        times, tokens = self._times[:count][order], np.maximum.accumulate(self._tokens[:count][order])
        self._steps, self._times = self._padded(steps[last]), self._padded(times[last])
        self._tokens = self._padded(tokens[last])
        self._count = len(starts)
        self._is_sorted = True
        self.generation += 1

    def _merge_pairs(self) -> None:
        """Make one row of every two, except the last, which stays as it is."""
        even = (self._count - 1) // 2 * 2
        kept = np.r_[np.arange(1, even, 2), np.arange(even, self._count)]
        self._shrink(len(kept))
        for name, column in self._columns.items():
            pairs = column[:even].reshape(-1, 2)
            known = ~np.isnan(pairs)
            with np.errstate(invalid="ignore"):
                means = np.where(known, pairs, 0).sum(axis=1) / known.sum(axis=1)
            merged = np.concatenate([means.astype(np.float32), column[even : self._count]])
            self._columns[name] = self._padded(merged)
        self._steps, self._times = self._padded(self._steps[kept]), self._padded(self._times[kept])
        self._tokens = self._padded(self._tokens[kept])
        self._count = len(kept)
        self._merged *= 2
        self.generation += 1

    def _shrink(self, count: int) -> None:
        """Leave no more room than a table of `count` rows has. `_padded` gives it to each column."""
        self._capacity = min(self._capacity, max(_FIRST_CAPACITY, 2 * count))

    def _padded(self, values: NDArray[N]) -> NDArray[N]:
        """Return values with room behind them for as many rows as the table has."""
        fill = np.nan if values.dtype == np.float32 else 0
        room = np.full(self._capacity - len(values), fill, values.dtype)
        padded: NDArray[N] = np.concatenate([values, room])
        return padded


def _last_known(values: Floats, starts: NDArray[np.int64]) -> Floats:
    """Return for each piece, from its start to the next one's, the last number in it; NaN where it has none."""
    known = np.where(np.isnan(values), -1, np.arange(len(values)))
    last = np.maximum.reduceat(known, starts)
    return np.where(last >= 0, values[np.maximum(last, 0)], np.float32(np.nan))
