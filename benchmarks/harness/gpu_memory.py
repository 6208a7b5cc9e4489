"""How much of a device is in use, read from outside every 50 ms: whatever a side does, its peak is seen alike.

NVML is asked through its C library, which comes with the driver, so that nothing has to be installed. Without a GPU
the resident memory of the side's processes takes its place, to try the programs out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

EVERY_S = 0.05
Reader = Callable[[], int]


class _MemoryInfo(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuMemory:
    """The memory of one GPU, all processes and contexts included."""

    def __init__(self, index: int = 0) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._handle))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} of NVML answered {code}")

    def _info(self) -> _MemoryInfo:
        info = _MemoryInfo()
        self._call("nvmlDeviceGetMemoryInfo", self._handle, ctypes.byref(info))
        return info

    @property
    def total(self) -> int:
        return int(self._info().total)

    def used(self) -> int:
        return int(self._info().used)


def family(leader: int) -> list[int]:
    """The processes that live of a side: those of its leader's session, and whatever these have started."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
                state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
                    if int(session) == leader:
                        found.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return sorted(found)


def resident_bytes(pids: list[int]) -> int:
    """Resident memory of processes; what they share counts for each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


class Peak:
    """The largest value that a reader gave, and the one at the beginning."""

    def __init__(self, read: Reader) -> None:
        self._read = read
        self.start = self.highest = read()

    def look(self) -> None:
        self.highest = max(self.highest, self._read())


@contextlib.contextmanager
def watched(read: Reader, *, every_s: float = EVERY_S) -> Iterator[Peak]:
    """Look every few milliseconds while the block runs."""
    peak, is_over = Peak(read), threading.Event()

    def look() -> None:
        while not is_over.wait(every_s):
            peak.look()

    thread = threading.Thread(target=look, name="memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()
        peak.look()


def settled(read: Reader, *, below: int, within_s: float = 20.0) -> int:
    """Wait until no more than `below` bytes are in use, as after a side has ended; what is in use then."""
    until = time.monotonic() + within_s
    while (used := read()) > below and time.monotonic() < until:
        time.sleep(EVERY_S)
    return used
