"""The metrics of a run as curves of bounded size, filled step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from forge.observe.sink import Value

MAX_POINTS = 240
"""Points of a curve at most; about as many as a small chart has pixels."""


class Curve:
    """One metric over the steps. Of a long run each point is the mean of several values, at the last of their steps."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.last = math.nan
        self.nonfinite_at: int | None = None
        """The first step at which it was NaN or infinite."""
        self._stride, self._open, self._sum = 1, 0, 0.0

    def add(self, step: int, value: float) -> None:
        """Take the value of a step."""
        self.last = value
        if not math.isfinite(value):
            self.nonfinite_at = step if self.nonfinite_at is None else self.nonfinite_at
            return
        if self._open:  # the last point does not stand for as many values as the others yet
            self.points.pop()
        self._sum, self._open = self._sum + value, self._open + 1
        self.points.append((step, self._sum / self._open))
        if self._open == self._stride:
            self._sum, self._open = 0.0, 0
            if len(self.points) == MAX_POINTS:
                self._halve()

    def _halve(self) -> None:
        pairs = zip(self.points[::2], self.points[1::2], strict=True)
        self.points = [(later[0], (earlier[1] + later[1]) / 2) for earlier, later in pairs]
        self._stride *= 2


class Curves:
    """The numbers of a run, by the name of the metric."""

    def __init__(self) -> None:
        self.by_name: dict[str, Curve] = {}

    def add(self, step: int, values: Mapping[str, Value]) -> None:
        """Take the metrics of a step. Text is left out."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self.by_name.setdefault(name, Curve()).add(step, float(value))
