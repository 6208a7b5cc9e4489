"""The trace of a run as the server reads it: any part of it, while it grows, in bounded memory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from forge.observe.trace_file import TraceFile, encode_event, read_events
from forge.observe.tracing import ORIGIN_NS, Process, Span
from forge.ui.trace_index import TraceIndex
from forge.ui.trace_overview import NUM_SLICES, TraceOverview
from forge.ui.trace_spans import MAX_LANES, MAX_NAMES, Spans, TraceNames, depths
from forge.ui.trace_view import MAX_SPANS, Window, describe_trace, header_events, read_arguments, view_window

CONTROLLER, GENERATOR = Process("host", 10, "controller"), Process("host", 11, "generator[0]")


def made(name: str, start_s: float, length_s: float, *, process: Process = CONTROLLER, lane: str = "Task") -> Span:
    start = ORIGIN_NS + round(1e9 * start_s)
    return Span(name, start, start + round(1e9 * length_s), process, lane, {"step": 3, "odd": "<b>\ud800"})


def write(path: Path, spans: Sequence[Span], *, resume_step: int | None = None) -> None:
    with TraceFile(path, resume_step=resume_step) as file:
        file.write(spans)


def index_of(path: Path, **limits: int) -> TraceIndex:
    index = TraceIndex(path, **limits)
    while True:
        index.advance()
        if index.progress == 1.0:
            return index


def shown(index: TraceIndex, start: float, end: float, *, points: int = 1000) -> list[tuple[str, str, float, int]]:
    """Name, process, start and depth of the spans in a window."""
    view = view_window(index, Window(start, end, points), None)
    spans = view["spans"]
    lanes = [view["lanes"][lane][2] for lane in spans["lane"]]
    names = [view["names"][name] for name in spans["name"]]
    starts = [round(each / 1e6, 6) for each in spans["start"]]
    return sorted(zip(names, lanes, starts, spans["depth"], strict=True), key=lambda row: (row[2], row[3]))


def test_the_spans_of_a_window_have_their_rows_and_depths(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    nested = [made("save", 1.2, 0.2), made("write", 1.25, 0.05), made("write", 1.3, 0.1)]
    write(
        path, [made("wait", 0.5, 0.5), made("train", 1.0, 1.0), *nested, made("generate", 1.5, 3.0, process=GENERATOR)]
    )
    index = index_of(path)
    assert shown(index, 0, 5) == [
        ("wait", "controller", 0.5, 0), ("train", "controller", 1.0, 0), ("save", "controller", 1.2, 1),
        ("write", "controller", 1.25, 2), ("write", "controller", 1.3, 2), ("generate", "generator[0]", 1.5, 0),
    ]  # fmt: skip
    assert [row[0] for row in shown(index, 1.32, 1.33)] == ["train", "save", "write"]
    assert [row[3] for row in shown(index, 1.32, 1.33)] == [0, 1, 2], "as deep as in the whole trace"
    facts = describe_trace(index)
    assert (facts["first"], facts["end"]) == (0.5, 4.5)
    part = view_window(index, Window(2.0, 3.0), None)
    assert (part["first"], part["start"], part["end"]) == (0.5, 2.0, 4.5), "a part does not hide where the trace begins"
    assert facts["origin"] == pytest.approx(ORIGIN_NS / 1e9, abs=1e-3)
    assert [lane[2:] for lane in facts["lanes"]] == [["controller", "host", "Task"], ["generator[0]", "host", "Task"]]


def test_a_trace_that_grows_is_followed_and_one_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    index = TraceIndex(path)
    index.advance()
    assert (index.progress, index.num_spans) == (1.0, 0)
    file = TraceFile(path)
    for number in range(3):
        file.write([made("train", number, 0.5)])
        index.advance()
        assert index.num_spans == number + 1
    generation = index.generation
    file.close()
    with path.open("ab") as cut:
        cut.write(b',\n{"name":"cut","ph":"X","ts":1,"d')
    index.advance()
    assert (index.num_spans, index.generation) == (3, generation)
    write(path, [made("train", 9, 0.5)], resume_step=4)  # which repairs it
    index.advance()
    assert index.num_spans == 4
    write(path, [made("other", 1, 0.5)])  # a new run: another file
    index.advance()
    assert (index.num_spans, index.generation > generation) == (1, True)
    path.unlink()
    index.advance()
    assert index.num_spans == 0


def test_lines_that_are_no_spans_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, [made("good", 1, 1)])
    odd = [
        b'{"name":"no end","ph":"X","ts":1,"pid":1,"tid":1}', b"nonsense", b"", b"\xff\xfe", b"[" * 50_000,
        b'{"name":"late","ph":"X","ts":1e300,"dur":1,"pid":1,"tid":1}',
        b'{"name":"minus","ph":"X","ts":-5,"dur":1,"pid":1,"tid":1}',
        b'{"name":"text","ph":"X","ts":1.2.3,"dur":1e,"pid":1,"tid":1}',
        b'{"name":"process_name","ph":"M","pid":"x","tid":0,"args":[]}',
        b'{"name":"thread_name","ph":"M","pid":1,"tid":1,"args":' + b'{"a":' * 5_000 + b"}",
        b'{"name":"trace","ph":"M","pid":0,"tid":0,"args":{"origin_ns":"soon"}}',
        b'{"name":"\\u00e9\\"q","ph":"X","ts":5,"dur":1,"pid":77,"tid":3}',
    ]  # fmt: skip
    with path.open("ab") as file:
        file.write(b"".join(b",\n" + line for line in odd) + b"\n")
    index = index_of(path)
    names = [index.names.names[name] for name in index.spans_between(0, 1e15).name.tolist()]  # type: ignore[union-attr]
    assert sorted(names) == ["good", 'é"q']
    assert index.names.lanes[-1].process == "process 77"
    assert shown(index, 0, 10)[0][0] == 'é"q'


def test_a_wide_part_of_a_large_trace_is_an_overview_and_a_narrow_one_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    spans = [made("generate", 0.01 * number, 0.008, process=GENERATOR) for number in range(60_000)]
    spans += [made("train", 60 * number, 30) for number in range(10)]
    write(path, spans)
    index = index_of(path, max_exact=1 << 20)
    assert index.num_bytes < 8 << 20
    whole = view_window(index, Window(0, 600, 1000), None)
    assert whole["isCoarse"]
    marks = whole["marks"]
    by_lane: dict[int, list[float]] = {lane: [] for lane in set(marks["lane"])}
    for lane, share in zip(marks["lane"], marks["share"], strict=True):
        by_lane[lane].append(share)
    generator = next(number for number, lane in enumerate(whole["lanes"]) if lane[2] == "generator[0]")
    assert np.mean(by_lane[generator]) == pytest.approx(0.8, abs=0.02)
    totals = {(whole["lanes"][lane][2], whole["names"][name]): total for lane, name, total, *_ in whole["totals"]}
    assert totals["controller", "train"] == pytest.approx(300, rel=0.01)
    assert totals["generator[0]", "generate"] == pytest.approx(480, rel=0.01)
    narrow = view_window(index, Window(300, 301, 1000), None)
    assert not narrow["isCoarse"]
    assert len(narrow["spans"]["lane"]) == 102  # with the one that ends as the window begins, and the training
    assert narrow["marks"]["lane"] == []


def test_spans_that_are_too_narrow_to_be_seen_are_put_together(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, [made("tiny", 0.0005 * number, 0.0001) for number in range(20_000)] + [made("wide", 11, 2)])
    index = index_of(path)
    view = view_window(index, Window(0, 20, 100), None)
    assert [view["names"][name] for name in view["spans"]["name"]] == ["wide"]
    marks = view["marks"]
    assert sum(marks["count"]) == 20_000
    assert len(marks["lane"]) <= 51
    assert all(share == pytest.approx(0.2, abs=0.01) for share in marks["share"][:-1])
    totals = view["totals"]
    assert [(row[2], row[3], row[4]) for row in totals] == [(2.0, 20_000, 0.0001), (2.0, 1, 2.0)]


def test_answers_are_bounded_however_many_spans_there_are(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with path.open("wb") as file:
        file.write(b"[\n" + encode_event({"name": "trace", "ph": "M", "pid": 0, "tid": 0, "args": {"origin_ns": 1}}))
        for number in range(30_000):
            event = {
                "name": f"n{number % 5}",
                "ph": "X",
                "ts": number * 10,
                "dur": 9,
                "pid": number % 600 + 1,
                "tid": 1,
            }
            file.write(b",\n" + encode_event(event))
    index = index_of(path)
    view = view_window(index, Window(0, 0.3, 4000), None)
    assert len(view["spans"]["lane"]) + len(view["marks"]["lane"]) <= 30_000
    assert len(view["spans"]["lane"]) <= MAX_SPANS
    assert len(json.dumps(view)) < 8 << 20


def test_lanes_and_names_are_bounded() -> None:
    names = TraceNames()
    lines = [
        f'{{"name":"n{number}","ph":"X","ts":{number},"dur":1,"pid":{number},"tid":1}}'
        for number in range(max(MAX_LANES, MAX_NAMES) + 50)
    ]
    spans = names.read("\n".join(lines).encode(), offset=0)
    assert len(names.lanes) == MAX_LANES
    assert len(spans) == MAX_LANES
    assert len(names.names) == MAX_NAMES
    assert names.names[-1] == "others"


def test_blocks_are_bounded_and_still_find_what_is_in_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, [made("train", number, 0.5) for number in range(200)])
    index = index_of(path, block=256, max_blocks=16)
    assert len(index._blocks) <= 16
    assert [row[2] for row in shown(index, 100.1, 102.2)] == [100, 101, 102]


def test_the_arguments_of_a_span_are_read_from_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, [made("train", 1, 1)])
    index = index_of(path)
    (offset,) = view_window(index, Window(0, 3), None)["spans"]["offset"]
    found = read_arguments(index, offset)
    assert found is not None
    assert (found["name"], found["args"]["step"]) == ("train", 3)
    for wrong in (0, 1, offset + 1, 1 << 40):
        assert read_arguments(index, wrong) is None


def test_a_part_is_a_trace_that_can_be_opened_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, [made("train", number, 0.5) for number in range(10)] + [made("generate", 5, 1, process=GENERATOR)])
    index = index_of(path)
    data = header_events(index) + b"".join(index.lines_between(4.6e6, 6.1e6)) + b"\n]\n"
    events = json.loads(data.decode("utf-8", "replace"))
    spans = [(event["name"], event["ts"] / 1e6) for event in events if event["ph"] == "X"]
    assert spans == [("train", pytest.approx(5.0)), ("train", pytest.approx(6.0)), ("generate", pytest.approx(5.0))]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "controller",
        "generator[0]",
    }
    assert len(read_events(data)[0]) == len(events)


def test_files_that_are_no_files_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    write(secret, [made("secret", 1, 1)])
    path = tmp_path / "run" / "trace.json"
    path.parent.mkdir()
    path.symlink_to(secret)
    index = index_of(path)
    assert index.num_spans == 0
    path.unlink()
    os.mkfifo(path)
    index.advance()
    assert (index.num_spans, index.line_at(0), index.spans_between(0, 1e12)) == (0, None, index.spans_between(0, 1))


@pytest.mark.parametrize("end_us", [900.0, 5e4, 3e7, 1e12])
def test_the_overview_loses_nothing_of_the_time(end_us: float) -> None:
    rng = np.random.default_rng(5)
    start = np.sort(rng.uniform(0, 0.9 * end_us, 400))
    length = rng.uniform(0, 0.1 * end_us, 400)
    lane, name = rng.integers(0, 3, 400), rng.integers(0, 4, 400)
    spans = Spans(start, length, lane, name, np.arange(400))
    overview = TraceOverview()
    for rows in np.array_split(np.arange(400), 7):
        overview.add(spans.where(rows))
    totals = {(one, other): total for one, other, total in overview.totals(0, NUM_SLICES * overview.slice_us)}
    for key in totals:
        mine = (lane == key[0]) & (name == key[1])
        assert totals[key] == pytest.approx(length[mine].sum(), rel=1e-3)
    busy = overview.between(0, end_us, points=50)
    assert busy.share.max() <= 1.0
    assert len(busy.lane) <= 3 * 101


def test_depths_are_those_of_a_stack() -> None:
    rng = np.random.default_rng(3)
    rows: list[tuple[float, float, int]] = []

    def fill(start: float, end: float, depth: int) -> None:
        rows.append((start, end - start, depth))
        cuts = np.sort(rng.uniform(start, end, 2 * rng.integers(0, 4))) if depth < 5 else np.zeros(0)
        for low, high in zip(cuts[::2], cuts[1::2], strict=True):
            fill(low, high, depth + 1)

    for number in range(20):
        fill(float(number), number + 0.9, 0)
    order = rng.permutation(len(rows))
    start, length, expected = (np.array([rows[place][column] for place in order]) for column in range(3))
    zeros = np.zeros(len(rows), np.int64)
    assert depths(Spans(start, length, zeros, zeros, zeros)).tolist() == expected.tolist()


@pytest.mark.parametrize("max_exact", [1, 1 << 20], ids=["overview", "spans"])
def test_a_window_may_end_at_the_largest_number(tmp_path: Path, max_exact: int) -> None:
    write(tmp_path / "trace.json", [made("wait", 0.5, 0.5), made("train", 1.0, 1.0)])
    view = view_window(index_of(tmp_path / "trace.json", max_exact=max_exact), Window(0.0, 1e308), None)
    assert view["isCoarse"] is (max_exact == 1)
    assert view["names"] == ["wait", "train"]
