"""Rows of a metrics table as the page draws them: at most so many points, each with its mean, minimum and maximum.

The answer is JSON text. It is written here rather than by `json`, because it has 100,000 numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge.ui.metric_table import Floats, TableRows


@dataclass(frozen=True, slots=True)
class Span:
    """Which part of a table is wanted, and in how many points.

    Attributes:
        first, last: steps; None for no bound.
        points: at most so many rows are returned.
        names: the metrics; None for all.
    """

    first: float | None = None
    last: float | None = None
    points: int = 600
    names: tuple[str, ...] | None = None


def encode_table(rows: TableRows, span: Span, **facts: Any) -> str:
    """Return the rows of a span as JSON, with `facts` beside them.

    Where a row stands for several steps, its step is the last of them; `columns` has means, `low` and `high` the
    smallest and largest numbers. The last row of a table always stands for itself: the page continues after it.
    """
    start, end = rows.between(span.first, span.last)
    starts = _pieces(start, end, span.points)
    last = np.r_[starts[1:], end] - 1 if end > start else np.zeros(0, np.int64)
    is_whole = len(starts) == end - start
    names = [name for name in (rows.columns if span.names is None else span.names) if name in rows.columns]
    columns: list[str] = []
    low: list[str] = []
    high: list[str] = []
    shown = []
    for name in names:
        values = rows.columns[name][start:end]
        if np.isnan(values).all():
            continue
        shown.append(name)
        if is_whole:
            columns.append(_numbers(values))
            continue
        mean, least, most = _reduce(values, starts - start)
        columns.append(_numbers(mean))
        low.append(_numbers(least))
        high.append(_numbers(most))
    keys = [json.dumps(name) for name in shown]
    pieces = {
        "numRows": str(len(rows)),
        "merged": str(rows.merged),
        "stride": str(max(1, -(-(end - start) // max(1, len(starts))))),
        "steps": json.dumps(rows.steps[last].tolist()),
        "times": json.dumps([round(each, 1) for each in rows.times[last].tolist()]),
        "tokens": json.dumps([int(each) for each in rows.tokens[last].tolist()]),
        "columns": _object(keys, columns),
        "low": _object(keys, low) if low else "null",
        "high": _object(keys, high) if high else "null",
        "nonfinite": json.dumps(_odd_steps(rows, names, last, (start, end))),
        **{name: json.dumps(value) for name, value in facts.items()},
    }
    return "{" + ",".join(f'"{name}":{text}' for name, text in pieces.items()) + "}"


def _pieces(start: int, end: int, points: int) -> NDArray[np.int64]:
    """Return where the pieces of rows begin that become one point each. The last row is a piece of its own."""
    count = end - start
    if count <= max(2, points):
        return np.arange(start, end)
    size = -(-(count - 1) // (max(2, points) - 1))
    starts: NDArray[np.int64] = np.r_[np.arange(start, end - 1, size), end - 1]
    return starts


def _reduce(values: Floats, starts: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
    known = ~np.isnan(values)
    count = np.add.reduceat(known, starts, dtype=np.int64)
    total = np.add.reduceat(np.where(known, values, 0).astype(np.float64), starts)
    least = np.minimum.reduceat(np.where(known, values, np.float32(np.inf)), starts)
    most = np.maximum.reduceat(np.where(known, values, np.float32(-np.inf)), starts)
    has = count > 0
    mean = np.where(has, total / np.maximum(count, 1), np.nan).astype(np.float32)
    return mean, np.where(has, least, np.float32(np.nan)), np.where(has, most, np.float32(np.nan))


def _numbers(values: Floats) -> str:
    """Return numbers as JSON with six digits, which is more than a screen shows; null for NaN."""
    return "[" + ",".join(["null" if each != each else f"{each:.6g}" for each in values.tolist()]) + "]"


def _object(keys: Sequence[str], texts: Sequence[str]) -> str:
    return "{" + ",".join(f"{key}:{text}" for key, text in zip(keys, texts, strict=True)) + "}"


def _odd_steps(
    rows: TableRows, names: Sequence[str], last: NDArray[np.int64], part: tuple[int, int]
) -> dict[str, list[int]]:
    """Return for each metric the steps of the returned rows that hold one at which it was NaN or infinite."""
    start, end = part
    if end <= start:
        return {}
    first, final = int(rows.steps[start]), int(rows.steps[end - 1])
    shown = rows.steps[last]

    def places(steps: Sequence[int]) -> Iterator[int]:
        inside = [step for step in steps if first <= step <= final]
        yield from sorted({int(shown[np.searchsorted(shown, step, "left")]) for step in inside})

    return {name: found for name in names if name in rows.odd and (found := list(places(rows.odd[name])))}
