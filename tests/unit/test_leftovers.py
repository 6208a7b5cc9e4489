"""The check that tests leave nothing behind finds what is left, and only that."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from leftovers import SHARED_MEMORY, orphans_since, shared_memory_files


@pytest.fixture
def left() -> Iterator[Path]:
    path = SHARED_MEMORY / f"left-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def test_a_file_that_nobody_uses_is_found(left: Path) -> None:
    before = shared_memory_files()
    left.write_bytes(b"left")
    assert left.name in orphans_since(before)


def test_a_file_that_was_there_before_is_not(left: Path) -> None:
    left.write_bytes(b"left")
    assert left.name not in orphans_since(shared_memory_files())


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_file_in_use_is_not(left: Path, is_mapped: bool) -> None:
    before = shared_memory_files()
    left.write_bytes(b"in use")
    descriptor = os.open(left, os.O_RDWR)
    memory = mmap.mmap(descriptor, 6) if is_mapped else None
    if memory is not None:
        os.close(descriptor)
    assert left.name not in orphans_since(before)
    if memory is None:
        os.close(descriptor)
    else:
        memory.close()
    assert left.name in orphans_since(before)
