"""What a test may have left behind."""

from __future__ import annotations

import psutil


def running_children() -> list[psutil.Process]:
    """The processes that this one started, directly or not. Python's own tracker of shared memory, which any test may
    have started and which ends with this process, does not count."""
    return [child for child in psutil.Process().children(recursive=True) if is_running(child)]


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
