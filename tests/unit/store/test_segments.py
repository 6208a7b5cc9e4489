"""Segments: memory that others can map, that nobody has to sweep up, and that says when it is short."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from forge.errors import StoreError
from forge.store.segments import (
    LIMIT,
    STAMP_SIZE,
    Segment,
    SegmentPool,
    open_segment,
    pack_stamp,
    unpack_stamp,
    when_unmapped,
)

SIZE = 3 * 4096


@pytest.fixture
def pool() -> SegmentPool:
    return SegmentPool("run7")


def num_files() -> int:
    gc.collect()  # what other tests left behind is closed now, and not while a test counts
    return len(os.listdir("/proc/self/fd"))


def opened(segment: Segment, *, is_private: bool = False) -> Segment:
    return open_segment(segment.name, pid=os.getpid(), fd=segment.fd, size=segment.size, is_private=is_private)


def test_a_segment_is_named_after_its_run_and_key(pool: SegmentPool) -> None:
    segment = pool.create("policy/head:0 é", SIZE)
    assert segment.name.startswith("forge-run7-policy_head_0__-")
    assert str(os.getpid()) in segment.name
    assert segment.name in Path("/proc/self/maps").read_text()
    assert pool.create("policy/head:0 é", SIZE).name != segment.name
    assert len(pool.create("x" * 500, SIZE).name) < 200
    assert "on disk" not in repr(segment)
    pool.close()


def test_other_threads_run_while_a_segment_is_made(pool: SegmentPool) -> None:
    """The controller's process answers for the run, and must do so while it allocates GiBs."""
    num_ticks, is_ticking, is_done = [0], threading.Event(), threading.Event()

    def tick() -> None:
        while not is_done.wait(0.001):
            num_ticks[0] += 1
            is_ticking.set()

    ticking = threading.Thread(target=tick)
    ticking.start()
    is_ticking.wait()
    before = num_ticks[0]
    segment = pool.create("large", 1 << 30)
    during = num_ticks[0] - before
    is_done.set()
    ticking.join()
    pool.drop(segment.name)
    assert during > 3, "it held the interpreter's lock all the time"


def test_what_is_written_is_seen_by_who_opened_it(pool: SegmentPool) -> None:
    segment = pool.create("k", SIZE)
    other, own = opened(segment), opened(segment, is_private=True)
    segment.flat()[100] = 7
    assert (other.flat()[100], own.flat()[100]) == (7, 7)
    own.flat()[100] = 9
    assert (segment.flat()[100], other.flat()[100], own.flat()[100]) == (7, 7, 9)
    assert own.flat().numel() == SIZE
    pool.close()


def test_a_stamp_tells_fillings_apart(pool: SegmentPool) -> None:
    segment = pool.create("k", SIZE)
    other = opened(segment)
    assert segment.stamp == other.stamp == 0, "nothing was written yet"
    for stamp in (1, (1 << 63) - 1, 0, 5):
        segment.set_stamp(stamp)
        assert segment.stamp == other.stamp == stamp
    assert unpack_stamp(pack_stamp(12)) == 12
    assert unpack_stamp(b"\1" * STAMP_SIZE) == 0
    pool.close()


def test_a_dropped_segment_lives_as_long_as_somebody_looks_at_it(pool: SegmentPool) -> None:
    before = num_files()
    segment = pool.create("k", SIZE)
    fd, name = segment.fd, segment.name
    assert pool.get(name) is segment
    other = opened(segment)
    view = other.flat()
    segment.flat()[0:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    pool.drop(name)
    pool.drop(name)
    assert (pool.get(name), len(pool), segment.fd) == (None, 0, -1)
    del segment, other
    gc.collect()
    assert view[:4].tolist() == [1, 2, 3, 4]
    with pytest.raises(OSError):
        open_segment(name, pid=os.getpid(), fd=fd, size=SIZE)
    del view
    gc.collect()
    assert num_files() == before
    assert name not in Path("/proc/self/maps").read_text()


def test_the_last_look_is_heard_of(pool: SegmentPool) -> None:
    segment = pool.create("k", SIZE)
    mapped = opened(segment, is_private=True)
    gone: list[bool] = []
    when_unmapped(mapped, lambda: gone.append(True))
    tensor = mapped.flat()[4096:].view(torch.float32)[3:5]
    del mapped
    gc.collect()
    assert gone == []
    del tensor
    gc.collect()
    assert gone == [True]
    pool.close()


def test_a_segment_is_passed_on_by_who_keeps_its_descriptor(pool: SegmentPool) -> None:
    segment = pool.create("k", SIZE)
    segment.flat()[0] = 3
    kept = open_segment(segment.name, pid=os.getpid(), fd=segment.fd, size=SIZE, keep_fd=True)
    pool.drop(segment.name)
    assert opened(kept).flat()[0] == 3
    kept.close_fd()
    kept.close_fd()


def test_another_process_opens_it_and_the_end_of_its_maker_ends_it(pool: SegmentPool) -> None:
    code = (
        "import sys; from forge.store.segments import SegmentPool; s = SegmentPool('r').create('k', 4096);"
        "s.map[100:104] = b'abcd'; print(s.name, s.fd, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    name, fd = child.stdout.readline().split()
    segment = open_segment(name, pid=child.pid, fd=int(fd), size=4096)
    child.communicate(timeout=600)
    assert segment.map[100:104] == b"abcd"
    with pytest.raises(OSError):
        open_segment(name, pid=child.pid, fd=int(fd), size=4096)


def test_a_descriptor_that_is_something_else_is_refused(pool: SegmentPool) -> None:
    """A process that has dropped a segment may have opened another file under the same number."""
    segment = pool.create("k", SIZE)
    before = num_files()
    with pytest.raises(FileNotFoundError, match="is not segment"):
        open_segment("other", pid=os.getpid(), fd=segment.fd, size=SIZE + 1)
    gc.collect()
    assert num_files() == before
    pool.close()


def test_a_mapping_that_fails_closes_its_descriptor_once() -> None:
    """Twice would close a file that somebody else opened meanwhile."""
    empty = os.memfd_create("empty")
    innocent = -1
    try:
        open_segment("empty", pid=os.getpid(), fd=empty, size=0)
    except ValueError:  # an empty file cannot be mapped; what failed is still alive here
        innocent = os.open("/dev/null", os.O_RDONLY)
    assert innocent >= 0
    gc.collect()
    os.fstat(innocent)
    os.close(innocent)
    os.close(empty)


def test_what_does_not_fit_goes_to_disk_and_says_so_once(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(LIMIT, str(2 * SIZE / 2**30))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING, "forge.store"):
        segments = [pool.create("k", SIZE) for _ in range(4)]
    assert [segment.is_on_disk for segment in segments] == [False, False, True, True]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for said in ("needs 0.00 GiB", str(tmp_path), LIMIT):
        assert said in caplog.text
    assert "on disk" in repr(segments[2])
    segments[2].flat()[5] = 1
    assert opened(segments[2]).flat()[5] == 1
    assert list(tmp_path.iterdir()) == [], "a crash would leave a file"
    pool.drop(segments[0].name)
    assert not pool.create("k", SIZE).is_on_disk, "room that is free again is used"
    pool.close()


def test_where_nothing_fits_it_says_how_much_is_needed(pool: SegmentPool) -> None:
    before = num_files()
    with pytest.raises(StoreError, match=r"no segment of 1048576\.00 GiB can be made") as caught:
        pool.create("policy", 1 << 50)
    error = caught.value
    assert (error.path, error.value) == ("policy", 1 << 50)
    assert "GiB of memory" in str(error.rule)
    assert "keep fewer versions" in str(error.repair)
    assert (len(pool), num_files()) == (0, before)


def test_too_many_open_files_says_so(pool: SegmentPool) -> None:
    """In a process of its own, whose limit cannot be raised again."""
    code = (
        "import resource; from forge.errors import StoreError; from forge.store.segments import SegmentPool\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); pool = SegmentPool('r')\n"
        "try:\n    [pool.create('k', 4096) for _ in range(60)]\n"
        "except StoreError as error:\n    print(error.repair, len(pool) > 10)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert "ulimit -n" in done.stdout
    assert done.stdout.strip().endswith("True")
    assert errno.EMFILE == 24


def test_a_limit_that_is_no_number_is_refused(pool: SegmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "much")
    with pytest.raises(StoreError, match="is not a number") as caught:
        pool.create("k", SIZE)
    error = caught.value
    assert (error.path, error.value, error.repair) == (LIMIT, "much", "unset it")
