"""The data server: hands out byte ranges of this process's segments, and takes them in where somebody pushes."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from forge.errors import StoreError
from forge.runtime import sockets
from forge.runtime.serialization import as_remote, decode, encode
from forge.store.transports import tcp_frames as frames
from forge.store.transports.base import SegmentSource, out_of_bounds

_log = logging.getLogger("forge.store")

MAX_CONNECTIONS: Final = 256
"""Connections of one server, each with its thread; more are hung up on."""
STALLED_S: Final = 60
"""A peer that takes nothing of what it asked for, for so long, is given up: its thread and its pin are wanted back."""
_SMALL: Final = 16 << 10
_JOIN_S: Final = 5.0
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_of_thread = threading.local()

OnAsk = Callable[[str, Any], Any]


class DataServer:
    """Serves the segments of this process to whoever knows the run's secret.

    It starts to listen in the constructor; `address` is where. Requests of one connection are answered in order, on a
    daemon thread of their own. What is wrong with a request is raised to whoever made it; the server goes on.

    Bytes are sent from a mapping of the segment rather than with sendfile: that was faster (by half, on loopback) and
    took less processor time, works under TLS, and what was handed to the kernel no longer changes with the segment.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        bind: str = "127.0.0.1",
        segments: SegmentSource,
        on_ask: OnAsk | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._secret, self._segments, self._on_ask, self._max_connections = secret, segments, on_ask, max_connections
        self._listener = sockets.listen(f"tcp:[{bind}]:0" if ":" in bind else f"tcp:{bind}:0")
        self.address = sockets.address_of(self._listener)
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._ended: list[threading.Thread] = []
        self._closing = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="forge-data-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Hang up on everybody and end all threads. An answer to `ask` that is being made is waited for a little."""
        with self._lock:
            self._closing.set()
            threads = [self._acceptor, *self._connections, *self._ended]
            for sock in (self._listener, *self._connections.values()):
                _hang_up(sock)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        self._listener.close()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

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
        with self._lock:
            self._ended = [thread for thread in self._ended if thread.is_alive()]
            if self._closing.is_set() or len(self._connections) >= self._max_connections:
                sock.close()
                return
            try:
                # TLS takes the socket over, so hanging up from another thread needs a handle of its own.
                handle = sock.dup()
                thread = threading.Thread(target=self._attend, args=(sock, handle), name="forge-data", daemon=True)
                thread.start()
            except (OSError, RuntimeError) as error:  # no more descriptors or threads; whoever dialled sees it hang up
                _log.warning("the data server at %s cannot take a connection: %s", self.address, error)
                sock.close()
                return
            self._connections[thread] = handle

    def _attend(self, sock: socket.socket, handle: socket.socket) -> None:
        """One connection, from the greeting to its end."""
        try:
            sock = sockets.accept(sock, self._secret)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_S * 1000)
            self._serve(sock)
        except (OSError, frames.BadFrame) as error:  # a stranger, or a peer that has gone: no concern of others
            _log.debug("a connection to the data server at %s ended: %s", self.address, error)
        finally:
            sock.close()
            handle.close()
            thread = threading.current_thread()
            with self._lock:
                del self._connections[thread]
                self._ended.append(thread)

    def _serve(self, sock: socket.socket) -> None:
        while (request := _next_request(sock)) is not None:
            if request.operation == frames.READ:
                self._send_ranges(sock, request)
            elif request.operation == frames.WRITE:
                self._take_ranges(sock, request)
            else:
                payload = frames.receive(sock, request.body)
                try:
                    answer = self._answer(request, payload)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is the requester's to hear
                    _send_error(sock, error)
                else:
                    _send_value(sock, answer)

    def _send_ranges(self, sock: socket.socket, request: frames.Request) -> None:
        with contextlib.ExitStack() as held:
            try:
                views = held.enter_context(self._views(request, writable=False))
            except Exception as error:  # noqa: BLE001 - as above
                _send_error(sock, error)
                return
            frames.send_views(sock, [frames.pack_answer(frames.DATA, request.num_bytes), *views])

    def _take_ranges(self, sock: socket.socket, request: frames.Request) -> None:
        with contextlib.ExitStack() as held:
            try:
                views = held.enter_context(self._views(request, writable=True))
            except Exception as error:  # noqa: BLE001 - as above
                frames.discard(sock, request.body)  # what comes after it is the next request
                _send_error(sock, error)
                return
            frames.receive_views(sock, views)
        _send_value(sock, encode(None))

    @contextlib.contextmanager
    def _views(self, request: frames.Request, *, writable: bool) -> Iterator[list[memoryview]]:
        """The memory of a request's ranges, while its segment is pinned."""
        descriptor, size = self._segments.open(request.name)
        try:
            whole = self._segments.mapped(request.name)
            yield _map(request.name, request.ranges, descriptor=descriptor, size=size, writable=writable, whole=whole)
        finally:
            self._segments.release(request.name)

    def _answer(self, request: frames.Request, payload: bytes) -> bytes:
        if request.operation == frames.CREATE:
            return encode(self._segments.create(request.num_bytes))
        if self._on_ask is None:
            raise StoreError(
                f"the data server at {self.address} answers no questions",
                path=self.address,
                value=request.name,
                rule="a server with on_ask",
                repair="ask the process that holds the segment's volume",
            )
        answer = encode(self._on_ask(request.name, decode(payload)))
        if len(answer) > frames.MAX_PICKLE:
            raise _too_large(request.name, len(answer))
        return answer


def _next_request(sock: socket.socket) -> frames.Request | None:
    try:
        return frames.receive_request(sock)
    except frames.BadFrame as error:
        _send_error(sock, error)
        raise


def _map(
    name: str,
    ranges: Sequence[tuple[int, int]],
    *,
    descriptor: int,
    size: int,
    writable: bool,
    whole: memoryview | None = None,
) -> list[memoryview]:
    """The memory of the ranges, back to back: views of a mapping that lives as long as they do.

    Small ranges are copied together instead: a page fault for each would take longer. So it is with large ones, by half
    of the time that sending them takes, and `whole`, a mapping whose pages are there, is used where there is one.
    """
    for offset, nbytes in ranges:
        if offset + nbytes > size:
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
    """The bytes of small ranges in one piece of memory, which this thread's next call uses again."""
    total = sum(end - start for start, end in wanted)
    scratch: memoryview | None = getattr(_of_thread, "scratch", None)
    if scratch is None or len(scratch) < total:
        scratch = _of_thread.scratch = memoryview(bytearray(total))
    at = 0
    for start, end in wanted:
        os.preadv(descriptor, [scratch[at : at + end - start]], start)
        at += end - start
    return scratch[:total]


def _send_value(sock: socket.socket, answer: bytes) -> None:
    frames.send_views(sock, [frames.pack_answer(frames.VALUE, len(answer)), answer])


def _send_error(sock: socket.socket, error: Exception) -> None:
    answer = encode(as_remote(error))
    if len(answer) > frames.MAX_PICKLE:
        answer = encode(as_remote(_too_large(type(error).__name__, len(answer))))
    frames.send_views(sock, [frames.pack_answer(frames.ERROR, len(answer)), answer])


def _too_large(name: str, size: int) -> StoreError:
    return StoreError(
        f"the answer to {name!r} is too large to travel",
        path=name,
        value=size,
        rule=f"at most {frames.MAX_PICKLE} bytes",
        repair="put tensors into a segment and read its ranges",
    )


def _hang_up(sock: socket.socket) -> None:
    """End a connection, or a listener, that another thread may be blocked on."""
    with contextlib.suppress(OSError):  # it has ended by itself
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
