"""Faults of a run that goes on: recorded in any process, bounded, and written with their tracebacks."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge.errors import ActorFailure
from forge.observe.fault_records import MAX_KEPT, MAX_LINES, FaultFile, FaultRecord, drain_faults, record_fault
from forge.runtime.serialization import as_remote, decode, encode


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    drain_faults()
    yield
    drain_faults()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def raised(depth: int = 0) -> Exception:
    try:
        raised(depth - 1) if depth else int("seven")
    except ValueError as error:
        return error
    raise AssertionError


def test_a_fault_has_its_traceback_and_where_it_was() -> None:
    record_fault("reward", raised(), where="reward even")
    (fault,) = drain_faults()
    assert (fault.kind, fault.where, fault.process) == ("reward", "reward even", "controller")
    assert fault.message == "ValueError: invalid literal for int() with base 10: 'seven'"
    assert 'int("seven")' in fault.traceback
    assert drain_faults() == []


def test_the_traceback_of_another_process_is_in_it() -> None:
    error = decode(encode(as_remote(raised())))
    record_fault("episode", error)
    (fault,) = drain_faults()
    assert "Remote traceback" in fault.traceback
    assert 'int("seven")' in fault.traceback


def test_errors_of_ours_say_what_happened_and_a_text_has_no_traceback() -> None:
    record_fault("group", ActorFailure("generator[1] died", path="x", repair="y"))
    record_fault("replica", "was lost", where="generator[1]", trace="its own")
    first, second = drain_faults()
    assert first.message == "ActorFailure: generator[1] died"
    assert (second.message, second.traceback) == ("was lost", "its own")


def test_a_flood_is_counted_and_not_kept() -> None:
    threads = [
        threading.Thread(target=lambda: [record_fault("reward", "x" * 9_000) for _ in range(100)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = drain_faults()
    assert len(found) == MAX_KEPT + 1
    assert (found[-1].message, found[-1].num_like) == (f"{400 - MAX_KEPT} more of this kind", 400 - MAX_KEPT)
    assert max(len(fault.message) for fault in found) < 3_000


def test_long_tracebacks_lose_their_middle() -> None:
    record_fault("x", "why", trace="begin" + "-" * 100_000 + "end")
    (fault,) = drain_faults()
    assert len(fault.traceback) < 13_000
    assert fault.traceback.startswith("begin-")
    assert fault.traceback.endswith("-end")


def test_the_file_has_a_line_for_each_and_few_tracebacks_of_the_same(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    file = FaultFile(path, is_resumed=False)
    file.write(3, [FaultRecord(1.0, "reward", "no", traceback="trace") for _ in range(5)])
    file.write(4, [FaultRecord(2.0, "replica", "\ud800 < é", where="generator[0]", process="controller")])
    file.close(4)
    lines = read(path)
    assert ["traceback" in line for line in lines] == [True, True, True, False, False, False]
    assert lines[5] == {
        "time": "1970-01-01T00:00:02.000+00:00", "step": 4, "kind": "replica", "where": "generator[0]",
        "process": "controller", "message": "\ud800 < é",
    }  # fmt: skip


def test_a_run_that_is_resumed_continues_the_file_and_another_one_moves_it(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    FaultFile(path, is_resumed=False).write(1, [FaultRecord(1.0, "a", "first")])
    FaultFile(path, is_resumed=True).write(2, [FaultRecord(1.0, "a", "second")])
    assert [line["message"] for line in read(path)] == ["first", "second"]
    FaultFile(path, is_resumed=False)
    assert not path.exists()
    assert len(read(tmp_path / "faults.discarded.jsonl")) == 2


def test_the_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    file = FaultFile(path, is_resumed=False, max_bytes=100_000)
    faults = [FaultRecord(1.0, "a", str(number), traceback="-" * 1_000) for number in range(MAX_LINES + 30)]
    file.write(1, faults)
    file.write(2, [FaultRecord(1.0, "a", "5 more", num_like=5)])
    file.close(2)
    lines = read(path)
    assert len(lines) == MAX_LINES + 1
    assert (lines[-1]["kind"], lines[-1]["num_like"]) == ("more", 35)
    assert 80 < sum("traceback" in line for line in lines) < 110


def test_a_disk_that_takes_nothing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    file = FaultFile(Path("/dev/full"), is_resumed=True)
    for step in range(3):
        file.write(step, [FaultRecord(1.0, "a", "b")])
    file.close(3)
    assert len(caplog.records) == 1
    assert "writing /dev/full failed; the run continues without it" in caplog.text


def test_a_fork_starts_without_those_of_its_parent() -> None:
    record_fault("a", "b")
    child = os.fork()
    if child == 0:
        os._exit(len(drain_faults()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(drain_faults()) == 1
