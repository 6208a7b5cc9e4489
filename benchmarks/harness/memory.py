"""How much memory processes hold: their own, and the store's segments, which they share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Holdings:
    """What one process holds, in bytes."""

    own: int
    """Anonymous memory that is resident."""
    segments: dict[int, int] = field(default_factory=dict)
    """By inode, so that a segment that several processes have open counts once."""


def holdings(pid: int) -> Holdings:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    own = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    segments = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if "memfd:forge-" in os.readlink(entry):
                status = entry.stat()
                segments[status.st_ino] = status.st_blocks * 512
    return Holdings(own, segments)


def available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def together(found: Iterable[Holdings]) -> tuple[int, int]:
    """Bytes of own memory of all processes, and of all segments."""
    own, segments = 0, {}
    for one in found:
        own += one.own
        segments |= one.segments
    return own, sum(segments.values())


class Watch:
    """The largest that some processes held together, at the moments at which one looked."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self.start = together(map(holdings, self._pids))
        self.peak_own, self.peak_segments = self.start

    def look(self) -> None:
        own, segments = together(map(holdings, self._pids))
        self.peak_own, self.peak_segments = max(self.peak_own, own), max(self.peak_segments, segments)
