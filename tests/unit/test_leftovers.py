"""The check that tests leave nothing behind finds what is left, and only that."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leftovers import lasting_children, orphans_since, running_children, shared_memory_files


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A file in its own folder: in /dev/shm, tests that run beside would take it for an orphan of theirs."""
    return tmp_path / "left"


def test_a_file_that_nobody_uses_is_found(left: Path) -> None:
    before = shared_memory_files(left.parent)
    left.write_bytes(b"left")
    assert left.name in orphans_since(before, left.parent)


def test_a_file_that_was_there_before_is_not(left: Path) -> None:
    left.write_bytes(b"left")
    assert left.name not in orphans_since(shared_memory_files(left.parent), left.parent)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_file_in_use_is_not(left: Path, is_mapped: bool) -> None:
    before = shared_memory_files(left.parent)
    left.write_bytes(b"in use")
    descriptor = os.open(left, os.O_RDWR)
    memory = mmap.mmap(descriptor, 6) if is_mapped else None
    if memory is not None:
        os.close(descriptor)
    assert left.name not in orphans_since(before, left.parent)
    if memory is None:
        os.close(descriptor)
    else:
        memory.close()
    assert left.name in orphans_since(before, left.parent)


def test_a_child_that_is_about_to_end_is_waited_for() -> None:
    before = running_children()  # of other tests
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in [found.pid for found in running_children()]
        assert [line for line in lasting_children(before, limit_s=0.0) if "input()" in line]
        assert child.stdin is not None
        child.stdin.close()
        assert lasting_children(before) == []
