"""Following a metrics file: appended, cut off, replaced, large, and not one of ours."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from forge.observe.jsonl import JsonlSink
from forge.ui.live_run import LiveRun
from forge.ui.metric_table import MetricTable
from forge.ui.metric_tail import BLOCK, MetricTail, sample_lines, sample_table


def text_line(step: int, **values: float) -> str:
    return json.dumps({"step": step, "time": float(step), "values": values}) + "\n"


def tail_of(path: Path) -> MetricTail:
    return MetricTail(path, MetricTable())


def steps(tail: MetricTail) -> list[int]:
    return [int(step) for step in tail.table.rows().steps]


def drain(tail: MetricTail) -> None:
    tail.advance()
    while not tail.is_complete:
        tail.advance()


def test_it_follows_what_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = tail_of(path)
    assert tail.advance() is False
    sink = JsonlSink(path)
    sink.write(1, {"a": 1.0})
    assert tail.advance() is True
    assert tail.advance() is False
    sink.write(2, {"a": 2.0})
    sink.write(3, {"a": 3.0})
    sink.close()
    drain(tail)
    assert steps(tail) == [1, 2, 3]
    assert tail.table.generation == 1


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = text_line(2, a=2.0)
    path.write_text(text_line(1, a=1.0) + whole[:10])
    tail = tail_of(path)
    drain(tail)
    assert (steps(tail), tail.is_complete, tail.num_unreadable) == ([1], True, 0)
    with path.open("a") as file:
        file.write(whole[10:])
    drain(tail)
    assert steps(tail) == [1, 2]


@pytest.mark.parametrize(
    "by", ["a resume", "a resume that is further already", "a shorter file in place", "another file in place"]
)
def test_a_file_that_is_replaced_is_read_anew(tmp_path: Path, by: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(text_line(step, a=1.0) for step in range(1, 10)))
    tail = tail_of(path)
    drain(tail)
    before = tail.table.generation
    if by.startswith("a resume"):
        expected = [1, 2, 3, 4, *range(6, 8 if by == "a resume" else 30)]
        sink = JsonlSink(path, resume_step=4)
        for step in expected[4:]:
            sink.write(step, {"a": 5.0})
        sink.close()
    else:
        count = 3 if by == "a shorter file in place" else 40
        with path.open("r+") as file:
            file.truncate(0)
            file.write("".join(text_line(100 + step, b=2.0) for step in range(count)))
        expected = [100 + step for step in range(count)]
    drain(tail)
    assert steps(tail) == expected
    assert tail.table.generation > before


def test_a_file_that_goes_away_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text_line(1, a=1.0))
    tail = tail_of(path)
    drain(tail)
    path.unlink()
    assert tail.advance() is True
    assert steps(tail) == []
    path.write_text(text_line(7, a=1.0))
    drain(tail)
    assert steps(tail) == [7]


def test_lines_that_are_not_ours_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = [
        '{"step": "1"}',
        "[]",
        "nonsense",
        '{"step": 1, "time": 1, "values": {}, "nonfinite": {"a": []}}',
        "[" * 9000,
    ]
    path.write_text(text_line(1, a=1.0) + "\n".join(odd) + "\n" + text_line(2, a=2.0))
    tail = tail_of(path)
    drain(tail)
    assert (steps(tail), tail.num_unreadable) == ([1, 2], len(odd))


def test_a_line_longer_than_a_block_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text_line(1, a=1.0) + "x" * (2 * BLOCK + 100) + "\n" + text_line(2, a=2.0))
    tail = tail_of(path)
    drain(tail)
    assert steps(tail) == [1, 2]
    assert tail.num_unreadable >= 1


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_not_a_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "metrics.jsonl"
    (tmp_path / "secret").write_text(text_line(1, a=1.0))
    {"link": lambda: path.symlink_to(tmp_path / "secret"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[
        kind
    ]()
    tail = tail_of(path)
    assert tail.advance() is False
    assert steps(tail) == []
    assert sample_lines(path, 4) == []


def test_a_sample_has_the_first_and_the_last_lines_and_some_from_all_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(text_line(step, a=float(step), padding=0.5) for step in range(1, 30_001)))
    found = [int(step) for step in sample_table(path).rows().steps]
    assert found[0] == 1
    assert found[-1] == 30_000
    assert found == sorted(set(found))
    spaces = [after - before for before, after in itertools.pairwise(found)]
    assert len(found) > 380
    assert max(spaces) < 2.5 * 30_000 / 400


def test_a_large_file_is_shown_before_all_of_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    num_steps = 120_000
    path.write_text("".join(text_line(step, **{"train/loss": 1.0}) for step in range(1, num_steps + 1)))
    assert path.stat().st_size > BLOCK
    run = LiveRun(tmp_path)
    assert run.advance() is True
    assert run.is_partial
    assert run.table_id == -1
    rows = run.rows()
    assert 300 < len(rows) < 3000
    assert (int(rows.steps[0]), int(rows.steps[-1])) == (1, num_steps)
    while run.advance():
        pass
    assert not run.is_partial
    assert len(run.rows()) == num_steps
    assert run.table_id != -1
