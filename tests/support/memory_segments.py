"""Segments in memory for the tests of transports: memfds under names, with pins that are counted."""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from forge.errors import StoreKeyError


class MemorySegments:
    """A `SegmentSource`. `on_open(name, count)` runs inside the count-th `open`, on the server's thread."""

    def __init__(self, on_open: Callable[[str, int], None] | None = None) -> None:
        self.pins: Counter[str] = Counter()
        self._files: dict[str, tuple[int, int]] = {}
        self._on_open = on_open
        self._num_opens = 0
        self._lock = threading.Lock()

    def add(self, name: str, data: bytes) -> None:
        self.make(name, len(data))
        os.pwrite(self._files[name][0], data, 0)

    def make(self, name: str, size: int) -> None:
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, size)
        self._files[name] = (descriptor, size)

    def content(self, name: str) -> bytes:
        descriptor, size = self._files[name]
        with mmap.mmap(descriptor, size) as mapped:
            return mapped[:]

    def truncate(self, name: str, size: int) -> None:
        os.ftruncate(self._files[name][0], size)

    def open(self, name: str) -> tuple[int, int]:
        with self._lock:
            self._num_opens += 1
            count = self._num_opens
        if name not in self._files:
            raise StoreKeyError(f"no segment {name!r}", path=name)
        if self._on_open is not None:
            self._on_open(name, count)
        self.pins[name] += 1
        return self._files[name]

    def release(self, name: str) -> None:
        self.pins[name] -= 1

    def wait_for(self, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Return at once: all is there."""

    def mapped(self, name: str) -> memoryview | None:
        return None

    def create(self, size: int) -> str:
        name = f"pushed-{len(self._files)}"
        self.make(name, size)
        return name

    def close(self) -> None:
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()
