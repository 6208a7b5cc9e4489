"""Where a relay gets its bytes: from relays of other hosts, or from those who hold the part."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from forge.errors import StoreError
from forge.store.intervals import Intervals
from forge.store.records import Holder, Relay, SegmentRecord, copy_label
from forge.store.segments import STAMP_SIZE, unpack_stamp
from forge.store.transports import Range
from forge.store.transports.tcp_client import STALL_S, DataClient

_log = logging.getLogger("forge.store")
RELAY_STALL_S: Final = 5.0
"""A relay that is silent for so long is not waited for any more. A holder is waited for longer: it is the last."""
SLOW_ANSWER_S: Final = 2.0
"""A relay that takes longer to answer at all is not used: its link is too busy, or its process."""
FIRST_PROBE_S: Final = 1.0
LEAST_PACE_S: Final = 0.03
LONGEST_PAUSE_S: Final = 16.0
FASTER: Final = 2.0
"""A source must be so many times as fast as another to take its place: their speeds differ by chance, too."""


class NotHere(StoreError):
    """A relay does not get the bytes that it was asked for, or not soon: they must be read elsewhere."""


class NoSource(StoreError):
    """None of those who hold the bytes, or get them, can be reached."""


@dataclass(frozen=True, slots=True)
class PartRanges:
    """Ranges of one rank's part of a version."""

    rank: int
    record: SegmentRecord
    ranges: Intervals


class SourceChoice:
    """Chooses the source of each chunk: the first of them that works, and is not slow.

    A relay that sends little may itself get little, or it may be alone with a slow link. So after a second with a relay
    the next source in the list is tried with one chunk, which is wanted anyway. It takes the relay's place if it is
    much faster; else the next trial comes after twice the time. The last sources hold everything: no others are tried
    beside them.
    """

    def __init__(self, num_sources: int, *, num_relays: int) -> None:
        self._usable = list(range(num_sources))
        self._num_relays = num_relays
        self._speeds = [_Speed() for _ in range(num_sources)]
        self._probed: int | None = None
        self._spent_s, self._pause_s = 0.0, FIRST_PROBE_S

    @property
    def num_dropped(self) -> int:
        """How many sources are not used any more."""
        return len(self._speeds) - len(self._usable)

    def pick(self) -> int | None:
        """Return the source of the next chunk; None if no source is left."""
        if not self._usable:
            return None
        current = self._usable[0]
        if current < self._num_relays and self._probed is None and self._spent_s >= self._pause_s:
            self._probed = self._after(current)
            if self._probed is not None:
                return self._probed
        return current

    def arrived(self, source: int, num_bytes: int, seconds: float) -> None:
        """Note a chunk that was read."""
        self._speeds[source].add(num_bytes, seconds)
        if self._usable and source == self._usable[0]:
            self._spent_s += seconds
        elif source == self._probed:
            self._probed, self._spent_s = None, 0.0
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            if self._usable and self._speeds[source].value > FASTER * self._speeds[self._usable[0]].value:
                self._usable = [other for other in self._usable if other >= source]
                self._pause_s = FIRST_PROBE_S

    def refused(self, source: int, seconds: float) -> int | None:
        """Note that a source does not get a chunk, or not soon; return the next source for it."""
        if self._usable and source == self._usable[0]:
            self._speeds[source].add(0, seconds)
            self._spent_s += seconds
        after = self._after(source)
        if source == self._probed:
            self._probed = after
        return after

    def failed(self, source: int) -> int | None:
        """Note that a source does not work, and return the next one for its chunk. It is not used any more."""
        if source in self._usable:
            self._usable.remove(source)
            self._spent_s, self._pause_s = 0.0, FIRST_PROBE_S
        if source == self._probed:
            self._probed = None
        return self._after(source)

    def _after(self, source: int) -> int | None:
        return next((other for other in self._usable if other > source), None)


class _Speed:
    """Bytes for each second of a request, lately."""

    def __init__(self) -> None:
        self._num_bytes = self._seconds = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self._num_bytes, self._seconds = self._num_bytes + num_bytes, self._seconds + seconds
        if self._seconds > 2 * FIRST_PROBE_S:
            self._num_bytes, self._seconds = self._num_bytes / 2, self._seconds / 2

    @property
    def value(self) -> float:
        return self._num_bytes / self._seconds if self._seconds else 0.0


class RelaySources:
    """The sources of one part, shared by the streams that read it: relays first, then those who hold it."""

    def __init__(self, part: PartRanges, upstreams: Sequence[Relay], secret: bytes) -> None:
        record = part.record
        holders = [holder for holder in record.holders if holder.transport == "tcp"]
        self.sources: tuple[Relay | Holder, ...] = (*upstreams, *holders)
        self.stamp, self.rank = record.stamp, part.rank
        self.choice = SourceChoice(len(self.sources), num_relays=len(upstreams))
        self.num_received: Counter[int] = Counter()
        """Bytes from each source."""
        self.guard = threading.Lock()
        self.secret = secret
        self._streams: set[SourceStream] = set()
        self._is_closed = False

    def stream(self) -> SourceStream:
        """Return connections for one thread."""
        stream = SourceStream(self)
        with self.guard:
            if self._is_closed:
                raise StoreError("a version that is not needed any more is not read further", value=self.stamp)
            self._streams.add(stream)
        return stream

    def forget(self, stream: SourceStream) -> None:
        with self.guard:
            self._streams.discard(stream)

    def relays_used(self) -> tuple[Relay, ...]:
        """Return the relays of other hosts from which bytes have come."""
        with self.guard:
            used = [self.sources[source] for source in sorted(self.num_received)]
        return tuple(source for source in used if isinstance(source, Relay))

    def close(self) -> None:
        """End all transfers."""
        with self.guard:
            self._is_closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()


class SourceStream:
    """One thread's connections to the sources of a part."""

    def __init__(self, shared: RelaySources) -> None:
        self._shared = shared
        self._clients: dict[int, DataClient] = {}
        self._guard = threading.Lock()
        self._is_closed = False
        self.pace_s = LEAST_PACE_S
        """How long a chunk should take: much longer than it takes for the answer to begin."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shared.forget(self)
        self.close()

    def read(self, chunk: Sequence[Range]) -> None:
        """Fill the ranges of a chunk. Raises `StoreError` when no source is left that has them."""
        shared, failures = self._shared, []
        with shared.guard:
            source = shared.choice.pick()
        while source is not None:
            began = time.monotonic()
            try:
                client = self._client(source)
                began = time.monotonic()
                client.read(self._name(source), chunk)
            except NotHere as error:
                with shared.guard:
                    source = shared.choice.refused(source, time.monotonic() - began)
                _log.debug("bytes of part %x are read elsewhere: %s", shared.stamp, error.message)
            except (OSError, StoreError) as error:
                failures.append(f"{shared.sources[source].describe()}: {error}")
                self._forget(source)
                with shared.guard:
                    source = shared.choice.failed(source)
                if not self._is_closed:
                    _log.info("a source of part %x is not used any more: %s", shared.stamp, failures[-1])
            else:
                num_bytes = sum(len(view) for _, view in chunk)
                with shared.guard:
                    shared.choice.arrived(source, num_bytes, time.monotonic() - began)
                    shared.num_received[source] += num_bytes
                return
        raise NoSource(
            "bytes of a version could not be read from another host: " + ("; ".join(failures) or "no source is left"),
            value=failures or [each.describe() for each in shared.sources],
            rule="a process that holds them answers",
            repair="fetch a newer version, or keep copies: `await ts.setup(volumes=2, copies=2)`",
        )

    def _name(self, source: int) -> str:
        found = self._shared.sources[source]
        return found.segment if isinstance(found, Holder) else copy_label(found.copy, self._shared.rank)

    def _client(self, source: int) -> DataClient:
        """Return a connection to a source that has this filling of the segment, opened when it is first used."""
        known = self._clients.get(source)
        if known is not None:
            return known
        found = self._shared.sources[source]
        stall_s = STALL_S if isinstance(found, Holder) else RELAY_STALL_S
        client = DataClient(found.address, self._shared.secret, num_streams=1, stall_s=stall_s)
        with self._guard:
            if self._is_closed:
                client.close()
                raise StoreError("the relay was closed", path=found.address)
            self._clients[source] = client
        try:
            took_s = check_filling(client, self._name(source), self._shared.stamp)
        except NotHere as error:  # it does not refuse some bytes, but has none
            raise StoreError(error.message, path=found.address) from None
        if isinstance(found, Relay) and took_s > SLOW_ANSWER_S:
            raise StoreError(f"it took {took_s:.1f} s to answer", path=found.address, rule=f"{SLOW_ANSWER_S:g} s")
        self.pace_s = max(LEAST_PACE_S, took_s)
        return client

    def _forget(self, source: int) -> None:
        with self._guard:
            client = self._clients.pop(source, None)
        if client is not None:
            client.close()

    def close(self) -> None:
        """Close the connections; a read in progress raises."""
        with self._guard:
            self._is_closed = True
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()


def check_filling(client: DataClient, name: str, stamp: int) -> float:
    """Raise unless a segment elsewhere has the filling with this stamp. Return how long that took, with connecting."""
    head = bytearray(STAMP_SIZE)
    began = time.monotonic()
    client.read(name, [(0, memoryview(head))])
    took_s = time.monotonic() - began
    if unpack_stamp(bytes(head)) != stamp:
        raise StoreError(f"segment {name!r} at {client.address} holds another version now", path=name, value=stamp)
    return took_s
