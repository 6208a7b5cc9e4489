"""The bound of `system.jsonl`: what is kept of a long run, and what a kill, a full disk or a reader can do to it."""

from __future__ import annotations

import asyncio
import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest

from forge.config.record import ObserveConfig
from forge.loops.observing import RunObserver
from forge.observe.jsonl import JsonlSink, read_jsonl
from forge.observe.process_status import ProcessStatus
from forge.observe.system_log import SystemLog
from forge.observe.thinning import spread, thin_file
from forge.observe.tracing import Process
from forge.ui.metric_table import MetricTable
from forge.ui.metric_tail import BLOCK, MetricTail

MAX_BYTES = 1 << 15
STATUS = ProcessStatus(Process("one", 1, "trainer"), 1.0, gauges={"queue/reward": 0.0, "calls/reward": 1.0})


def filled(path: Path, num_lines: int, *, width: int = 60) -> None:
    sink = JsonlSink(path, resume_step=1 << 40, clock=itertools.count().__next__)
    for step in range(num_lines):
        sink.write(step, {"x" * width: float(step)})
    sink.close()


def steps_of(path: Path) -> list[int]:
    return [line.step for line in read_jsonl(path)]


def test_all_of_a_long_history_is_kept_evenly_and_the_newest_lines_as_they_are(tmp_path: Path) -> None:
    path, num_lines = tmp_path / "system.jsonl", 20_000
    sink = JsonlSink(path, clock=itertools.count().__next__)
    num_thinned = 0
    for step in range(num_lines):
        sink.write(step, {"x" * 60: 1.0})
        if sink.size > MAX_BYTES:
            thin_file(path, MAX_BYTES)
            sink.reopen()
            num_thinned += 1
            assert MAX_BYTES * 3 // 8 < sink.size <= MAX_BYTES // 2
    sink.close()
    steps = steps_of(path)
    assert num_thinned > 50
    assert path.stat().st_size <= MAX_BYTES
    assert (steps[0], steps[-1]) == (0, num_lines - 1)
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    num_newest = len(list(itertools.takewhile(lambda gap: gap == 1, reversed(gaps))))
    older = [gap for gap in gaps[: len(gaps) - num_newest] if gap > 1]
    assert num_newest * 100 > MAX_BYTES // 5
    assert max(older) < 4 * num_lines / len(older)


@pytest.mark.parametrize(
    "times",
    [[5.0] * 99, [0.0, 1e300, -1e300] * 33, [math.nan, math.inf, 1.0] * 33, list(range(99, 0, -1)), [0.0, 1e17] * 40],
)
def test_clocks_that_stand_still_or_jump_do_not_break_the_bound(times: list[float]) -> None:
    lines = [(time, place, 10) for place, time in enumerate(times)]
    kept = spread(lines, 200)
    assert len(kept) <= 20
    assert kept == sorted(kept, key=lambda line: line[1])
    assert set(kept) <= set(lines)
    assert spread([], 10) == []


def test_the_log_of_a_run_stays_within_its_bound_also_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "system.jsonl"
    num_lines = 0
    for _ in range(4):
        log = SystemLog(path, interval_s=0, max_bytes=MAX_BYTES)
        for step in range(600):
            log.write(step, [STATUS])
            log.thin()
            assert not log.is_full
        log.close()
        num_lines += 600
        discarded = tmp_path / "system.discarded.jsonl"
        assert path.stat().st_size <= MAX_BYTES
        assert not discarded.exists() or discarded.stat().st_size <= MAX_BYTES
    assert sorted(each.name for each in tmp_path.iterdir()) == ["system.discarded.jsonl", "system.jsonl"]
    assert len(steps_of(path)) < 600
    assert steps_of(path)[-1] == 599


def test_a_run_keeps_to_the_bound_of_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "system.jsonl"
    filled(path, 9_000, width=100)
    assert path.stat().st_size > 1 << 20
    config = ObserveConfig(trace=False, system_interval_s=0, system_max_mb=1)
    observer = RunObserver(tmp_path, config, resume_step=10_000)
    asyncio.run(observer.after_step(10_001))
    observer.close()
    assert path.stat().st_size <= 1 << 19
    assert steps_of(path)[:: len(steps_of(path)) - 1] == [0, 10_001]


KILLED = """
import os, sys
from pathlib import Path
from forge.observe.jsonl import JsonlSink, read_jsonl
from forge.observe.thinning import thin_file

path, max_bytes = Path(sys.argv[1]), int(sys.argv[2])
whole = path.read_bytes()
seen = set()
for last in range(100):
    path.write_bytes(whole)
    child = os.fork()
    if not child:
        sink, calls = JsonlSink(path, resume_step=1 << 40), [0]
        def end(event, arguments):
            if event in ("open", "os.rename", "os.remove"):
                calls[0] += 1
                if calls[0] > last:
                    os._exit(9)
        sys.addaudithook(end)
        thin_file(path, max_bytes)
        sink.reopen()
        sink.write(1_000_000, {"x": 1.0})
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    JsonlSink(path, resume_step=1 << 40).close()  # what a resume does first
    steps = [line.step for line in read_jsonl(path)]
    assert os.listdir(path.parent) == [path.name], os.listdir(path.parent)
    assert steps[0] == 0 and 299 in steps, steps
    seen.add(("old" if len(steps) == 300 else "new", status))
    if status == 0:
        break
assert last >= 4 and seen == {("old", 9), ("new", 9), ("new", 0)}, (last, seen)
"""


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run" / "system.jsonl"
    path.parent.mkdir()
    filled(path, 300)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, path, str(MAX_BYTES // 2)], timeout=600, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    filled(path, 600)
    before = path.read_bytes()
    with path.open("rb") as old:
        thin_file(path, MAX_BYTES)
        assert old.read() == before, "the old file was changed in place"
    assert path.stat().st_size <= MAX_BYTES // 2


def test_a_file_that_cannot_be_replaced_stays_and_that_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "system.jsonl"
    log = SystemLog(path, interval_s=0, max_bytes=1_000)
    while not log.is_full:
        log.write(1, [STATUS])
    before = path.read_bytes()
    (tmp_path / "system.jsonl.part").mkdir()
    for _ in range(3):
        log.thin()
        log.write(1, [STATUS])
    log.close()
    assert path.read_bytes() == before
    assert [record.message.partition(" failed")[0] for record in caplog.records] == [f"writing {path}"]


def read_all(tail: MetricTail) -> list[int]:
    tail.advance()
    while not tail.is_complete:
        tail.advance()
    return [int(step) for step in tail.table.rows().steps]


@pytest.mark.parametrize("is_read", ["whole", "in part"])
def test_the_page_follows_a_file_through_its_thinning(tmp_path: Path, is_read: str) -> None:
    path = tmp_path / "system.jsonl"
    filled(path, BLOCK // 900 + 500, width=800)
    tail = MetricTail(path, MetricTable())
    tail.advance()
    assert not tail.is_complete
    if is_read == "whole":
        read_all(tail)
    thin_file(path, BLOCK)
    sink = JsonlSink(path, resume_step=1 << 40)
    sink.write(1_000_000, {"x": 1.0})
    sink.close()
    assert read_all(tail) == steps_of(path)
    assert tail.num_unreadable == 0


def test_the_page_notices_a_thinned_file_that_has_the_number_of_an_earlier_one(tmp_path: Path) -> None:
    """A file system gives the inode of a file that is gone to a new one, whose first line is the same."""
    path = tmp_path / "system.jsonl"
    filled(path, 100)
    tail = MetricTail(path, MetricTable())
    assert read_all(tail) == list(range(100))
    lines = path.read_bytes().splitlines(keepends=True)
    filled(tmp_path / "more", 300)
    more = (tmp_path / "more").read_bytes().splitlines(keepends=True)[100:]
    with path.open("r+b") as file:  # in place: the same inode
        file.write(b"".join([*lines[::2], *more]))
    assert read_all(tail) == [*range(0, 100, 2), *range(100, 300)]
