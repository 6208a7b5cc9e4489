"""A bound on clients that do not take what is sent to them."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

_log = logging.getLogger("forge.envs.chat_api")
_LIMITS: Final = (1, 0)
"""Writing is paused while a byte waits, and resumed when none does."""


class SendLimit:
    """Ends a connection while data waits to be sent and its client has taken none of it for `limit_s`.

    A client that takes it slowly is kept. What the operating system has taken, at this end or at the client's, counts
    as taken; with TLS, so do the 64 KiB that asyncio holds below it. Write nothing more while `is_free` is not set:
    what is added would hide what was taken.

    Attributes:
        is_free: set while nothing waits to be sent.
    """

    def __init__(self, transport: asyncio.Transport, limit_s: float) -> None:
        self._transport, self._limit_s = transport, limit_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._size = 0
        self.is_free = asyncio.Event()
        self.is_free.set()
        transport.set_write_buffer_limits(*_LIMITS)

    def begin(self) -> None:
        """Note that data waits to be sent."""
        self.is_free.clear()
        self._size = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._limit_s, self._check)

    def end(self) -> None:
        """Note that nothing waits any more: all was sent, or the connection has ended."""
        self.is_free.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        before, self._size = self._size, self._transport.get_write_buffer_size()
        if self._size < before:
            self._timer = self._loop.call_later(self._limit_s, self._check)
            return
        self._timer = None
        _log.info("a client took nothing of %d bytes for %g s: its connection is closed", self._size, self._limit_s)
        self._transport.abort()
