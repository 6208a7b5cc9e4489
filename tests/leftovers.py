"""What a test may have left behind. Other tests may run beside it: what a living process of theirs uses is not its."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


def running_children() -> list[psutil.Process]:
    """The processes that this one started, directly or not. Python's own tracker of shared memory, which any test may
    have started and which ends with this process, does not count."""
    return [child for child in psutil.Process().children(recursive=True) if is_running(child)]


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def shared_memory_files() -> set[str]:
    """The names of all files in shared memory."""
    return set(os.listdir(SHARED_MEMORY))


def orphans_since(before: set[str]) -> set[str]:
    """The files in shared memory that have come since, and that no living process has open or mapped."""
    found = shared_memory_files() - before
    if found:
        found -= _in_use()
    return found & shared_memory_files()


def _in_use() -> set[str]:
    """The names of files in shared memory that some process has open or mapped."""
    names: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            names.update(path.name for path in _used_by(process) if path.parent == SHARED_MEMORY)
        except OSError:  # it has ended meanwhile
            continue
    return names


def _used_by(process: Path) -> Iterator[Path]:
    for line in (process / "maps").read_text().splitlines():
        yield Path(line[73:].strip())
    for number in os.listdir(process / "fd"):
        yield Path(os.readlink(process / "fd" / number))
