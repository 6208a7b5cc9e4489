"""A bound on clients that do not take what is sent to them."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios
from typing import Final

_log = logging.getLogger("forge.envs.chat_api")
_INFO_SIZE: Final = 256
_BYTES_ACKED: Final = 120
"""Where struct tcp_info has tcpi_bytes_acked, since Linux 4.1."""


class SendLimit:
    """Ends a connection whose client has taken nothing for `limit_s` while data waits for it.

    It looks every `limit_s`, so a connection may stay for up to twice as long. What counts is what the client's system
    has acknowledged: a slow client is kept, with TLS or without. Where the system does not report that (Linux before
    4.1), there is no limit.
    """

    def __init__(self, transport: asyncio.Transport, limit_s: float) -> None:
        self._transport, self._limit_s = transport, limit_s
        self._loop = asyncio.get_running_loop()
        self._seen = (0, 0)
        self._timer = self._loop.call_later(limit_s, self._check)

    def end(self) -> None:
        """Stop looking: the connection has ended."""
        self._timer.cancel()

    def _check(self) -> None:
        before, self._seen = self._seen, _waiting_and_taken(self._transport.get_extra_info("socket"))
        waiting, taken = self._seen
        if waiting and before[0] and 0 < taken == before[1]:
            _log.info("a client took nothing of what was sent for %g s: its connection is closed", self._limit_s)
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(self._limit_s, self._check)


def _waiting_and_taken(sock: socket.socket | None) -> tuple[int, int]:
    """Return how many bytes the system has not yet brought to the other end of a connection, and how many it has."""
    if sock is None:
        return 0, 0
    try:
        queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)
        return struct.unpack("i", queued)[0], struct.unpack_from("Q", info, _BYTES_ACKED)[0]
    except (OSError, struct.error):  # it has ended, or the system does not say
        return 0, 0
