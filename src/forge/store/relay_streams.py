"""The threads that read bytes of other hosts for everything that a process relays."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from forge.store.relay_sources import Connections

MOST_STREAMS: Final = 8
"""Threads of one process, each with its connections, however many parts a version has."""


class Stream(Protocol):
    """One of the streams that fill a part, a chunk at a time."""

    def read_chunk(self, connections: Connections) -> bool:
        """Read the next chunk; return whether there may be another one."""


class StreamThreads:
    """Reads the chunks of streams in turns. Threads start when there is something to read, and end when not."""

    def __init__(self, secret: Callable[[], bytes]) -> None:
        self._secret = secret
        self._streams: deque[Stream] = deque()
        self._num_threads = 0
        self._guard = threading.Lock()

    def add(self, stream: Stream) -> None:
        """Read a stream to its end."""
        with self._guard:
            self._streams.append(stream)
            if self._num_threads == MOST_STREAMS:
                return
            self._num_threads += 1
        try:
            threading.Thread(target=self._work, name="forge-relay", daemon=True).start()
        except RuntimeError:  # no more threads: those that there are do it, unless there is none
            with self._guard:
                self._num_threads -= 1
                if not self._num_threads:
                    self._streams.remove(stream)
                    raise

    def _work(self) -> None:
        with Connections(self._secret()) as connections:
            while (stream := self._next()) is not None:
                if stream.read_chunk(connections):
                    with self._guard:
                        self._streams.append(stream)

    def _next(self) -> Stream | None:
        with self._guard:
            if self._streams:
                return self._streams.popleft()
            self._num_threads -= 1
            return None
