"""Rows for the page: at most so many points, and nothing of the curve lost between them."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest

from forge.observe.jsonl import MetricsLine
from forge.ui.decimation import Span, encode_table
from forge.ui.metric_table import MetricTable


def table_of(values: list[float | None], *, first: int = 1) -> MetricTable:
    table = MetricTable()
    table.add(
        MetricsLine(step, 100.0 + step, {"other": 1.0} if value is None else {"a": value, "other": 1.0})
        for step, value in enumerate(values, start=first)
    )
    return table


def encoded(table: MetricTable, span: Span) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode_table(table.rows(), span), parse_constant=lambda word: pytest.fail(word))
    return found


def test_few_rows_are_sent_as_they_are() -> None:
    found = encoded(table_of([1.0, None, 3.25]), Span())
    assert found["steps"] == [1, 2, 3]
    assert found["times"] == [101.0, 102.0, 103.0]
    assert found["columns"] == {"a": [1, None, 3.25], "other": [1, 1, 1]}
    assert (found["low"], found["high"], found["stride"], found["numRows"]) == (None, None, 1, 3)


@pytest.mark.parametrize("count", [9, 10, 11, 12, 99, 100, 101, 1234])
def test_many_rows_keep_their_mean_their_extremes_and_the_last_one(count: int) -> None:
    chance = random.Random(count)
    values = [round(chance.gauss(0, 1), 3) for _ in range(count)]
    found = encoded(table_of(list(values)), Span(points=10))
    assert len(found["steps"]) <= 10
    assert found["steps"][-1] == count
    assert found["columns"]["a"][-1] == values[-1]
    ends = [0, *found["steps"]]
    for at, (start, end) in enumerate(itertools.pairwise(ends)):
        part = values[start:end]
        assert found["columns"]["a"][at] == pytest.approx(math.fsum(part) / len(part), abs=1e-5)
        if count > 10:
            assert (found["low"]["a"][at], found["high"]["a"][at]) == (min(part), max(part))


def test_gaps_do_not_count_and_an_empty_metric_is_left_out() -> None:
    table = table_of([1.0, None, None, 3.0, None, None, None, None, 8.0])
    found = encoded(table, Span(points=3))
    assert found["steps"] == [4, 8, 9]
    assert found["columns"]["a"] == [2, None, 8]
    assert "a" not in encoded(table, Span(first=5, last=8))["columns"]


def test_a_part_of_the_run_has_its_own_detail() -> None:
    table = table_of([float(value) for value in range(1000)], first=1)
    found = encoded(table, Span(first=101, last=110, points=50, names=("a", "none")))
    assert found["steps"] == list(range(101, 111))
    assert found["columns"] == {"a": [float(value) for value in range(100, 110)]}
    assert encoded(table, Span(first=5000))["steps"] == []
    assert encoded(MetricTable(), Span())["steps"] == []


def test_nan_is_shown_at_the_row_that_holds_its_step() -> None:
    values: list[float | None] = [1.0] * 100
    values[41] = math.nan
    found = encoded(table_of(values), Span(points=11))
    assert found["nonfinite"] == {"a": [50]}
    assert found["steps"][4] == 50
    assert encoded(table_of(values), Span(first=60))["nonfinite"] == {}


def test_names_are_escaped_and_numbers_are_short() -> None:
    table = MetricTable()
    table.add([MetricsLine(1, 0.0, {'a"\n</script>': 1 / 3})])
    found = encoded(table, Span())
    assert found["columns"] == {'a"\n</script>': [0.333333]}
