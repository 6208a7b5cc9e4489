"""Segments over TCP, between hosts that have no RDMA: reads and writes ranges of the segments behind a `DataServer`.

Bytes go from the holder's mapping into the socket and from the socket into the reader's own memory; nothing is copied
in between and nothing is pickled.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

from forge.errors import ForgeError, StoreError
from forge.runtime import framing, sockets
from forge.runtime.serialization import decode, encode
from forge.store.transports import Range, as_bytes, batches
from forge.store.transports.tcp_server import ASK, DATA, ERROR, MAX_RANGES, READ, WRITE, pack_table, shut_down

STALL_S: Final = 60.0
"""How long a live peer may pause in the middle of a transfer."""
_CONNECT_S: Final = 10.0
_IN_FLIGHT: Final = 4
"""Requests that are sent ahead on one connection, so that the holder never waits for the next."""
_LEAST_CHUNK: Final = 1 << 20


class Refusal(Exception):
    """Carries the exception that the server answered with: the request failed, the connection is in order."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class Connection:
    """One connection. Requests may be sent ahead; answers come in their order. For one thread at a time."""

    def __init__(self, address: str, secret: bytes, *, stall_s: float) -> None:
        self._sock = sockets.connect(address, secret, timeout_s=min(_CONNECT_S, stall_s))
        self.address = address
        # A peer that pauses is waited for as long as `stall_s` says; keepalive alone notices that a host has gone.
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self._stall_s = stall_s
        limit = struct.pack("ll", int(stall_s), max(1, int(stall_s % 1 * 1e6)))  # all zero would mean no limit
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def ask_ranges(self, name: str, batch: Sequence[Range]) -> None:
        """Request the bytes of a batch; `take_ranges` receives them."""
        self._send(READ, name, batch)

    def take_ranges(self, batch: Sequence[Range]) -> None:
        """Receive the bytes that were requested, into their targets."""
        with self._limited():
            kind, size = self._receive_header()
            if kind != DATA or size != sum(len(target) for _, target in batch):
                raise sockets.ConnectionFailure("an answer is not as long as the requested ranges", value=size)
            framing.receive_views(self._sock, [target for _, target in batch])

    def send_ranges(self, name: str, batch: Sequence[Range]) -> None:
        """Send the bytes of a batch; `take_receipt` receives the acknowledgement."""
        self._send(WRITE, name, batch, *(source for _, source in batch))

    def take_receipt(self, batch: Sequence[Range]) -> None:
        """Receive the acknowledgement of a batch that was sent."""
        self._take_value()

    def ask(self, question: bytes) -> Any:
        """Return the server's answer to a question."""
        with self._limited():
            framing.send(self._sock, ASK, 0, question)
        return self._take_value()

    def shut_down(self) -> None:
        """End the connection while another thread may use it."""
        shut_down(self._sock)

    def close(self) -> None:
        self._sock.close()

    def _send(self, kind: int, name: str, batch: Sequence[Range], *data: memoryview) -> None:
        table = pack_table(name, batch)
        with self._limited():
            framing.send(self._sock, kind, len(table), table, *data)

    def _take_value(self) -> Any:
        with self._limited():
            _, size = self._receive_header()
            return self._value(framing.receive_exactly(self._sock, size))

    def _receive_header(self) -> tuple[int, int]:
        """Return the kind and size of the next answer. Raise `Refusal` if it is an error."""
        head = framing.receive_header(self._sock)
        if head is None:
            raise ConnectionError("the peer closed the connection")
        kind, _, size = head
        if kind == ERROR:
            raise Refusal(self._value(framing.receive_exactly(self._sock, size)))
        return kind, size

    def _value(self, data: bytes) -> Any:
        try:
            return decode(data)
        except Exception as error:
            raise Refusal(
                StoreError(
                    f"the answer of the data server at {self.address} cannot be unpickled: {error!r}",
                    path=self.address,
                    rule="a value or an exception whose class can be imported in this process",
                )
            ) from error

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        try:
            yield
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise TimeoutError(f"nothing moved for {self._stall_s:g} s") from error


class ConnectionPool:
    """At most `limit` connections to one address, opened when needed and kept. Safe for threads."""

    def __init__(self, address: str, secret: bytes, *, limit: int, stall_s: float) -> None:
        self.address = address
        self._secret, self._limit, self._stall_s = secret, limit, stall_s
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._in_use: set[Connection] = set()
        self._num_taken = 0
        self._is_closed = False

    def take(self, at_most: int = 1) -> list[Connection]:
        """Return between one and `at_most` connections, for the caller alone until `put_back`; wait for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_taken < self._limit)
            self._check_open()
            number = min(at_most, self._limit - self._num_taken)
            self._num_taken += number
            taken = [self._idle.pop() for _ in range(min(number, len(self._idle)))]
        try:
            while len(taken) < number:
                taken.append(Connection(self.address, self._secret, stall_s=self._stall_s))
            with self._changed:
                self._check_open()
                self._in_use.update(taken)
        except BaseException:
            self.put_back(taken, number, is_sound=False)
            raise
        return taken

    def put_back(self, connections: Sequence[Connection], number: int, *, is_sound: bool) -> None:
        """Return what was taken. Where one is broken the others of the pool are not trusted either: all are closed."""
        with self._changed:
            self._num_taken -= number
            self._in_use.difference_update(connections)
            self._idle.extend(connections)
            broken = []
            if self._is_closed or not is_sound:
                broken, self._idle = self._idle, []
            self._changed.notify_all()
        for connection in broken:
            connection.close()

    def close(self) -> None:
        """Close the idle connections and end those that are in use."""
        with self._changed:
            self._is_closed = True
            for connection in self._in_use:
                connection.shut_down()
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for connection in idle:
            connection.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"the data client of {self.address} was closed", path=self.address)


class DataClient:
    """Reads and writes ranges of the segments behind one data server, over a few connections that are kept.

    A connection that breaks raises a `StoreError` that names the address, the segment and what had not arrived; the
    next call connects again. Threads may share a client: their calls share its connections.
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
        self.address = address
        self._num_streams, self._chunk_bytes = num_streams, chunk_bytes
        self._data = ConnectionPool(address, secret, limit=num_streams, stall_s=stall_s)
        self._questions = ConnectionPool(address, secret, limit=num_streams, stall_s=stall_s)
        # The calling thread works one connection itself; there are never more others in use than these.
        self._helpers = ThreadPoolExecutor(max(1, num_streams - 1), "forge-data-client")

    def read(self, source: str, ranges: Sequence[Range]) -> None:
        """Fill each target from its offset in the segment `source`. Safe to call from several threads.

        Returns, or raises a `StoreError`, once nothing is written to the targets any more. After an error some of them
        may be filled. Whether the holder changed the bytes meanwhile is not checked here: hold a lease, or check
        afterwards.
        """
        transfer = _Transfer("reading", source, begin=Connection.ask_ranges, finish=Connection.take_ranges)
        self._move(transfer, as_bytes(source, ranges, writable=True))

    def write(self, name: str, ranges: Sequence[Range]) -> None:
        """Write each range's memory to its offset in a segment there. Returns when all of it has arrived."""
        transfer = _Transfer("writing", name, begin=Connection.send_ranges, finish=Connection.take_receipt)
        self._move(transfer, as_bytes(name, ranges, writable=False))

    def ask(self, name: str, payload: Any) -> Any:
        """Return what the server's `on_ask(name, payload)` returns; what it raises is raised. For small values only."""
        question = encode((name, payload))
        with self._connections(self._questions, 1, what=lambda: f"asking {name!r}") as (connection,):
            return connection.ask(question)

    def close(self) -> None:
        """Close all connections; calls in progress raise. May be called twice."""
        self._data.close()
        self._questions.close()
        self._helpers.shutdown()

    def _move(self, transfer: _Transfer, ranges: list[Range]) -> None:
        total = sum(len(view) for _, view in ranges)
        # Every connection gets a share also of what is not large, but no share is too small to be worth a request.
        chunk = min(self._chunk_bytes, max(_LEAST_CHUNK, -(-total // self._num_streams)))
        todo = list(batches(ranges, batch_bytes=chunk, batch_ranges=MAX_RANGES))
        transfer.load(todo, total, num_ahead=min(_IN_FLIGHT, -(-len(todo) // self._num_streams)))
        if not total:
            return
        wanted = min(self._num_streams, -(-total // chunk))
        with self._connections(self._data, wanted, what=transfer.describe) as connections:
            others: list[Future[None]] = []
            with contextlib.suppress(RuntimeError):  # closed this moment: the connections are shut, which `run` sees
                others.extend(self._helpers.submit(transfer.run, one, connections) for one in connections[1:])
            transfer.run(connections[0], connections)
            wait(others)  # no thread may touch the caller's memory once this returns
            if (failure := transfer.failure or transfer.refusal) is not None:
                raise failure

    @contextlib.contextmanager
    def _connections(self, pool: ConnectionPool, wanted: int, *, what: Callable[[], str]) -> Iterator[list[Connection]]:
        """Yield connections for one call. A refusal is raised as the server's exception, a socket's as StoreError."""
        taken: list[Connection] = []
        is_sound = False
        try:
            taken = pool.take(wanted)
            yield taken
            is_sound = True
        except Refusal as refusal:
            is_sound = True
            raise refusal.error from None
        except OSError as error:
            verb = "lost" if taken else "could not open"
            why = error.message if isinstance(error, ForgeError) else error
            raise StoreError(
                f"{verb} the connection to the data server at {self.address} while {what()}: {why}",
                path=self.address,
                rule="the process that holds a segment lives, and can be reached, until it was read",
                repair="try again, which connects anew; if its process has ended, take another replica or version",
            ) from error
        finally:
            if taken:
                pool.put_back(taken, len(taken), is_sound=is_sound)


class _Transfer:
    """Batches of ranges that several connections work on together, each taking the next one when it has room.

    `begin` and `finish` are methods of a connection: what is done ahead for a batch, and what completes it.
    """

    def __init__(
        self,
        verb: str,
        name: str,
        *,
        begin: Callable[[Connection, str, Sequence[Range]], None],
        finish: Callable[[Connection, Sequence[Range]], None],
    ) -> None:
        self.refusal: Refusal | None = None
        self.failure: BaseException | None = None
        self._verb, self._name, self._begin, self._finish = verb, name, begin, finish
        self._todo: deque[list[Range]] = deque()
        self._total = self._done = self._num_ahead = 0
        self._lock = threading.Lock()

    def load(self, todo: list[list[Range]], total: int, *, num_ahead: int) -> None:
        """Set what is to be done, and how much of it one connection may take before it has finished any."""
        self._todo.extend(todo)
        self._total, self._num_ahead = total, num_ahead

    def describe(self) -> str:
        return f"{self._verb} segment {self._name!r}, with {self._done} of {self._total} bytes done"

    def run(self, connection: Connection, all_connections: Sequence[Connection]) -> None:
        """Work on one connection until nothing is left. If it breaks, the others are ended too."""
        under_way: deque[list[Range]] = deque()
        try:
            while True:
                while len(under_way) < self._num_ahead and (batch := self._next()) is not None:
                    self._begin(connection, self._name, batch)
                    under_way.append(batch)
                if not under_way:
                    return
                self._complete(connection, under_way.popleft())
        except BaseException as error:  # noqa: BLE001 - raised by the thread that called
            with self._lock:
                self.failure = self.failure or error
            self._todo.clear()
            for other in all_connections:
                other.shut_down()

    def _next(self) -> list[Range] | None:
        try:
            return self._todo.popleft()
        except IndexError:
            return None

    def _complete(self, connection: Connection, batch: list[Range]) -> None:
        try:
            self._finish(connection, batch)
        except Refusal as refusal:
            self.refusal = refusal
            self._todo.clear()
            return
        with self._lock:
            self._done += sum(len(view) for _, view in batch)
