"""How a process gives its segments to others, and gets at theirs, when memory cannot be shared."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forge.errors import StoreError, StoreKeyError
from forge.runtime.rendezvous import RENDEZVOUS, environment, is_insecure, run_secret
from forge.store import kernel
from forge.store.copy_table import CopyTable
from forge.store.records import Assignment, Holder, SegmentRecord, copied_part, label_of, labelled_memory
from forge.store.relay_copies import BEGIN_S, RelayCopies
from forge.store.relay_sources import RELAY_STALL_S
from forge.store.segments import Segment, SegmentPool, open_segment
from forge.store.transports import Range, rdma
from forge.store.transports.tcp_client import DataClient
from forge.store.transports.tcp_server import DataServer
from forge.store.verification import table_of

if TYPE_CHECKING:
    from forge.store.client import StoreClient
    from forge.store.part_sources import Source
    from forge.store.transports.cuda import DeviceSegment


_log = logging.getLogger("forge.store")
SPARES = 2
"""How many segments a volume keeps for the next versions that are handed to it."""


def on_host(segment: str) -> str:
    """Return the name of a device segment's copy on the host. Dropping the one drops the other."""
    return f"{segment}-on-host"


class ServedSegments:
    """The segments that a data server gives out: its process's own, those that it adopted, and those that it relays."""

    def __init__(self, pool: SegmentPool, relayed: RelayCopies) -> None:
        self._pool, self._relayed = pool, relayed
        self._adopted: dict[str, Segment] = {}
        self._pins: dict[str, tuple[int, int, int]] = {}
        self._received: set[str] = set()
        self._spares: list[str] = []
        self._labels: dict[str, str] = {}
        self._abandoned: deque[str] = deque(maxlen=256)
        self._guard = threading.Lock()

    def open(self, name: str) -> tuple[int, int]:
        with self._guard:
            if name in self._pins:
                fd, size, count = self._pins[name]
                self._pins[name] = (fd, size, count + 1)
                return fd, size
            segment = self._find(name)
            if segment is None or segment.fd < 0:
                raise StoreKeyError(f"process {os.getpid()} no longer holds segment {name!r}", path=name)
            fd = os.dup(segment.fd)
            self._pins[name] = (fd, segment.size, 1)
            return fd, segment.size

    def release(self, name: str) -> None:
        with self._guard:
            fd, size, count = self._pins[name]
            if count > 1:
                self._pins[name] = (fd, size, count - 1)
            else:
                del self._pins[name]
                os.close(fd)

    def mapped(self, name: str) -> memoryview | None:
        """Return the memory of a segment of this process, or that it adopted."""
        with self._guard:
            segment = self._find(name)
        return None if segment is None else memoryview(segment.map)

    def _find(self, name: str) -> Segment | None:
        copied = copied_part(name)
        if copied is not None:
            return self._relayed.find(copied).segment
        return self._pool.get(name) or self._adopted.get(name)

    def wait_for(self, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Wait until ranges of a segment that this process relays are there."""
        copied = copied_part(name)
        if copied is not None:
            self._relayed.find(copied, wait_s=BEGIN_S).wait_for(ranges)

    def label(self, name: str, label: str) -> None:
        """Remember for which assignment a segment is held. Raise if that was abandoned meanwhile."""
        with self._guard:
            self._labels[name] = label
            is_abandoned = label in self._abandoned
        if is_abandoned:
            raise StoreError(f"{label} was abandoned", path=name, value=label)

    def abandon(self, label: str) -> list[str]:
        """Return the segments that were taken for an abandoned assignment; what still comes for it is rejected."""
        with self._guard:
            self._abandoned.append(label)
            return [name for name, its in self._labels.items() if its == label]

    def create(self, size: int) -> Segment:
        """Return a segment for a publisher that pushes: one that is free again, or a new one."""
        with self._guard:
            for name in self._spares:
                segment = self._pool.get(name)
                if segment is not None and size <= segment.size <= 2 * size:
                    self._spares.remove(name)
                    return segment
        segment = self._pool.create("volume", size)
        with self._guard:
            self._received.add(segment.name)
        return segment

    def adopt(self, name: str, *, pid: int, fd: int, size: int) -> int:
        """Hold a segment of a process on this host too; return the descriptor under which others can open it here."""
        with self._guard:
            known = self._adopted.get(name)
            if known is None:
                known = self._adopted[name] = open_segment(name, pid=pid, fd=fd, size=size, keep_fd=True)
            return known.fd

    @property
    def num_held(self) -> int:
        """Segments that were adopted or received and are in use."""
        with self._guard:
            return len(self._adopted) + len(self._received) - len(self._spares)

    def keep_spare(self, name: str) -> bool:
        """Return whether a received segment that is no longer needed stays for the next one."""
        with self._guard:
            self._labels.pop(name, None)
            if name not in self._received or name in self._spares:
                return False
            self._spares.append(name)
            if len(self._spares) <= SPARES:
                return True
            name = self._spares.pop(0)
            self._received.discard(name)
        self._pool.drop(name)
        return True

    def drop(self, name: str) -> None:
        with self._guard:
            segment = self._adopted.pop(name, None)
        if segment is not None:
            segment.close_fd()


class DataPlane:
    """The data plane of one process."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self.relayed = RelayCopies(client.segments, run_secret)
        self.segments = ServedSegments(client.segments, self.relayed)
        self._server: DataServer | None = None
        self._readers: dict[str, DataClient] = {}
        self._relays: dict[str, DataClient] = {}
        self._rdma_holder: rdma.RdmaHolder | None = None
        self._rdma_reader: rdma.RdmaReader | None = None
        self._registered: dict[str, bytes] = {}
        self._host_copies: dict[str, Segment] = {}
        self._guard = threading.Lock()
        self._copying = threading.Lock()

    # giving

    def serve(self) -> DataServer:
        """Return this process's data server, started on first use."""
        with self._guard:
            if self._server is None:
                self._server = DataServer(
                    run_secret(),
                    bind=own_address(),
                    segments=self.segments,
                    on_ask=self.answer,
                    insecure=is_insecure(),
                )
            return self._server

    def answer(self, name: str, payload: Any) -> Any:
        """Answer a question of another process, or one of this process about what it relays."""
        answers: dict[str, Callable[..., Any]] = {
            "adopt": self._adopt,
            "receive": self._receive,
            "digests": self._digests,
            "host_copy": self._copy_to_host,
            "relay": self.relayed.want,
            "relayed": self.relayed.wait,
        }
        if name not in answers:
            raise StoreError(f"a data server has no answer to {name!r}", value=name, rule=f"one of {sorted(answers)}")
        return answers[name](*payload)

    def _adopt(self, segment: str, pid: int, fd: int, size: int, label: str) -> int:
        held = self.segments.adopt(segment, pid=pid, fd=fd, size=size)
        self._label(segment, label)
        return held

    def _receive(self, size: int, label: str) -> tuple[str, int]:
        """Return a segment that a remote writer fills, and its descriptor."""
        made = self.segments.create(size)
        self._label(made.name, label)
        return made.name, made.fd

    def _label(self, segment: str, label: str) -> None:
        try:
            self.segments.label(segment, label)
        except StoreError:
            self._client.drop(segment)
            raise

    def _digests(self, segment: str, rows: list[list[int]], num_slots: int) -> list[int]:
        """Return the digests of stored pieces, as they are here."""
        table = table_of(rows, num_slots=num_slots)
        fd, size = self.segments.open(segment)
        try:
            mapped = open_segment(segment, pid=os.getpid(), fd=fd, size=size)
            return kernel.digest_only(table, [mapped.flat().data_ptr()])
        finally:
            self.segments.release(segment)

    def _copy_to_host(self, segment: str, stamp: int) -> SegmentRecord:
        """Copy a device segment of this process to memory that anybody can read; once for each filling."""
        with self._copying:
            device = self._client.device_segments.get(segment)
            if device is None or device.stamp != stamp:
                raise StoreKeyError(f"process {os.getpid()} no longer holds this version of {segment!r}")
            copied = self._host_copies.get(segment)
            if copied is None:
                name = on_host(segment)
                copied = self._host_copies[segment] = self._client.segments.create(segment, device.size, name=name)
            if copied.stamp != stamp:
                copied.set_stamp(0)
                copied.flat().copy_(device.memory)  # with the header, and so with the stamp
        return SegmentRecord(device.size, stamp, tuple(self._own(copied, is_asked=True)))

    def hold_device(self, segment: DeviceSegment) -> tuple[Holder, ...]:
        """Make device memory readable for others: by those who see the GPU, and, when they ask, by everybody."""
        here = self._client
        on_gpu = here.holder("cuda", segment.name, token=segment.token)
        return on_gpu, here.holder("ask", segment.name, address=self.serve().address)

    def hold(self, segment: Segment, record: SegmentRecord, assignment: Assignment) -> tuple[Holder, ...]:
        """Make a written segment readable for others: here, and on the volumes if there are any."""
        given: list[Holder] = []
        volumes = assignment.volumes
        is_shared = not volumes
        for volume in volumes:
            try:
                handed = self._hand_over(segment, record, volume, label_of(assignment.id))
            except StoreError as error:
                _log.warning("%s did not take segment %s: %s", volume.describe(), segment.name, error.message)
                continue
            is_shared |= handed[0].segment == segment.name
            given.extend(handed)
        if volumes and not given:
            _log.warning("no storage volume took segment %s: its publisher keeps it", segment.name)
            is_shared = True
        return (*self._own(segment), *given) if is_shared else tuple(given)

    def _own(self, segment: Segment, *, is_asked: bool = False) -> list[Holder]:
        here = self._client
        holders = [here.holder("shm", segment.name, fd=segment.fd)]
        if is_asked or is_spread():
            if token := self._register(segment):
                holders.append(here.holder("rdma", segment.name, token=token))
            holders.append(here.holder("tcp", segment.name, address=self.serve().address))
        return holders

    def _register(self, segment: Segment) -> bytes:
        """Register a segment for RDMA, once, and return how others find it; empty where there is no RDMA."""
        if not rdma.available():
            return b""
        with self._guard:
            if segment.name not in self._registered:
                try:
                    self._rdma_holder = self._rdma_holder or rdma.RdmaHolder()
                    found = self._rdma_holder.register(segment.name, memoryview(segment.map))
                except StoreError as error:  # no actor's process: the others read by TCP
                    _log.info("segment %s is not registered for RDMA: %s", segment.name, error.message)
                    return b""
                self._registered[segment.name] = pickle.dumps(found)
            return self._registered[segment.name]

    def _hand_over(self, segment: Segment, record: SegmentRecord, volume: Holder, label: str) -> list[Holder]:
        reader = self._reader(volume.address)
        name, fd = segment.name, -1
        if volume.host == self._client.host:
            fd = reader.ask("adopt", (name, self._client.pid, segment.fd, segment.size, label))
        else:
            name, fd = reader.ask("receive", (segment.size, label))
            reader.write(name, [(0, memoryview(segment.map)[: record.size])])
        held = replace(volume, segment=name)
        return [replace(held, transport="shm", fd=fd, address=""), held]

    # getting

    def _reader(self, address: str) -> DataClient:
        with self._guard:
            reader = self._readers.get(address)
            if reader is None:
                reader = self._readers[address] = DataClient(address, run_secret())
            return reader

    def relay_client(self, address: str) -> DataClient:
        """Return a connection to a process that must not be waited for long."""
        with self._guard:
            client = self._relays.get(address)
            if client is None:
                client = DataClient(address, run_secret(), num_streams=4, stall_s=RELAY_STALL_S)
                self._relays[address] = client
            return client

    def forget_relay(self, address: str) -> None:
        """Close the connection to a process that does not answer."""
        with self._guard:
            client = self._relays.pop(address, None)
        if client is not None:
            client.close()

    def host_copy(self, holder: Holder, record: SegmentRecord) -> SegmentRecord:
        """Let the publisher of a part on a GPU copy it to its host's memory, and return where it can be read there."""
        copied: SegmentRecord = self._reader(holder.address).ask("host_copy", (holder.segment, record.stamp))
        return copied

    def read(self, holder: Holder, ranges: Sequence[Range]) -> None:
        """Fill ranges from a segment that a process elsewhere holds."""
        if holder.transport != "rdma":
            self._reader(holder.address).read(holder.segment, ranges)
            return
        with self._guard:
            self._rdma_reader = self._rdma_reader or rdma.RdmaReader()
        self._rdma_reader.read(pickle.loads(holder.token), ranges)

    def digests(self, source: Source, table: CopyTable) -> list[int]:
        """Return the digests of rectangles of a part, made by a process that holds it."""
        asked = source.holder
        if asked is None or asked.transport != "tcp":
            asked = next(holder for holder in source.part.segment.holders if holder.transport == "tcp")
        question = (asked.segment, list(table.each()), table.num_slots)
        answer: list[int] = self._reader(asked.address).ask("digests", question)
        return answer

    def drop(self, segment: str) -> bool:
        """Release a segment that is no longer needed. Return True if it is kept for the next version."""
        if segment.startswith(label_of(0)[:-1]):
            for name in self.segments.abandon(segment):
                self._client.drop(name)
            return True
        memory = labelled_memory(segment)
        if memory is not None:
            self.relayed.drop(memory)
            return True
        self.segments.drop(segment)
        with self._guard:
            if self._registered.pop(segment, None) is not None and self._rdma_holder is not None:
                self._rdma_holder.release(segment)
        copied = self._host_copies.pop(segment, None)
        if copied is not None:
            self._client.segments.drop(copied.name)
        return self.segments.keep_spare(segment)

    def close(self) -> None:
        with self._guard:
            server, self._server = self._server, None
            readers: list[DataClient | rdma.RdmaHolder | rdma.RdmaReader] = [
                *self._readers.values(),
                *self._relays.values(),
            ]
            self._readers, self._relays = {}, {}
            readers += [thing for thing in (self._rdma_holder, self._rdma_reader) if thing is not None]
            self._rdma_holder = self._rdma_reader = None
        self.relayed.close()
        if server is not None:
            server.close()
        for reader in readers:
            reader.close()


def is_spread() -> bool:
    """Return whether processes of this run may be on other hosts, or are to behave as if they were."""
    from forge.store.client import TRANSPORTS

    if os.environ.get(TRANSPORTS):
        return True
    return any(address.startswith("tcp:") for address in environment()[RENDEZVOUS].split())


def own_address() -> str:
    """Return the address of this host as others of the run reach it: the one from which it reaches the run's root."""
    for address in environment()[RENDEZVOUS].split():
        if address.startswith("tcp:"):
            host, _, port = address.removeprefix("tcp:").rpartition(":")
            host = host.strip("[]")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, int(port)))  # sends nothing: it only chooses the route
                return str(probe.getsockname()[0])
    return "127.0.0.1"
