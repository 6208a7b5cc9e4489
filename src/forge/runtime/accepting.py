"""Accepts connections for asyncio protocols, and bounds what peers can do that have not authenticated.

A connection that its protocol has not admitted ends after `limit_s`. At most `max_waiting` may wait at once: one more
ends the oldest, unless that is younger than `GRACE_S`; then nothing is accepted until it is not. So a flood of silent
connections costs a bounded number of descriptors, and a peer that knows the secret, and proves it at once, is served
during the flood.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_log = logging.getLogger("forge.runtime")

LIMIT_S: Final = 10.0
"""How long a connection may take to authenticate."""
GRACE_S: Final = 1.0
"""How long a connection that has not authenticated is left alone when others wait."""
MAX_WAITING: Final = 128
_BATCH: Final = 32
_RETRY_S: Final = 1.0
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class RefusalCount:
    """Counts refused peers and logs the 1st, 10th, 100th …: a flood must not fill the log."""

    def __init__(self, what: str, log: logging.Logger = _log) -> None:
        self.num_refused = 0
        self._what, self._log, self._next = what, log, 1

    def add(self, reason: object) -> None:
        self.num_refused += 1
        if self.num_refused >= self._next:
            self._next *= 10
            self._log.warning("%s: refused %d so far, the last one because: %s", self._what, self.num_refused, reason)


@dataclass(slots=True)
class _Waiting:
    """A connection that has not authenticated."""

    sock: socket.socket
    since: float
    opening: asyncio.Task[Any]


class Acceptor:
    """Accepts on a listening socket until it is closed. The caller closes the socket.

    `factory` makes the protocol of a connection. The protocol, or what owns it, calls `admit` once the peer has
    authenticated.
    """

    def __init__(
        self,
        listener: socket.socket,
        factory: Callable[[], asyncio.BaseProtocol],
        *,
        tls: ssl.SSLContext | None = None,
        limit_s: float = LIMIT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._factory, self._tls = listener, factory, tls
        self._limit_s, self._max_waiting = limit_s, max_waiting
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.BaseProtocol, _Waiting] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._loop.add_reader(listener.fileno(), self._accept)

    @property
    def num_waiting(self) -> int:
        """How many connections have not authenticated."""
        return len(self._waiting)

    def admit(self, protocol: asyncio.BaseProtocol) -> None:
        """Note that the peer of a connection has authenticated, or that the connection has ended."""
        self._waiting.pop(protocol, None)

    def close(self) -> None:
        """Accept nothing more, and end the connections that have not authenticated."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._listener.fileno())
        for timer in (self._retry, self._expiry):
            if timer is not None:
                timer.cancel()
        for protocol in list(self._waiting):
            self._end(protocol)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            if len(self._waiting) >= self._max_waiting and not self._make_room():
                return
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("a connection cannot be accepted: %s", error)
                if error.errno in _NO_ROOM:
                    self._pause(_RETRY_S)
                return
            client.setblocking(False)
            self._open(client)

    def _make_room(self) -> bool:
        """End the oldest connection that waits; False if it is too young, and accepting is paused until it is not."""
        protocol, oldest = next(iter(self._waiting.items()))
        age = self._loop.time() - oldest.since
        if age < GRACE_S:
            self._pause(GRACE_S - age)
            return False
        self._end(protocol)
        return True

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)
            self._accept()

    def _open(self, client: socket.socket) -> None:
        protocol = self._factory()
        limits: dict[str, Any] = {}
        if self._tls is not None:
            limits = {"ssl": self._tls, "ssl_handshake_timeout": self._limit_s}
        opening = self._loop.create_task(self._loop.connect_accepted_socket(lambda: protocol, client, **limits))
        self._waiting[protocol] = _Waiting(client, self._loop.time(), opening)
        opening.add_done_callback(lambda task: self._opened(protocol, task))
        if self._expiry is None:
            self._expiry = self._loop.call_later(self._limit_s, self._expire)

    def _opened(self, protocol: asyncio.BaseProtocol, opening: asyncio.Task[Any]) -> None:
        if opening.cancelled() or opening.exception() is not None:  # TLS refused it, or it has gone
            self.admit(protocol)

    def _expire(self) -> None:
        """End the connections whose time is over: the first ones, since all have the same."""
        self._expiry = None
        for protocol, waiting in list(self._waiting.items()):
            left = waiting.since + self._limit_s - self._loop.time()
            if left > 0:
                self._expiry = self._loop.call_later(left, self._expire)
                return
            self._end(protocol)

    def _end(self, protocol: asyncio.BaseProtocol) -> None:
        waiting = self._waiting.pop(protocol)
        if waiting.opening.done() and waiting.opening.exception() is None:
            waiting.opening.result()[0].abort()
            return
        with contextlib.suppress(OSError):  # it has ended
            waiting.sock.shutdown(socket.SHUT_RDWR)
