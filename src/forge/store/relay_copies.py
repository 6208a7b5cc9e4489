"""What a relay holds: parts of versions, or as much of them as readers on its host want, as they arrive."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy as copied
from dataclasses import dataclass
from typing import Final

from forge.errors import StoreError
from forge.store.intervals import Intervals
from forge.store.records import HEADER, Relay
from forge.store.relay_sources import Connections, NotHere, PartRanges, RelaySources
from forge.store.relay_streams import StreamThreads
from forge.store.segments import Segment, SegmentPool
from forge.store.transports.tcp_server import MAX_RANGES

FIRST_CHUNK: Final = 512 << 10
LEAST_CHUNK, MOST_CHUNK = 128 << 10, 4 << 20
"""What is asked for at once, and passed on when it is there: as much as comes in a few hundredths of a second."""
NUM_STREAMS: Final = 2
"""How many chunks of a part are read at once."""
BEGIN_S: Final = 1.0
"""How long another relay waits until a reader here wants anything of a part: both may have just begun."""
PASS_ON_S: Final = 2.0
"""How long another relay waits for bytes that are on their way, before it reads them elsewhere. Less than it stalls."""


class NoRoom(StoreError):
    """The relay's host has too little memory for the bytes that a reader wants."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader asked a relay for: the memory in which it arrives, and how to wait for it."""

    copy: int
    memory: int
    rank: int
    segment: str
    pid: int
    fd: int
    ticket: int
    num_new: int
    """Bytes that no reader had asked for before."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a relay is with what a reader asked for."""

    num_missing: int
    """Bytes that are not there yet."""
    relays: tuple[Relay, ...]
    """Relays of other hosts from which bytes of the part have come."""
    num_dropped: int
    """Sources that the relay has stopped using: while it finds that one does not answer, nothing comes from there."""


class RelayCopy:
    """One part of a version, in memory that readers map while it fills. What is there does not change any more."""

    def __init__(self, segment: Segment, sources: RelaySources, threads: StreamThreads) -> None:
        self.segment, self.sources, self._threads = segment, sources, threads
        segment.set_stamp(sources.stamp)
        self._num_touched = segment.num_used
        self._wanted = self._present = Intervals.of([(0, HEADER)])
        self._memory = memoryview(segment.map)
        self._todo: deque[tuple[int, int]] = deque()
        self._num_streams = 0
        self._tickets: dict[int, Intervals] = {}
        self._failure: StoreError | None = None
        self._is_closed = False
        self._changed = threading.Condition()

    def missing(self, ranges: Intervals) -> int:
        """Return how many bytes of a set nobody has asked for yet."""
        return (ranges - self._wanted).num_bytes

    @property
    def num_coming(self) -> int:
        """Bytes that were asked for and take no memory yet."""
        return max(0, self._wanted.num_bytes - max(self._present.num_bytes, self._num_touched))

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is written to its memory any more."""
        with self._changed:
            return self._num_streams == 0

    def want(self, ranges: Intervals, ticket: int) -> int:
        """Have ranges fetched; `wait(ticket)` waits for them. Return how many bytes nobody had asked for before."""
        with self._changed:
            self._check_open()
            new = ranges - self._wanted
            self._set_wanted(self._wanted | new)
            self._tickets[ticket] = ranges
            self._todo.extend(new)
            while self._todo and self._num_streams < NUM_STREAMS:
                self._threads.add(_CopyStream(self))
                self._num_streams += 1
        return new.num_bytes

    def wait(self, ticket: int, timeout_s: float) -> int:
        """Wait until all that was asked for is there, but not longer than this; return how many bytes are missing.
        Raises `StoreError` if they do not come."""
        with self._changed:
            if ticket not in self._tickets:
                raise StoreError("this process relays nothing under this ticket", value=ticket)
            left = self._tickets.pop(ticket)
            left = self._wait(left, timeout_s)
            if len(left):
                self._tickets[ticket] = left
            return left.num_bytes

    def wait_for(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Wait until ranges are there that another host asks for. `NotHere` if they are not wanted, or take long."""
        with self._changed:
            left = self._wait(Intervals.of(ranges), PASS_ON_S)
        if len(left):
            raise NotHere("bytes of a version are late", value=left.num_bytes, rule=f"they come within {PASS_ON_S:g} s")

    def _wait(self, left: Intervals, timeout_s: float) -> Intervals:
        until = time.monotonic() + timeout_s
        while True:
            self._check_open()
            left = left - self._present
            if not self._wanted.covers(left):
                failure = self._failure
                raise NotHere("no reader here wants these bytes") if failure is None else copied(failure)
            if not len(left) or (remaining_s := until - time.monotonic()) <= 0:
                return left
            self._changed.wait(remaining_s)

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotHere("a version that is not needed any more was released", path=self.segment.name)

    def _set_wanted(self, wanted: Intervals) -> None:
        self._wanted = wanted
        self.segment.num_used = max(self._num_touched, wanted.num_bytes)

    # filling

    def next_chunk(self, size: int) -> list[tuple[int, int]]:
        """Take the next ranges to read, of so many bytes together, for a stream; none ends the stream."""
        chunk: list[tuple[int, int]] = []
        with self._changed:
            while self._todo and size > 0 and len(chunk) < MAX_RANGES:
                start, length = self._todo.popleft()
                if length > size:
                    self._todo.appendleft((start + size, length - size))
                chunk.append((start, min(length, size)))
                size -= length
            self._num_streams -= not chunk
        return chunk

    def read(self, chunk: Sequence[tuple[int, int]], connections: Connections) -> float:
        """Read ranges, and wake those who wait for them. Return how long a chunk should take at least."""
        targets = [(start, self._memory[start : start + length]) for start, length in chunk]
        pace_s = self.sources.read(targets, connections)
        there = Intervals.of(chunk)
        with self._changed:
            self._present = self._present | there
            if not self._wanted.covers(there):  # another stream failed meanwhile
                self._set_wanted(self._wanted | there)
            self._changed.notify_all()
        return pace_s

    def fail(self, error: StoreError) -> None:
        """End a stream, and raise to all who wait. What is there stays, and the rest may be asked for again."""
        with self._changed:
            self._num_streams -= 1
            self._failure = error.with_traceback(None)
            self._todo.clear()
            self._set_wanted(self._present)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop. Readers that have mapped the memory keep it."""
        with self._changed:
            self._is_closed = True
            self._todo.clear()
            self._changed.notify_all()
        self.sources.close()


class _CopyStream:
    """Reads chunks of a copy, one after the other."""

    def __init__(self, copy: RelayCopy) -> None:
        self._copy, self._size = copy, FIRST_CHUNK

    def read_chunk(self, connections: Connections) -> bool:
        chunk = self._copy.next_chunk(self._size)
        if not chunk:
            return False
        began = time.monotonic()
        try:
            pace_s = self._copy.read(chunk, connections)
        except StoreError as error:
            self._copy.fail(error)
            return False
        except Exception as error:  # noqa: BLE001 - raised to the readers that wait
            self._copy.fail(StoreError(f"a relay failed: {error!r}"))
            return False
        self._size = adapted(self._size, time.monotonic() - began, pace_s)
        return True


def adapted(size: int, took_s: float, pace_s: float) -> int:
    """Return the size of the next chunk of a stream, whose last one took so long."""
    if took_s < pace_s / 2:
        return min(2 * size, MOST_CHUNK)
    return max(size // 2, LEAST_CHUNK) if took_s > 2 * pace_s else size


class RelayCopies:
    """All that this process relays: by the number of the copy, and by the rank whose part it is."""

    def __init__(self, pool: SegmentPool, secret: Callable[[], bytes]) -> None:
        self._pool, self._threads = pool, StreamThreads(secret)
        self._copies: dict[tuple[int, int], RelayCopy] = {}
        self._uses: dict[int, int] = {}
        """For each memory, the copy that is in it."""
        self._free: dict[int, dict[int, Segment]] = {}
        """For each memory, segments by rank that were used by an earlier copy."""
        self._dropped: deque[int] = deque(maxlen=256)
        """The memories that were dropped last."""
        self._tickets = itertools.count(1)
        self._is_closed = False
        self._changed = threading.Condition()

    def want(self, key: str, relay: Relay, upstreams: Sequence[Relay], parts: Sequence[PartRanges]) -> list[Wanted]:
        """Have bytes of parts fetched, if they are not there. `NoRoom` if there is not enough memory for them."""
        with self._changed:
            self._use(relay)
            self._check_room(key, relay, parts)
            wanted = [self._want(key, relay, upstreams, part) for part in parts]
            self._changed.notify_all()
        return wanted

    def _use(self, relay: Relay) -> None:
        """Use a memory for a copy: that of an earlier version, which nobody reads, makes room. `NotHere` if the memory
        was dropped, or has a later copy, which may be in use: a request can be older than what the registry did since.
        """
        former = self._uses.get(relay.memory, 0)
        if self._is_closed or relay.memory in self._dropped or relay.copy < former:
            raise NotHere("a version that is not needed any more was released", value=relay.copy)
        if former == relay.copy:
            return
        self._uses[relay.memory] = relay.copy
        segments = self._free.setdefault(relay.memory, {})
        for name in [name for name in self._copies if name[0] == former]:
            copy = self._copies.pop(name)
            copy.close()
            if copy.is_quiet:
                segments[name[1]] = copy.segment
            else:
                self._pool.drop(copy.segment.name)

    def _want(self, key: str, relay: Relay, upstreams: Sequence[Relay], part: PartRanges) -> Wanted:
        name = relay.copy, part.rank
        copy = self._copies.get(name)
        if copy is None:
            segment = self._free_segment(relay.memory, part)
            if segment is None:
                segment = self._pool.create_sparse(f"{key}-relayed", part.record.size)
            else:
                del self._free[relay.memory][part.rank]
            copy = self._copies[name] = RelayCopy(segment, RelaySources(part, upstreams), self._threads)
        ticket = next(self._tickets)
        num_new, segment = copy.want(part.ranges, ticket), copy.segment
        return Wanted(relay.copy, relay.memory, part.rank, segment.name, os.getpid(), segment.fd, ticket, num_new)

    def _free_segment(self, memory: int, part: PartRanges) -> Segment | None:
        """Return the segment of an earlier version's part, if this one fits."""
        segment = self._free[memory].get(part.rank)
        return segment if segment is not None and part.record.size <= segment.size <= 2 * part.record.size else None

    def _check_room(self, key: str, relay: Relay, parts: Sequence[PartRanges]) -> None:
        needed = 0
        for part in parts:
            copy, segment = self._copies.get((relay.copy, part.rank)), self._free_segment(relay.memory, part)
            if copy is not None:
                needed += copy.missing(part.ranges)
            else:
                needed += max(0, part.ranges.num_bytes - (0 if segment is None else segment.num_used))
        room = max(0, self._pool.room() - sum(copy.num_coming for copy in self._copies.values()))
        if needed > room:
            raise NoRoom(
                f"{needed / 2**30:.2f} GiB of memory are needed to relay {key!r}, and {room / 2**30:.2f} GiB are left",
                path=key,
                value=needed,
                rule=f"at most {room} bytes",
                repair="give the host more memory, or publish in bfloat16",
            )

    def wait(self, name: tuple[int, int], ticket: int, timeout_s: float) -> Progress:
        """Wait for what was asked for, but not longer than this. Raises `StoreError` if it does not come."""
        copy = self.find(name)
        num_missing = copy.wait(ticket, timeout_s)
        return Progress(num_missing, copy.sources.relays_used(), copy.sources.num_dropped)

    def find(self, name: tuple[int, int], *, wait_s: float = 0.0) -> RelayCopy:
        """Return a copy by its number and rank; wait a moment for a reader to want it. `NotHere` if none does."""
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._copies, wait_s):
                raise NotHere("this process does not relay this version", value=name)
            return self._copies[name]

    def drop(self, memory: int) -> None:
        """Release a memory, with the copy that is in it."""
        with self._changed:
            used = self._uses.pop(memory, None)
            self._dropped.append(memory)
            segments = list(self._free.pop(memory, {}).values())
            for name in [name for name in self._copies if name[0] == used]:
                copy = self._copies.pop(name)
                copy.close()
                segments.append(copy.segment)
        for segment in segments:
            self._pool.drop(segment.name)

    def close(self) -> None:
        """Release everything. Nothing is relayed any more."""
        with self._changed:
            self._is_closed = True
            memories = list(self._uses)
        for memory in memories:
            self.drop(memory)
