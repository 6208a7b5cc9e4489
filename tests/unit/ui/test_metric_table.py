"""The table of metrics: what it takes, what it leaves out, and how it stays small."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from forge.observe.jsonl import MetricsLine
from forge.ui.metric_table import MAX_ODD, MetricTable


def line(step: int, values: Mapping[str, float | str | bool], time: float = 0.0) -> MetricsLine:
    return MetricsLine(step, time, values)


def column(table: MetricTable, name: str) -> list[float | None]:
    return [None if math.isnan(value) else value for value in table.rows().columns[name].tolist()]


def test_lines_of_a_step_are_one_row_and_gaps_are_kept() -> None:
    table = MetricTable()
    table.add(
        [line(1, {"a": 1.0}, 10.0), line(1, {"b": 2.0}, 11.0), line(3, {"a": 3.0, "note": "text", "flag": True}, 12)]
    )
    rows = table.rows()
    assert rows.steps.tolist() == [1, 3]
    assert rows.times.tolist() == [10.0, 12.0]  # an evaluation's line comes later than its step
    assert column(table, "a") == [1.0, 3.0]
    assert column(table, "b") == [2.0, None]
    assert column(table, "flag") == [None, 1.0]
    assert "note" not in rows.columns


def test_it_grows_without_changing_what_was_read() -> None:
    table = MetricTable()
    table.add([line(1, {"a": 1.0})])
    before = table.rows()
    table.add([line(step, {"a": float(step)}) for step in range(2, 3000)])
    assert len(before) == 1
    assert column(table, "a") == [float(step) for step in range(1, 3000)]
    assert table.rows().generation == before.generation


def test_numbers_that_are_not_finite_are_remembered_by_step() -> None:
    table = MetricTable()
    odd = [math.nan, math.inf, -math.inf, 1e300]
    table.add([line(step, {"a": value}) for step, value in enumerate([1.0, *odd])])
    assert column(table, "a") == [1.0, None, None, None, None]
    assert table.rows().odd == {"a": (1, 2, 3, 4)}
    table.add([line(step, {"a": math.nan}) for step in range(10, 10 + 2 * MAX_ODD)])
    assert len(table.rows().odd["a"]) == MAX_ODD


def test_steps_out_of_order_are_put_in_order_and_later_numbers_win() -> None:
    table = MetricTable()
    table.add([line(5, {"a": 5.0, "b": 1.0}), line(2, {"a": 2.0}), line(5, {"a": 50.0}), line(9, {"a": 9.0})])
    assert table.rows().steps.tolist() == [2, 5, 9]
    assert column(table, "a") == [2.0, 50.0, 9.0]
    assert column(table, "b") == [None, 1.0, None]
    assert table.generation == 1  # rows that somebody has read are other rows now
    table.add([line(9, {"b": 3.0})])
    assert column(table, "b") == [None, 1.0, 3.0]


def test_tokens_are_summed() -> None:
    table = MetricTable()
    table.add([line(step, {"train/num_tokens": 100.0 * step}) for step in (1, 2, 3)])
    table.add([line(3, {"evaluation/reward": 1.0}), line(4, {"train/loss": 1.0})])
    assert table.rows().tokens.tolist() == [100.0, 300.0, 600.0, 600.0]


def test_its_size_is_bounded_by_merging_pairs() -> None:
    table = MetricTable(max_cells=7 * 1000)
    table.add([line(step, {"a": float(step % 2), "train/num_tokens": 1.0}, float(step)) for step in range(1, 5001)])
    rows = table.rows()
    assert 400 < len(rows) <= 1000
    assert rows.merged == 8
    assert rows.generation > 0
    assert rows.steps[-1] == 5000  # the last row stays as it is
    assert rows.tokens[-1] == 5000
    assert np.all(np.diff(rows.steps) > 0)
    assert set(rows.columns["a"][:-8].tolist()) == {0.5}
    table.add([line(5001, {"a": 7.0})])
    assert column(table, "a")[-1] == 7.0


def test_what_is_missing_is_not_counted_when_pairs_are_merged() -> None:
    table = MetricTable(max_cells=8 * 5)
    values: list[dict[str, float]] = [{"a": 1.0}, {"a": 3.0}, {"b": 4.0}, {"a": 6.0}, {"b": 7.0}, {"a": 8.0}]
    table.add([line(step, each) for step, each in enumerate(values)])
    assert table.rows().steps.tolist() == [1, 3, 4, 5]
    assert column(table, "a") == [2.0, 6.0, None, 8.0]
    assert column(table, "b") == [None, 4.0, 7.0, None]


@pytest.mark.parametrize(("step", "time"), [(-1, 0.0), (1 << 60, 0.0), (1, math.inf), (1, math.nan)])
def test_places_that_no_run_has_are_left_out(step: int, time: float) -> None:
    table = MetricTable()
    table.add([line(step, {"a": 1.0}, time)])
    assert len(table) == 0


def test_too_many_metrics_are_refused_and_counted() -> None:
    table = MetricTable()
    table.add([line(1, {f"m{number}": 1.0 for number in range(4100)})])
    assert (len(table.rows().columns), table.num_refused) == (4000, 100)


def test_clear_begins_another_generation() -> None:
    table = MetricTable()
    table.add([line(1, {"a": 1.0})])
    table.clear()
    assert (len(table), table.generation, dict(table.rows().columns)) == (0, 1, {})


def memory(table: MetricTable) -> int:
    """How many numbers of 4 bytes it has room for."""
    return table._capacity * (len(table._columns) + 6)


@pytest.mark.parametrize("wide", [0, 2000, 3999])
@pytest.mark.parametrize("are_steps_repeated", [False, True])
def test_the_memory_is_bounded_while_lines_come_too(
    monkeypatch: pytest.MonkeyPatch, wide: int, are_steps_repeated: bool
) -> None:
    """A few lines have many metrics, thousands have none: in one block of a file."""
    monkeypatch.setattr("forge.ui.metric_table._SLACK", 100_000)
    table, most = MetricTable(max_cells=100_000), 0
    lines = [line(step % 2 if are_steps_repeated else step, {"a": 1.0}) for step in range(4000)]
    lines[wide] = line(lines[wide].step, {f"m{number}": 1.0 for number in range(500)})

    def watched() -> Iterator[MetricsLine]:
        nonlocal most
        for each in lines:
            yield each
            most = max(most, memory(table))

    table.add(watched())
    assert most < 4 * 200_000
    assert memory(table) < 4 * 100_000
    assert table.rows().steps[-1] == (1 if are_steps_repeated else 3999)
    if are_steps_repeated:  # the room for rows that are gone is not given to new metrics
        table.add([line(1, {f"n{number}": 1.0 for number in range(1000)})])
        assert memory(table) < 4 * 200_000
