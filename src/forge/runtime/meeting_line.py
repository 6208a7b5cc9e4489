"""A line to the meeting point: requests from any thread or event loop of a process. This is the side of the processes.

One thread for each line receives, and sends what the socket did not take at once: making a request never blocks on the
network.
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
from typing import Any

from forge.errors import CallTimeout
from forge.runtime import frames, lines
from forge.runtime.lines import LineError
from forge.runtime.wire import decode, encode

_log = logging.getLogger("forge.runtime")
_ENDED = "the run has ended"
_LOST = "the run's controller was lost, or closed the connection"
_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

open_lines: weakref.WeakSet[Line]


class Line:
    """One process's connection to one desk of the meeting point. All methods may be called from any thread."""

    def __init__(self, sock: socket.socket, *, service: str) -> None:
        self.service, self.pid, self.run_id = service, os.getpid(), ""
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
        self._unheard: list[Any] = []
        self._thread = threading.Thread(target=self._run, name=f"forge-line-{service}", daemon=True)
        open_lines.add(self)
        self._thread.start()

    @classmethod
    def open(
        cls, addresses: Sequence[str], secret: bytes, *, service: str, host: str = "", timeout_s: float = 30.0
    ) -> Line:
        """Connect to the first address that answers, and join a desk. What the desk's `joined` raises is raised."""
        line = cls(_dial_first(addresses, secret), service=service)
        try:
            joined = line._post(frames.JOIN, encode((service, os.getpid(), host)))
            line.run_id, _ = joined.result(timeout_s)
        except concurrent.futures.TimeoutError:
            line.close()
            raise LineError(f"the meeting point did not open its desk {service!r} within {timeout_s:g} s") from None
        except BaseException:
            line.close()
            raise
        return line

    @property
    def is_open(self) -> bool:
        """Whether requests can be made. Once False it stays so; a forked child needs a line of its own."""
        return self._ended is None and self.pid == os.getpid()

    def request(self, name: str, body: Any = None) -> concurrent.futures.Future[Any]:
        """Ask; the future gets the answer, or what the desk raised, with its traceback there as a note.

        Cancelling the future cancels the answer. Requests begin at the desk in the order they were made. A body that
        cannot be encoded raises here; a line that has ended raises `LineError`, here or through the future.
        """
        return self._post(frames.REQUEST, encode((name, body)))

    def call(self, name: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """Ask and wait. Past `timeout_s` the request is cancelled and `CallTimeout` raised."""
        if threading.current_thread() is self._thread:
            raise LineError(
                "a line cannot wait for an answer in its own thread",
                path=f"Line({self.service!r}).call",
                rule="callbacks of pushes and of requests must not block",
                repair="use request() with a callback, or hand the work to another thread",
            )
        future = self.request(name, body)
        done, _ = concurrent.futures.wait([future], timeout_s)
        if not done and future.cancel():
            raise CallTimeout(f"{self.service}: {name!r} was not answered within {timeout_s:g} s", path=name)
        return future.result()

    async def ask(self, name: str, body: Any = None) -> Any:
        """Ask and await, on any event loop. Cancelling the awaiter cancels the answer."""
        return await asyncio.wrap_future(self.request(name, body))

    def tell(self, name: str, body: Any = None) -> None:
        """Send without an answer; in order with requests."""
        self._send(frames.pack(frames.TELL, next(self._numbers), encode((name, body))))

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call back once, on some thread, when the line has closed; at once if it has."""
        with self._lock:
            if self._ended is None:
                self._on_close.append(callback)
                return
        callback()

    def on_push(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(body)` for each pushed message, in the line's thread: it must not block.

        Messages that came before the first callback was given are kept for it.
        """
        with self._lock:
            self._on_push.append(callback)
            if self._unheard and self._ended is None:
                os.eventfd_write(self._wake, 1)  # the thread tells them, before any newer one

    def close(self) -> None:
        """Hang up. Unanswered requests raise `LineError`."""
        self._end("this process closed the line")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _post(self, kind: int, body: bytes) -> concurrent.futures.Future[Any]:
        number = next(self._numbers)
        pieces = frames.pack(kind, number, body)
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
                self._send(frames.pack(frames.CANCEL, number, b""))
            except LineError:
                return  # it has just ended, and every answer with it

    def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        if self.pid != os.getpid():
            raise LineError(
                "this line was opened before the process was forked",
                path=f"Line({self.service!r})",
                repair="call meet() again in the child",
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
        reader, poll = frames.FrameReader(), select.poll()
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
                    self._tell_pushed()
                if is_writing or self._outbox:
                    with self._lock:
                        self._flush()
                if events.keys() - {self._wake} and not self._receive(reader):
                    break
        except _Farewell:
            reason = _ENDED
        except (OSError, ValueError) as error:
            reason = f"{_LOST} ({error})"
        finally:
            self._end(reason)
            self._release()

    def _receive(self, reader: frames.FrameReader) -> bool:
        """Take what has arrived; False at the end of the stream."""
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
        if kind == frames.BYE:
            raise _Farewell
        try:
            value, error = decode(body), None  # type: ignore[arg-type]  # any buffer will do
        except Exception as unreadable:  # noqa: BLE001 - it is the requester's to know
            value, error = None, unreadable
        if kind == frames.PUSH:
            self._hear(value, error)
            return
        if kind == frames.ERROR and error is None:
            error = _arrived(*value)
        future = self._pending.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _hear(self, body: Any, error: Exception | None) -> None:
        if error is not None:
            _log.error("a message that was pushed to %r cannot be read", self.service, exc_info=error)
            return
        self._unheard.append(body)
        self._tell_pushed()

    def _tell_pushed(self) -> None:
        """Give the messages that wait to the callbacks, once there are any. In the line's thread alone."""
        with self._lock:
            callbacks = list(self._on_push)
            bodies, self._unheard = (self._unheard, []) if callbacks else ([], self._unheard)
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
        """The thread's last act: nobody else uses the descriptors, and no other can be hit by mistake."""
        with self._lock:
            self._sock.close()
            os.close(self._wake)

    def _error(self) -> LineError:
        return LineError(f"no answer from {self.service!r}: {self._ended}", path=f"meeting point, {self.service!r}")

    def abandon(self) -> None:
        """In a forked child: let go of the parent's socket, so that the parent's end is seen when it comes."""
        if self._ended is None:
            self._sock.close()
            os.close(self._wake)


class _Farewell(Exception):
    """The root says that the run ends."""


open_lines = weakref.WeakSet()


def _dial_first(addresses: Sequence[str], secret: bytes) -> socket.socket:
    failures = []
    for address in addresses:
        try:
            return lines.dial(address, secret)
        except LineError as error:
            failures.append(error.message)
    raise LineError(
        "the meeting point of this run cannot be reached: " + ("; ".join(failures) or "no address is known"),
        path="FORGE_MEETING",
        value=" ".join(addresses),
        rule="the run's root controller listens there as long as the run lasts",
        repair="the run has ended, or its controller was lost; across hosts, check that launcher.bind can be reached",
    )


def _arrived(error: Exception, text: str) -> Exception:
    error.__dict__["remote_traceback"] = text
    error.add_note(f"\nRemote traceback:\n{text}")
    return error


def _call(callback: Callable[..., None], *args: Any) -> None:
    try:
        callback(*args)
    except Exception:  # noqa: BLE001 - the line must go on
        _log.exception("a callback of a line failed")
