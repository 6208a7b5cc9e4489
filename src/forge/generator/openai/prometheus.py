"""Metrics in the text format 0.0.4 of Prometheus: counters, gauges and histograms with labels."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPED: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_ESCAPED_HELP: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})

Labels = tuple[str, ...]


class Metric:
    """A metric with a value for each combination of labels.

    Args:
        name: the metric's name; that of a counter ends with `_total`.
        text: one sentence that describes it.
        labels: the names of its labels. Without labels there is one value, which starts at 0.
    """

    kind = "untyped"

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name, self.text, self.labels = name, text, tuple(labels)
        self._values: dict[Labels, float] = {} if self.labels else {(): 0.0}

    def lines(self) -> Iterator[str]:
        """Yield the metric in the text format."""
        yield f"# HELP {self.name} {self.text.translate(_ESCAPED_HELP)}"
        yield f"# TYPE {self.name} {self.kind}"
        for values, number in self._values.items():
            yield _sample(self.name, self.labels, values, number)


class Counter(Metric):
    """A number that only grows."""

    kind = "counter"

    def add(self, amount: float = 1.0, *labels: str) -> None:
        """Add to the value with these labels."""
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def value(self, *labels: str) -> float:
        """Return the value with these labels."""
        return self._values.get(labels, 0.0)

    def set_total(self, total: float, *labels: str) -> None:
        """Take over a total that is counted elsewhere."""
        self._values[labels] = total


class Gauge(Metric):
    """A number that goes up and down."""

    kind = "gauge"

    def set(self, value: float, *labels: str) -> None:
        """Set the value with these labels."""
        self._values[labels] = value

    def clear(self) -> None:
        """Forget all values: what is not set again is not reported."""
        self._values.clear()


class Histogram(Metric):
    """A distribution over buckets, whose upper bounds are given in ascending order."""

    kind = "histogram"

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, bounds: Sequence[float]) -> None:
        super().__init__(name, text, labels)
        self._bounds = (*bounds, math.inf)
        self._counts: dict[Labels, list[int]] = {} if self.labels else {(): [0] * len(self._bounds)}
        self._sums: dict[Labels, float] = {} if self.labels else {(): 0.0}

    def observe(self, value: float, *labels: str) -> None:
        """Count a value."""
        counts = self._counts.setdefault(labels, [0] * len(self._bounds))
        counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sums[labels] = self._sums.get(labels, 0.0) + value

    def lines(self) -> Iterator[str]:
        """Yield the histogram in the text format: cumulative buckets, sum and count."""
        yield f"# HELP {self.name} {self.text.translate(_ESCAPED_HELP)}"
        yield f"# TYPE {self.name} histogram"
        for values, counts in self._counts.items():
            num = 0
            for bound, count in zip(self._bounds, counts, strict=True):
                num += count
                names, parts = (*self.labels, "le"), (*values, _number(bound))
                yield _sample(f"{self.name}_bucket", names, parts, num)
            yield _sample(f"{self.name}_sum", self.labels, values, self._sums[values])
            yield _sample(f"{self.name}_count", self.labels, values, num)


def render(metrics: Sequence[Metric]) -> str:
    """Return metrics in the text format."""
    return "".join(f"{line}\n" for metric in metrics for line in metric.lines())


def _sample(name: str, labels: Labels, values: Labels, number: float) -> str:
    pairs = ",".join(f'{label}="{value.translate(_ESCAPED)}"' for label, value in zip(labels, values, strict=True))
    return f"{name}{{{pairs}}} {_number(number)}" if pairs else f"{name} {_number(number)}"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
