"""The data server: hands out byte ranges of this process's segments, and receives them where a publisher pushes.

Requests and answers are frames of `forge.runtime.framing`. A READ or WRITE has the segment's name and its ranges,
pickled, at the beginning of its body; the frame's number is the length of that table. The bytes themselves are never
pickled. Both ends have proved that they know the run's secret before the first frame.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from forge.errors import StoreError
from forge.runtime import framing, sockets
from forge.runtime.accepting import GRACE_S, RefusalCount
from forge.runtime.serialization import as_remote, decode, encode
from forge.store.transports import Range, SegmentSource, out_of_bounds

_log = logging.getLogger("forge.store")

READ, WRITE, ASK, DATA, VALUE, ERROR = range(1, 7)
"""The kinds of frames: three requests and three answers."""
MAX_RANGES: Final = 1000
"""Ranges of one request: with the header they fit into one scatter/gather call (1024 on Linux)."""
MAX_TABLE: Final = 1 << 20
MAX_CONNECTIONS: Final = 256
"""Connections of one server, each with its thread; more are closed."""
MAX_WAITING: Final = 64
"""Connections that have not authenticated, besides those that have: one more ends the oldest."""
STALLED_S: Final = 60
"""A peer that takes nothing of what it asked for, for so long, is dropped: its thread and its pin are needed."""
_SMALL: Final = 16 << 10
_JOIN_S: Final = 5.0
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_of_thread = threading.local()

OnAsk = Callable[[str, Any], Any]


def pack_table(name: str, ranges: Sequence[Range]) -> bytes:
    """Return the beginning of a READ or WRITE request: the segment's name, and offset and length of each range."""
    return pickle.dumps((name, [(offset, len(memory)) for offset, memory in ranges]))


class DataServer:
    """Serves the segments of this process to processes that know the run's secret.

    It starts to listen in the constructor; `address` is where. Requests of one connection are answered in order, on a
    daemon thread of their own. What is wrong with a request is raised to the process that made it.

    Bytes are sent from a mapping of the segment rather than with sendfile: that was faster (by half, on loopback) and
    took less processor time, works under TLS, and what was handed to the kernel no longer changes with the segment.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        bind: str = "127.0.0.1",
        segments: SegmentSource,
        on_ask: OnAsk,
        max_connections: int = MAX_CONNECTIONS,
        insecure: bool = False,
    ) -> None:
        self._secret, self._segments, self._on_ask, self._max_connections = secret, segments, on_ask, max_connections
        place = f"tcp:[{bind}]:0" if ":" in bind else f"tcp:{bind}:0"
        self._listener = sockets.listen(place, insecure=insecure)
        self.address = sockets.address_of(self._listener)
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._waiting: dict[threading.Thread, float] = {}
        self._admitted: set[threading.Thread] = set()
        self._refusals = RefusalCount(f"connections to the data server at {self.address}", _log)
        self._ended: list[threading.Thread] = []
        self._closing = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="forge-data-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Close all connections and end all threads. An answer that is being made is waited for a little."""
        with self._lock:
            self._closing.set()
            threads = [self._acceptor, *self._connections, *self._ended]
            for sock in (self._listener, *self._connections.values()):
                shut_down(sock)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set() and error.errno in _NO_ROOM:
                    _log.warning("the data server at %s cannot take a connection: %s", self.address, error)
                    self._closing.wait(0.1)
                continue
            self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        self._make_room()
        with self._lock:
            self._ended = [thread for thread in self._ended if thread.is_alive()]
            if self._closing.is_set() or self._is_full():
                sock.close()
                return
            try:
                # TLS takes the socket over, so closing it from another thread needs a handle of its own.
                handle = sock.dup()
                thread = threading.Thread(target=self._attend, args=(sock, handle), name="forge-data", daemon=True)
                thread.start()
            except (OSError, RuntimeError) as error:  # no more descriptors or threads; the client sees it closed
                _log.warning("the data server at %s cannot take a connection: %s", self.address, error)
                sock.close()
                return
            self._connections[thread] = handle
            self._waiting[thread] = time.monotonic()

    def _is_full(self) -> bool:
        return len(self._admitted) >= self._max_connections

    def _make_room(self) -> None:
        """End the oldest connection that has not authenticated if too many have not, once it had its chance."""
        while not self._closing.is_set():
            with self._lock:
                if len(self._waiting) < MAX_WAITING:
                    return
                thread, since = next(iter(self._waiting.items()))
                left = since + GRACE_S - time.monotonic()
                if left <= 0:
                    del self._waiting[thread]
                    shut_down(self._connections[thread])
                    return
            self._closing.wait(min(left, 0.05))  # another one may authenticate, or end, meanwhile

    def _admit(self) -> bool:
        """Note that the peer of this thread has authenticated; False if there are as many as there may be."""
        with self._lock:
            if self._is_full() or self._waiting.pop(threading.current_thread(), None) is None:
                return False
            self._admitted.add(threading.current_thread())
            return True

    def _attend(self, sock: socket.socket, handle: socket.socket) -> None:
        """Serve one connection, from the handshake to its end."""
        try:
            sock = self._authenticated(sock)
            if not self._admit():
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_S * 1000)
            self._serve(sock)
        except OSError as error:  # a stranger, or a peer that has gone: it concerns no other connection
            _log.debug("a connection to the data server at %s ended: %s", self.address, error)
        finally:
            sock.close()
            handle.close()
            thread = threading.current_thread()
            with self._lock:
                del self._connections[thread]
                self._waiting.pop(thread, None)
                self._admitted.discard(thread)
                self._ended.append(thread)

    def _authenticated(self, sock: socket.socket) -> socket.socket:
        try:
            return sockets.accept(sock, self._secret)
        except OSError as error:
            self._refusals.add(error)
            raise

    def _serve(self, sock: socket.socket) -> None:
        try:
            while (head := framing.receive_header(sock)) is not None:
                kind, table_size, size = head
                if kind == ASK:
                    self._answer(sock, framing.receive_exactly(sock, size))
                else:
                    self._move(sock, kind, table_size, size)
        except sockets.ConnectionFailure as error:  # where the next frame begins is not known any more
            _send_error(sock, error)
            raise

    def _answer(self, sock: socket.socket, question: bytes) -> None:
        try:
            answer = encode(self._on_ask(*decode(question)))
        except Exception as error:  # noqa: BLE001 - raised in the process that asked
            _send_error(sock, error)
        else:
            framing.send(sock, VALUE, 0, answer)

    def _move(self, sock: socket.socket, kind: int, table_size: int, size: int) -> None:
        """Send the ranges of a READ, or receive those of a WRITE."""
        num_bytes = size - table_size
        if kind not in (READ, WRITE) or table_size > MAX_TABLE or num_bytes < 0:
            raise _bad_request(kind=kind, table=table_size, body=size)
        name, ranges = decode(framing.receive_exactly(sock, table_size))
        total = sum(nbytes for _, nbytes in ranges)
        if len(ranges) > MAX_RANGES or total > framing.MAX_BODY or num_bytes != (total if kind == WRITE else 0):
            raise _bad_request(kind=kind, ranges=len(ranges), bytes=total, body=num_bytes)
        with contextlib.ExitStack() as pinned:
            try:
                if kind == READ:
                    self._segments.wait_for(name, ranges)
                views = pinned.enter_context(self._views(name, ranges, writable=kind == WRITE))
            except Exception as error:  # noqa: BLE001 - raised in the process that asked
                framing.discard(sock, num_bytes)  # what comes after it is the next request
                _send_error(sock, error)
                return
            if kind == READ:
                framing.send(sock, DATA, 0, *views)
                return
            framing.receive_views(sock, views)
        framing.send(sock, VALUE, 0, encode(None))

    @contextlib.contextmanager
    def _views(self, name: str, ranges: Sequence[tuple[int, int]], *, writable: bool) -> Iterator[list[memoryview]]:
        """Yield the memory of a request's ranges, while its segment is pinned."""
        descriptor, size = self._segments.open(name)
        try:
            whole = self._segments.mapped(name)
            yield _map(name, ranges, descriptor=descriptor, size=size, writable=writable, whole=whole)
        finally:
            self._segments.release(name)


def _bad_request(**found: int) -> sockets.ConnectionFailure:
    return sockets.ConnectionFailure(
        "a request breaks the protocol of data servers",
        value=found,
        rule=f"at most {MAX_RANGES} ranges of {framing.MAX_BODY} bytes; the body of a write is as long as its ranges",
        repair="run the same version of torchforge everywhere",
    )


def _map(
    name: str,
    ranges: Sequence[tuple[int, int]],
    *,
    descriptor: int,
    size: int,
    writable: bool,
    whole: memoryview | None = None,
) -> list[memoryview]:
    """Return the memory of the ranges, back to back: views of a mapping that lives as long as they do.

    Small ranges are copied together instead: a page fault for each would take longer. So it is with large ones, by half
    of the time that sending them takes, and `whole`, a mapping whose pages are there, is used where there is one.
    """
    for offset, nbytes in ranges:
        if offset < 0 or offset + nbytes > size:
            raise out_of_bounds(name, offset, nbytes, size=size)
    wanted = [(offset, offset + nbytes) for offset, nbytes in ranges if nbytes]
    if not wanted:
        return []
    if os.fstat(descriptor).st_size < size:  # touching memory that has no file behind it would kill this process
        raise StoreError(f"segment {name!r} is shorter than its {size} bytes", path=name)
    if not writable and sum(end - start for start, end in wanted) <= _SMALL * len(wanted):
        return [_gather(wanted, descriptor)]
    if whole is not None and not (writable and whole.readonly):
        return [whole[start:end] for start, end in wanted]
    first = min(start for start, _ in wanted) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    last = max(end for _, end in wanted)
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    window = memoryview(mmap.mmap(descriptor, last - first, mmap.MAP_SHARED, access, offset=first))
    return [window[start - first : end - first] for start, end in wanted]


def _gather(wanted: Sequence[tuple[int, int]], descriptor: int) -> memoryview:
    """Copy small ranges into one buffer, which this thread's next call uses again."""
    total = sum(end - start for start, end in wanted)
    scratch: memoryview | None = getattr(_of_thread, "scratch", None)
    if scratch is None or len(scratch) < total:
        scratch = _of_thread.scratch = memoryview(bytearray(total))
    at = 0
    for start, end in wanted:
        os.preadv(descriptor, [scratch[at : at + end - start]], start)
        at += end - start
    return scratch[:total]


def _send_error(sock: socket.socket, error: Exception) -> None:
    framing.send(sock, ERROR, 0, encode(as_remote(error)))


def shut_down(sock: socket.socket) -> None:
    """End a connection, or a listener, that another thread may be blocked on."""
    with contextlib.suppress(OSError):  # it has ended already
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
