"""Where a relay gets its bytes: from relays of other hosts, or from those who hold the part."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
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


class Connections:
    """One thread's connections to other hosts, each opened when it is first used."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._clients: dict[str, DataClient] = {}
        self._checked: dict[tuple[str, str], float] = {}
        """For each segment that was found as expected, how long that took."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            client.close()

    def client(self, address: str, *, stall_s: float) -> DataClient:
        if address not in self._clients:
            self._clients[address] = DataClient(address, self._secret, num_streams=1, stall_s=stall_s)
        return self._clients[address]

    def check(self, client: DataClient, name: str, stamp: int) -> float:
        """Raise unless a segment elsewhere has the filling with this stamp. Return how long finding that out took."""
        if (client.address, name) not in self._checked:
            self._checked[client.address, name] = check_filling(client, name, stamp)
        return self._checked[client.address, name]

    def forget(self, address: str) -> None:
        """Close the connection to a process that does not answer."""
        client = self._clients.pop(address, None)
        if client is not None:
            client.close()


class RelaySources:
    """The sources of one part: relays first, then those who hold it."""

    def __init__(self, part: PartRanges, upstreams: Sequence[Relay]) -> None:
        holders = [holder for holder in part.record.holders if holder.transport == "tcp"]
        self._sources: tuple[Relay | Holder, ...] = (*upstreams, *holders)
        self.stamp, self._rank = part.record.stamp, part.rank
        self._choice = SourceChoice(len(self._sources), num_relays=len(upstreams))
        self._used: set[int] = set()
        self._in_use: set[DataClient] = set()
        self._closing = threading.Event()
        self._guard = threading.Lock()

    def read(self, chunk: Sequence[Range], connections: Connections) -> float:
        """Fill the ranges of a chunk from one of the sources. Return how long a chunk from there should take at least.
        Raises `NoSource` when no source is left that has them. Several threads may read at once."""
        failures: list[str] = []
        with self._guard:
            source = self._choice.pick()
        while source is not None:
            began = time.monotonic()
            try:
                client, pace_s = self._opened(source, connections)
                began = time.monotonic()
                with self._using(client, connections):
                    client.read(self._name(source), chunk)
            except NotHere as error:
                with self._guard:
                    source = self._choice.refused(source, time.monotonic() - began)
                _log.debug("bytes of part %x are read elsewhere: %s", self.stamp, error.message)
            except (OSError, StoreError) as error:
                failures.append(f"{self._sources[source].describe()}: {error}")
                connections.forget(self._sources[source].address)
                with self._guard:
                    source = None if self._closing.is_set() else self._choice.failed(source)
                    if not self._closing.is_set():
                        _log.info("a source of part %x is not used any more: %s", self.stamp, failures[-1])
            else:
                with self._guard:
                    self._choice.arrived(source, sum(len(view) for _, view in chunk), time.monotonic() - began)
                    self._used.add(source)
                return pace_s
        raise NoSource(
            "bytes of a version could not be read from another host: " + ("; ".join(failures) or "no source is left"),
            value=failures or [each.describe() for each in self._sources],
            rule="a process that holds them answers",
            repair="fetch a newer version, or keep copies: `await ts.setup(volumes=2, copies=2)`",
        )

    def _opened(self, source: int, connections: Connections) -> tuple[DataClient, float]:
        """Return a connection to a source that has this filling of the segment, and the pace of chunks from there."""
        found = self._sources[source]
        is_holder = isinstance(found, Holder)
        client = connections.client(found.address, stall_s=STALL_S if is_holder else RELAY_STALL_S)
        try:
            with self._using(client, connections):
                took_s = connections.check(client, self._name(source), self.stamp)
        except NotHere as error:  # it does not refuse some bytes, but has none
            raise StoreError(error.message, path=found.address) from None
        if took_s > SLOW_ANSWER_S and not is_holder:
            raise StoreError(f"it took {took_s:.1f} s to answer", path=found.address, rule=f"{SLOW_ANSWER_S:g} s")
        return client, max(LEAST_PACE_S, took_s)

    @contextlib.contextmanager
    def _using(self, client: DataClient, connections: Connections) -> Iterator[None]:
        """Let `close` end what is done with a connection."""
        with self._guard:
            if self._closing.is_set():
                raise StoreError("a version that is not needed any more is not read further", value=self.stamp)
            self._in_use.add(client)
        try:
            yield
        finally:
            with self._guard:
                self._in_use.discard(client)
                is_closed = self._closing.is_set()
            if is_closed:  # it may be closed
                connections.forget(client.address)

    def _name(self, source: int) -> str:
        found = self._sources[source]
        return found.segment if isinstance(found, Holder) else copy_label(found.copy, self._rank)

    def relays_used(self) -> tuple[Relay, ...]:
        """Return the relays of other hosts from which bytes have come."""
        with self._guard:
            used = [self._sources[source] for source in sorted(self._used)]
        return tuple(source for source in used if isinstance(source, Relay))

    @property
    def num_dropped(self) -> int:
        """How many sources are not used any more."""
        with self._guard:
            return self._choice.num_dropped

    def close(self) -> None:
        """End all transfers."""
        with self._guard:
            self._closing.set()
            for client in self._in_use:
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
