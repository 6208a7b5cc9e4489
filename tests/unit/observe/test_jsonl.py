"""A metrics file is strict JSON, and in order again after whatever happened to the run before."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.errors import DataError
from forge.observe import JsonlSink, MetricsLine, read_jsonl


def refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def strict(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=refuse_constant) for line in path.read_text("utf-8").splitlines()]


def filled(path: Path, steps: range) -> bytes:
    sink = JsonlSink(path, clock=lambda: 7.5)
    for step in steps:
        sink.write(step, {"train/loss": step / 4})
    sink.close()
    return path.read_bytes()


def test_a_line_has_step_time_and_values(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, clock=lambda: 12.5)
    sink.write(3, {"train/loss": 2.45, "train/epoch": 1, "note": 'a "word"\nand ü'})
    sink.close()
    values = {"train/loss": 2.45, "train/epoch": 1, "note": 'a "word"\nand ü'}
    assert strict(path) == [{"step": 3, "time": 12.5, "values": values}]


def test_what_is_not_finite_is_null_and_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, clock=lambda: 0.0)
    sink.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    sink.close()
    (line,) = strict(path)
    assert line["values"] == {"a": None, "b": None, "c": None, "d": 1.0}
    assert line["nonfinite"] == {"a": "nan", "b": "inf", "c": "-inf"}
    (read,) = read_jsonl(path)
    assert math.isnan(float(read.values["a"]))
    assert {name: read.values[name] for name in "bcd"} == {"b": math.inf, "c": -math.inf, "d": 1.0}


def test_text_that_cannot_be_encoded_is_still_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"note": "half \ud800"})
    sink.close()
    assert strict(path)[0]["values"] == {"note": "half \ud800"}


def test_later_lines_are_put_aside_and_not_lost(tmp_path: Path) -> None:
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.discarded.jsonl"
    before = filled(path, range(1, 7)).splitlines(keepends=True)
    JsonlSink(path, resume_step=4).close()
    assert path.read_bytes().splitlines(keepends=True) == before[:4]
    assert aside.read_bytes().splitlines(keepends=True) == before[4:]
    JsonlSink(path, resume_step=2).close()
    assert aside.read_bytes().splitlines(keepends=True) == before[4:] + before[2:4]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["metrics.discarded.jsonl", "metrics.jsonl"]


def test_a_file_in_order_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = filled(path, range(1, 4))
    inode = path.stat().st_ino
    JsonlSink(path, resume_step=3).close()
    assert (path.read_bytes(), path.stat().st_ino) == (before, inode)
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_line_cut_off_anywhere_is_repaired(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = filled(path, range(1, 4))
    last = len(whole.splitlines(keepends=True)[-1])
    assert last < 60
    path.write_bytes(whole[:-cut])
    sink = JsonlSink(path, resume_step=3, clock=lambda: 0.0)
    sink.write(4, {})
    sink.close()
    lines_left = 3 - (cut > 1) - (cut > last + 1)
    assert [line["step"] for line in strict(path)] == [*range(1, lines_left + 1), 4]


def test_a_reader_leaves_out_a_line_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = filled(path, range(1, 3))
    path.write_bytes(whole + b'{"step": 3, "ti')
    assert list(read_jsonl(path)) == [MetricsLine(step, 7.5, {"train/loss": step / 4}) for step in (1, 2)]


@pytest.mark.parametrize("line", [b"not json", b"[1]", b'{"step": "x", "time": 1, "values": {}}', b'{"step": 1}'])
def test_a_file_that_is_not_ours_is_named_and_not_touched(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    content = filled(path, range(1, 3)) + line + b"\n"
    path.write_bytes(content)
    for attempt in (lambda: JsonlSink(path, resume_step=1), lambda: list(read_jsonl(path))):
        with pytest.raises(DataError) as caught:
            attempt()
        assert caught.value.path == f"{path}:3"
        assert caught.value.value == line.decode()
        assert caught.value.rule == "each line but the last is a JSON object with step, time and values"
        assert caught.value.repair == "remove that line, or move the file away"
    assert path.read_bytes() == content
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the kernel writes what fits, then refuses."""
    path = tmp_path / "metrics.jsonl"
    program = """
import resource, signal, sys
from forge.observe import JsonlSink
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sink = JsonlSink(sys.argv[1])
sink.write(1, {"a": 1.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (80, 80))
try:
    sink.write(2, {"a": 1.0})
except OSError as error:
    print("REFUSED", error)
"""
    ran = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=600, check=True)
    assert "REFUSED" in ran.stdout
    assert [line["step"] for line in strict(path)] == [1]


def test_a_killed_run_has_everything_that_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = """
import os, signal, sys
from forge.observe import JsonlSink
sink = JsonlSink(sys.argv[1])
for step in range(1, 4):
    sink.write(step, {"a": 1.0})
os.kill(os.getpid(), signal.SIGKILL)
"""
    ran = subprocess.run([sys.executable, "-c", program, path], timeout=600, check=False)
    assert ran.returncode == -signal.SIGKILL
    assert [line["step"] for line in strict(path)] == [1, 2, 3]
