"""The trace as a file: what viewers find in it, during the run and after any end of it."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.observe import Span, TraceFile
from forge.observe.trace_file import read_events
from forge.observe.tracing import ORIGIN_NS, Process

HERE = Process("box", 4711, "controller")
RANK = Process("box", 4712, "policy[0]")


def make(number: int, *, process: Process = HERE, lane: str = "Task", **args: Any) -> Span:
    start_ns = ORIGIN_NS + 1000 * number
    return Span(f"span {number}", start_ns, start_ns + 500, process, lane, args or None)


def events(path: Path) -> list[dict[str, Any]]:
    """What a strict reader finds."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found: list[dict[str, Any]] = json.loads(path.read_bytes(), parse_constant=refuse)
    return found


def names_of_open(path: Path) -> list[str]:
    """What a viewer finds that accepts an array without its closing bracket, and a last event that is cut off."""
    return [event["name"] for event in read_events(path.read_bytes())[0] if event["ph"] == "X"]


def names(path: Path) -> list[str]:
    return [event["name"] for event in events(path) if event["ph"] == "X"]


def test_processes_and_lanes_have_rows_with_their_names(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    with TraceFile(path) as file:
        file.write([make(1, n=8, text="ä\ud800"), make(2, process=RANK, lane="engine"), make(3, lane="Task 2")])
        file.write([make(4, process=RANK, lane="engine")])
    found = events(path)
    rows = {(e["name"], e["pid"], e["tid"]): e["args"] for e in found if e["ph"] == "M"}
    assert rows["process_name", 4711, 0]["name"] == "controller"
    assert rows["process_name", 4712, 0]["name"] == "policy[0]"
    assert rows["thread_name", 4711, 1] == {"name": "Task"}
    assert rows["thread_name", 4711, 2] == {"name": "Task 2"}
    assert rows["thread_name", 4712, 1] == {"name": "engine"}
    assert rows["process_sort_index", 4712, 0] == {"sort_index": 2}
    spans = [event for event in found if event["ph"] == "X"]
    assert spans[0] == {
        "name": "span 1",
        "ph": "X",
        "ts": 1.0,
        "dur": 0.5,
        "pid": 4711,
        "tid": 1,
        "args": {"n": 8, "text": "ä\ud800"},
    }
    assert [(span["pid"], span["tid"], span["ts"]) for span in spans[1:]] == [(4712, 1, 2), (4711, 2, 3), (4712, 1, 4)]
    assert len([event for event in found if event["name"] == "process_name"]) == 2, "each is named once"


def test_every_write_can_be_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path)
    num = 0
    for count in (1, 40, 3000, 0, 2):
        file.write([make(num + each, process=RANK, detail="x" * 60) for each in range(count)])
        num += count
        assert names_of_open(path) == [f"span {number}" for number in range(num)]
    file.close()
    file.close()
    assert names(path) == [f"span {number}" for number in range(num)]
    assert [child.name for child in tmp_path.iterdir()] == ["trace.json"]
    with pytest.raises(ValueError, match="closed"):
        file.write([make(1)])


WRITER = """
import sys
from forge.observe import Span, TraceFile
from forge.observe.trace_file import read_events
from forge.observe.tracing import ORIGIN_NS, Process
file = TraceFile(sys.argv[1])
process, num = Process("box", 1, "controller"), 0
while True:
    file.write([Span(f"span {num + each}", ORIGIN_NS + num, ORIGIN_NS + num + 1, process, "Task", {"x": "y" * 150})
                for each in range(97)])
    num += 97
    print(num, flush=True)
"""


def test_kill_9_loses_nothing_that_was_written(tmp_path: Path) -> None:
    paths = [tmp_path / f"trace_{number}.json" for number in range(3)]
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) for path in paths
    ]
    for writer, path, num_writes in zip(writers, paths, (1, 30, 80), strict=True):
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(num_writes)]
        writer.send_signal(signal.SIGKILL)
        writer.stdout.close()
        assert writer.wait(timeout=600) == -signal.SIGKILL
        found = names_of_open(path)
        assert len(found) >= told[-1], "what was written is there"
        assert found == [f"span {number}" for number in range(len(found))]


def test_a_resumed_run_goes_on_in_the_same_rows_and_on_the_same_clock(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceFile(path) as file:
        file.write([make(1), make(2, process=RANK, lane="engine")])
    text = path.read_text().replace(str(ORIGIN_NS), str(ORIGIN_NS - 7_000_000))
    path.write_text(text)  # the first part of the run began 7 ms earlier
    successor = Process("box", 4712, "policy[0] again")
    with TraceFile(path, resume_step=3) as file:
        file.write([make(3), make(4, process=successor), make(5, process=RANK, lane="engine")])
    found = events(path)
    spans = {event["name"]: event for event in found if event["ph"] == "X"}
    assert list(spans) == [f"span {number}" for number in range(1, 6)]
    assert spans["span 3"]["ts"] == 7003.0
    assert (spans["span 3"]["pid"], spans["span 3"]["tid"]) == (4711, 1)
    assert (spans["span 5"]["pid"], spans["span 5"]["tid"]) == (4712, 1)
    assert spans["span 4"]["pid"] not in (4711, 4712), "another process that happens to have the same number"
    assert len([event for event in found if event["name"] == "trace"]) == 1


@pytest.mark.parametrize("cut", ["", ",\n", ',\n{"name":"span 2","ph', "     \n]\n"])
def test_a_resumed_run_reads_what_a_kill_has_left(tmp_path: Path, cut: str) -> None:
    """Also the spaces with which earlier releases kept the array whole."""
    path = tmp_path / "trace.json"
    TraceFile(path).write([make(1)])  # never closed
    path.write_text(path.read_text() + cut)
    with TraceFile(path, resume_step=1) as file:
        file.write([make(2)])
    assert names(path) == ["span 1", "span 2"]


def test_a_new_run_puts_an_old_trace_aside(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceFile(path) as file:
        file.write([make(1)])
    with TraceFile(path) as file:
        file.write([make(2)])
    assert names(path) == ["span 2"]
    assert names(tmp_path / "trace.discarded.json") == ["span 1"]


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", '[{"name": "x", "ph": "X"}]', "[1]"])
def test_a_file_that_is_no_trace_is_put_aside(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "forge.observe"), TraceFile(path, resume_step=1) as file:
        file.write([make(1)])
    assert names(path) == ["span 1"]
    assert (tmp_path / "trace.discarded.json").read_text() == text
    assert "is not a trace of ours" in caplog.text


def test_odd_spans_do_not_spoil_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    odd = Span('na"me\n' + "😀" * 3000, ORIGIN_NS - 5, ORIGIN_NS - 9, HERE, "lane" * 2000, {"x" * 3000: "y" * 9000})
    with TraceFile(path) as file:
        file.write([make(1, value=math.inf, nothing=None), odd, make(2)])
    found = [event for event in events(path) if event["ph"] == "X"]
    assert found[0]["args"] == {"value": "inf", "nothing": None}
    assert (found[1]["ts"], found[1]["dur"]) == (0, 0)
    assert found[1]["name"].startswith('na"me\n😀')
    assert found[2]["name"] == "span 2"


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TraceFile(tmp_path / "trace.json")
    file.write([make(0)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with caplog.at_level(logging.WARNING, "forge.observe"):
            for number in range(2):
                file.write([make(each, text="x" * 190) for each in range(number, number + 2000)])
            file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(file.failure, OSError)
    assert caplog.text.count("continues without it") == 1
    assert names_of_open(file.path) == ["span 0"]


def test_a_place_that_cannot_be_had_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        TraceFile(tmp_path / "file" / "trace.json")
    assert os.listdir(tmp_path) == ["file"]
