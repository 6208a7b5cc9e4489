"""Segments over TCP: `DataServer` in the process that holds them, `DataClient` wherever they are wanted.

The way between hosts that have no RDMA. Both ends prove that they know the run's secret (see `forge.runtime.sockets`,
which also encrypts where certificates are set up). Bytes go from the holder's mapping into the socket and from the
socket into the reader's own memory; nothing is copied in between and nothing is pickled.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

from forge.errors import ForgeError, StoreError
from forge.runtime.serialization import encode
from forge.store.transports import tcp_frames as frames
from forge.store.transports.base import Range, SegmentSource, as_bytes, batches
from forge.store.transports.tcp_server import DataServer
from forge.store.transports.tcp_streams import Lot, Refusal, Stream

__all__ = ["DataClient", "DataServer", "SegmentSource"]

STALL_S: Final = 60.0
"""How long a live peer may pause in the middle of a transfer."""
_IN_FLIGHT: Final = 4
"""Requests that are sent ahead on one stream, so that the holder never waits for the next."""
_LEAST_CHUNK: Final = 1 << 20

_Begin = Callable[[Stream, str, Sequence[Range]], None]
_Finish = Callable[[Stream, Sequence[Range]], None]


class DataClient:
    """Reads and writes ranges of the segments behind one data server, over a few connections that are kept.

    A connection that breaks raises a `StoreError` that names the address, the segment and what had not arrived; the
    next call dials again. Threads may share a client: their calls share its connections.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        *,
        num_streams: int = 2,
        chunk_bytes: int = 8 << 20,
        stall_s: float = STALL_S,
    ) -> None:
        if num_streams < 1 or not 1 <= chunk_bytes <= frames.MAX_BATCH or stall_s <= 0:
            raise StoreError(
                "a data client cannot work with these settings",
                path=f"DataClient({address})",
                value={"num_streams": num_streams, "chunk_bytes": chunk_bytes, "stall_s": stall_s},
                rule=f"num_streams >= 1, 1 <= chunk_bytes <= {frames.MAX_BATCH}, stall_s > 0",
                repair="leave them out: the defaults were measured",
            )
        self.address = address
        self._num_streams, self._chunk_bytes, self._stall_s = num_streams, chunk_bytes, stall_s
        self._data = Lot(address, secret, limit=num_streams, stall_s=stall_s)
        self._talk = Lot(address, secret, limit=num_streams, stall_s=stall_s)
        # The calling thread works one stream itself; there are never more others in use than these.
        self._helpers = ThreadPoolExecutor(max(1, num_streams - 1), "forge-data-client")

    def read(self, source: str, ranges: Sequence[Range]) -> None:
        """Fill each target from its offset in the segment `source`. Safe to call from several threads.

        Returns, or raises a `StoreError`, once nothing is written to the targets any more. After an error some of them
        may be filled. Whether the holder changed the bytes meanwhile is not checked here: hold a lease, or check
        afterwards.
        """
        transfer = _Transfer("reading", source, begin=Stream.ask_ranges, finish=Stream.take_ranges)
        self._move(transfer, as_bytes(source, ranges, writable=True))

    def write(self, name: str, ranges: Sequence[Range]) -> None:
        """Write each range's memory to its offset in a segment there. Returns when all of it has arrived."""
        transfer = _Transfer("writing", name, begin=Stream.send_ranges, finish=Stream.take_receipt)
        self._move(transfer, as_bytes(name, ranges, writable=False))

    def create(self, size: int) -> str:
        """Make a segment of `size` bytes there, to write to; its name."""
        if not 0 <= size < 1 << 63:
            raise StoreError("a segment cannot have this size", path=self.address, value=size, rule="0 <= size < 2**63")
        name: str = self._request(frames.Request(frames.CREATE, "", [(0, size)]), what="creating a segment")
        return name

    def ask(self, name: str, payload: Any, *, timeout_s: float | None = None) -> Any:
        """What the server's `on_ask(name, payload)` returns; what it raises is raised. For small things only."""
        body = encode(payload)
        if len(body) > frames.MAX_PICKLE or len(name.encode()) > frames.MAX_NAME:
            raise StoreError(
                f"a question to {self.address} is too large",
                path=name,
                value=len(body),
                rule=f"at most {frames.MAX_PICKLE} bytes, and {frames.MAX_NAME} bytes of name",
                repair="put tensors into a segment and read its ranges",
            )
        request = frames.Request(frames.ASK, name, body=len(body))
        return self._request(request, body, what=f"asking {name!r}", timeout_s=timeout_s)

    def close(self) -> None:
        """Close all connections; calls in progress raise. May be called twice."""
        self._data.close()
        self._talk.close()
        self._helpers.shutdown()

    def _request(self, request: frames.Request, body: bytes = b"", *, what: str, timeout_s: float | None = None) -> Any:
        with self._streams(self._talk, 1, what=lambda: what) as (stream,):
            stream.set_stall(timeout_s or self._stall_s)
            stream.send(request, body)
            return stream.take_value()

    def _move(self, transfer: _Transfer, ranges: list[Range]) -> None:
        if len(transfer.name.encode()) > frames.MAX_NAME:
            raise StoreError("a segment's name is too long", path=transfer.name, rule=f"{frames.MAX_NAME} bytes")
        total = sum(len(view) for _, view in ranges)
        # Every stream gets a share also of what is not large, but no share is so small that it is not worth a request.
        chunk = min(self._chunk_bytes, max(_LEAST_CHUNK, -(-total // self._num_streams)))
        todo = list(batches(ranges, batch_bytes=chunk, batch_ranges=frames.MAX_RANGES))
        transfer.load(todo, total, num_ahead=min(_IN_FLIGHT, -(-len(todo) // self._num_streams)))
        if not total:
            return
        wanted = min(self._num_streams, -(-total // chunk))
        with self._streams(self._data, wanted, what=transfer.describe) as streams:
            others: list[Future[None]] = []
            with contextlib.suppress(RuntimeError):  # closed this moment: the streams are hung up on, which `run` sees
                others.extend(self._helpers.submit(transfer.run, stream, streams) for stream in streams[1:])
            transfer.run(streams[0], streams)
            wait(others)  # nobody may touch the caller's memory once this returns
            if (outcome := transfer.failure or transfer.refusal) is not None:
                raise outcome

    @contextlib.contextmanager
    def _streams(self, lot: Lot, wanted: int, *, what: Callable[[], str]) -> Iterator[list[Stream]]:
        """Streams for one call. A refusal is raised as the server's exception, anything of the socket as StoreError."""
        streams: list[Stream] = []
        is_sound = False
        try:
            streams = lot.take(wanted)
            yield streams
            is_sound = True
        except Refusal as refusal:
            is_sound = True
            raise refusal.error from None
        except (OSError, frames.BadFrame) as error:
            verb = "lost" if streams else "could not open"
            why = error.message if isinstance(error, ForgeError) else error
            raise StoreError(
                f"{verb} the connection to the data server at {self.address} while {what()}: {why}",
                path=self.address,
                rule="the process that holds a segment lives, and can be reached, until it was read",
                repair="try again, which dials anew; if its process has ended, take another replica or version",
            ) from error
        finally:
            if streams:
                lot.give_back(streams, is_sound=is_sound)


class _Transfer:
    """Batches of ranges that several streams work on together, each taking the next one when it has room.

    `begin` and `finish` are methods of a stream: what is done ahead for a batch, and what completes it.
    """

    def __init__(self, verb: str, name: str, *, begin: _Begin, finish: _Finish) -> None:
        self.name = name
        self.refusal: Refusal | None = None
        self.failure: BaseException | None = None
        self._verb, self._begin, self._finish = verb, begin, finish
        self._todo: deque[list[Range]] = deque()
        self._total = self._done = self._num_ahead = 0
        self._lock = threading.Lock()

    def load(self, todo: list[list[Range]], total: int, *, num_ahead: int) -> None:
        """Say what is to be done, and how much of it one stream may take before it has finished any."""
        self._todo.extend(todo)
        self._total, self._num_ahead = total, num_ahead

    def describe(self) -> str:
        return f"{self._verb} segment {self.name!r}, with {self._done} of {self._total} bytes done"

    def run(self, stream: Stream, all_streams: Sequence[Stream]) -> None:
        """Work on one stream until nothing is left. If it breaks, the others are ended too."""
        under_way: deque[list[Range]] = deque()
        try:
            while True:
                while len(under_way) < self._num_ahead and (batch := self._next()) is not None:
                    self._begin(stream, self.name, batch)
                    under_way.append(batch)
                if not under_way:
                    return
                self._complete(stream, under_way.popleft())
        except BaseException as error:  # noqa: BLE001 - raised by the thread that called
            with self._lock:
                self.failure = self.failure or error
            self._todo.clear()
            for other in all_streams:
                other.hang_up()

    def _next(self) -> list[Range] | None:
        try:
            return self._todo.popleft()
        except IndexError:
            return None

    def _complete(self, stream: Stream, batch: list[Range]) -> None:
        try:
            self._finish(stream, batch)
        except Refusal as refusal:
            self.refusal = refusal
            self._todo.clear()
            return
        with self._lock:
            self._done += sum(len(view) for _, view in batch)
