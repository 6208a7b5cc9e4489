"""A process's connection to the rendezvous server: requests from any thread or event loop.

One thread for each connection receives, and sends what the socket did not accept at once: making a request never blocks
on the network.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import os
import select
import socket
import ssl
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from forge.errors import CallTimeout
from forge.runtime import framing, sockets
from forge.runtime.serialization import decode, encode
from forge.runtime.sockets import ConnectionFailure

_log = logging.getLogger("forge.runtime")
_ENDED = "the run has ended"
_LOST = "the run's controller was lost, or closed the connection"
_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

JOIN: Final = 1
REQUEST: Final = 2
NOTIFY: Final = 3
CANCEL: Final = 4
REPLY: Final = 5
ERROR: Final = 6
PUSH: Final = 7
CLOSE: Final = 8
"""The kinds of frames: a process sends the first four, the server the others."""

open_connections: weakref.WeakSet[Connection]


class Connection:
    """A connection to one registry of the rendezvous server. All methods may be called from any thread."""

    def __init__(self, sock: socket.socket, *, registry: str) -> None:
        self.registry, self.pid, self.run_id = registry, os.getpid(), ""
        self._sock = sock
        self._sock.setblocking(False)
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._lock = threading.Lock()
        self._outbox: deque[bytes | memoryview] = deque()
        self._pending: dict[int, concurrent.futures.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._ended: str | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._on_push: list[Callable[[Any], None]] = []
        self._on_close: list[Callable[[], None]] = []
        self._undelivered: list[Any] = []
        self._thread = threading.Thread(target=self._run, name=f"forge-rendezvous-{registry}", daemon=True)
        open_connections.add(self)
        self._thread.start()

    @classmethod
    def open(
        cls, addresses: Sequence[str], secret: bytes, *, registry: str, host: str = "", timeout_s: float = 30.0
    ) -> Connection:
        """Connect to the first address that answers, and join a registry. Raise what its `joined` raises."""
        connection = cls(_connect_first(addresses, secret), registry=registry)
        try:
            joined = connection._post(JOIN, encode((registry, os.getpid(), host)))
            connection.run_id, _ = joined.result(timeout_s)
        except concurrent.futures.TimeoutError:
            connection.close()
            raise ConnectionFailure(f"the registry {registry!r} did not open within {timeout_s:g} s") from None
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def is_open(self) -> bool:
        """Whether requests can be made. Once False it stays so; a forked child needs its own connection."""
        return self._ended is None and self.pid == os.getpid()

    def request(self, name: str, body: Any = None) -> concurrent.futures.Future[Any]:
        """Send a request; the future gets the reply, or what the registry raised, with its traceback as a note.

        Cancelling the future cancels the request. Requests start in the order they were made. A body that cannot be
        encoded raises here; a connection that has ended raises `ConnectionFailure`, here or through the future.
        """
        return self._post(REQUEST, encode((name, body)))

    def call(self, name: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """Send a request and wait. Past `timeout_s` the request is cancelled and `CallTimeout` raised."""
        if threading.current_thread() is self._thread:
            raise ConnectionFailure(
                "a connection cannot wait for a reply in its own thread",
                path=f"Connection({self.registry!r}).call",
                rule="callbacks of pushes and of requests must not block",
                repair="use request() with a callback, or hand the work to another thread",
            )
        future = self.request(name, body)
        done, _ = concurrent.futures.wait([future], timeout_s)
        if not done and future.cancel():
            raise CallTimeout(f"{self.registry}: {name!r} was not answered within {timeout_s:g} s", path=name)
        return future.result()

    async def call_async(self, name: str, body: Any = None) -> Any:
        """Send a request and await the reply, on any event loop. Cancelling the caller cancels the request."""
        return await asyncio.wrap_future(self.request(name, body))

    def notify(self, name: str, body: Any = None) -> None:
        """Send a message that gets no reply; in order with requests."""
        self._send(framing.pack(NOTIFY, next(self._numbers), encode((name, body))))

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call back once, on some thread, when the connection has closed; at once if it has."""
        with self._lock:
            if self._ended is None:
                self._on_close.append(callback)
                return
        callback()

    def on_push(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(body)` for each pushed message, in the connection's thread: it must not block.

        Messages that came before the first callback was given are kept for it.
        """
        with self._lock:
            self._on_push.append(callback)
            if self._undelivered and self._ended is None:
                os.eventfd_write(self._wake, 1)  # the thread delivers them, before any newer one

    def close(self) -> None:
        """Close the connection. Unanswered requests raise `ConnectionFailure`."""
        self._end("this process closed the connection")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _post(self, kind: int, body: bytes) -> concurrent.futures.Future[Any]:
        number = next(self._numbers)
        pieces = framing.pack(kind, number, body)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._pending[number] = future
        try:
            self._send(pieces)
        except BaseException:
            self._pending.pop(number, None)
            raise
        future.add_done_callback(lambda done: self._forget(number) if done.cancelled() else None)
        return future

    def _forget(self, number: int) -> None:
        if self._pending.pop(number, None) is not None and self.is_open:
            try:
                self._send(framing.pack(CANCEL, number, b""))
            except ConnectionFailure:
                return  # it has just ended, and every request with it

    def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        if self.pid != os.getpid():
            raise ConnectionFailure(
                "this connection was opened before the process was forked",
                path=f"Connection({self.registry!r})",
                repair="call connect() again in the child",
            )
        with self._lock:
            if self._ended is not None:
                raise self._error()
            was_idle = not self._outbox
            self._outbox.extend(pieces)
            if was_idle:
                self._flush()
                if self._outbox:
                    os.eventfd_write(self._wake, 1)  # the thread sends the rest

    def _flush(self) -> None:
        """Send what the socket takes now. A broken connection is left to the thread, which sees it too. Locked."""
        try:
            while self._outbox:
                piece = self._outbox[0]
                sent = self._sock.send(piece)
                if sent == len(piece):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = memoryview(piece)[sent:]
        except _WAIT:
            return
        except OSError:
            self._outbox.clear()

    def _run(self) -> None:
        reader, poll = framing.FrameReader(), select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._sock, select.POLLIN)
        reason, is_writing = _LOST, False
        try:
            while self._ended is None:
                if is_writing != bool(self._outbox):
                    is_writing = not is_writing
                    poll.modify(self._sock, select.POLLIN | (select.POLLOUT if is_writing else 0))
                events = dict(poll.poll())
                if self._wake in events:
                    os.eventfd_read(self._wake)
                    self._deliver_pushed()
                if is_writing or self._outbox:
                    with self._lock:
                        self._flush()
                if events.keys() - {self._wake} and not self._receive(reader):
                    break
        except _ServerClosed:
            reason = _ENDED
        except (OSError, ValueError) as error:
            reason = f"{_LOST} ({error})"
        finally:
            self._end(reason)
            self._release()

    def _receive(self, reader: framing.FrameReader) -> bool:
        """Receive what has arrived; False at the end of the stream."""
        while True:
            try:
                if self._is_tls:  # one at a time may use a TLS connection
                    with self._lock:
                        count = self._sock.recv_into(reader.buffer())
                else:
                    count = self._sock.recv_into(reader.buffer())
            except _WAIT:
                return True
            if not count:
                return False
            for kind, number, body in reader.advance(count):
                self._take(kind, number, body)
            if not self._is_tls:
                return True

    def _take(self, kind: int, number: int, body: memoryview) -> None:
        if kind == CLOSE:
            raise _ServerClosed
        try:
            value, error = decode(body), None
        except Exception as unreadable:  # noqa: BLE001 - the requester gets it
            value, error = None, unreadable
        if kind == PUSH:
            self._receive_push(value, error)
            return
        if kind == ERROR and error is None:
            error = value
        future = self._pending.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _receive_push(self, body: Any, error: Exception | None) -> None:
        if error is not None:
            _log.error("a message that was pushed to %r cannot be read", self.registry, exc_info=error)
            return
        self._undelivered.append(body)
        self._deliver_pushed()

    def _deliver_pushed(self) -> None:
        """Pass undelivered messages to the callbacks, once there are any. On the connection's thread alone."""
        with self._lock:
            callbacks = list(self._on_push)
            bodies, self._undelivered = (self._undelivered, []) if callbacks else ([], self._undelivered)
        for body in bodies:
            for callback in callbacks:
                _call(callback, body)

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
            self._outbox.clear()
            os.eventfd_write(self._wake, 1)
        for number in list(self._pending):
            future = self._pending.pop(number, None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(self._error())
        for callback in self._on_close:
            _call(callback)

    def _release(self) -> None:
        """Close the descriptors, as the last act of the only thread that uses them."""
        with self._lock:
            self._sock.close()
            os.close(self._wake)

    def _error(self) -> ConnectionFailure:
        return ConnectionFailure(f"no answer from {self.registry!r}: {self._ended}", path=f"registry {self.registry!r}")

    def abandon(self) -> None:
        """Close a forked child's copy of the socket, so that the server sees the parent's end."""
        if self._ended is None:
            self._sock.close()
            os.close(self._wake)


class _ServerClosed(Exception):
    """The server closes: the run has ended."""


open_connections = weakref.WeakSet()


def _connect_first(addresses: Sequence[str], secret: bytes) -> socket.socket:
    failures = []
    for address in addresses:
        try:
            return sockets.connect(address, secret)
        except ConnectionFailure as error:
            failures.append(error.message)
    raise ConnectionFailure(
        "the rendezvous server of this run cannot be reached: " + ("; ".join(failures) or "no address is known"),
        path="FORGE_RENDEZVOUS",
        value=" ".join(addresses),
        rule="the run's root controller listens there as long as the run lasts",
        repair="the run has ended, or its controller was lost; across hosts, check that launcher.bind can be reached",
    )


def _call(callback: Callable[..., None], *args: Any) -> None:
    try:
        callback(*args)
    except Exception:  # noqa: BLE001 - the connection continues
        _log.exception("a callback of a connection failed")
