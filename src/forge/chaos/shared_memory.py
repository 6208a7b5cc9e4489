"""Files in shared memory that a run leaves behind, told apart from those of other programs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from pathlib import Path
from typing import Final

from forge.chaos.processes import is_tagged

_SHARED_MEMORY: Final = Path("/dev/shm")
_POLL_S: Final = 0.2
_MAX_LOOKS: Final = 50
"""Each look reads what every process of the machine maps."""


class SegmentWatch:
    """Which new files in shared memory are the run's, and which belong to other programs.

    A file does not say who made it. While the run runs, `watch` looks at who maps each new one: a file that only
    processes outside of the experiment `tag` map belongs to another program, also after those have ended.
    """

    def __init__(self, tag: str, *, folder: Path = _SHARED_MEMORY) -> None:
        self._tag, self._folder = tag, folder
        self._before = set(os.listdir(folder))
        self._own: set[str] = set()
        self._foreign: set[str] = set()
        self._num_looks: Counter[str] = Counter()

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_POLL_S)

    def look(self) -> None:
        """Note who maps the files whose owner is not known yet. What no process has mapped for long stays unknown."""
        unknown = {name for name in self._new() - self._own - self._foreign if self._num_looks[name] < _MAX_LOOKS}
        if not unknown:
            return
        self._num_looks.update(unknown)
        for pid, maps in _mappings():
            found = {name for name in unknown if f"{self._folder}/{name}" in maps}
            with contextlib.suppress(OSError):  # it has ended
                if found:
                    (self._own if is_tagged(pid, self._tag) else self._foreign).update(found)

    async def left(self, *, limit_s: float) -> list[str]:
        """Return the new files that no process maps until the time is up, apart from those of other programs.

        Files that other programs are creating or removing at that moment do not stay unused for so long.
        """
        until = time.monotonic() + limit_s
        left = self._unused()
        while left and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
            left &= self._unused()
        return sorted(left)

    def _new(self) -> set[str]:
        return set(os.listdir(self._folder)) - self._before

    def _unused(self) -> set[str]:
        """Return the new files that may be the run's and that no living process maps."""
        self.look()
        names = self._new() - (self._foreign - self._own)
        if not names:
            return names
        used = {name for _, maps in _mappings() for name in names if f"{self._folder}/{name}" in maps}
        return names - used


def _mappings() -> list[tuple[int, str]]:
    """Return what each living process maps."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                found.append((int(entry), Path(f"/proc/{entry}/maps").read_text()))
    return found
