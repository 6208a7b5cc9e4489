"""What processes of a run send to the console of its root: lines of their output, and log records.

Everything comes to one socket of this machine and is printed by one thread. So a console that is not read (Ctrl-S, a
pager) stops neither the control loop, nor a rank: what the socket does not take is dropped there, and is in the
process's log file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import threading
from collections import deque
from typing import Any, Final

from forge.observe.logs.records import from_fields
from forge.observe.logs.setup import show_record
from forge.observe.terminal import print_above, without_controls
from forge.runtime.control import post

_log = logging.getLogger("forge.runtime")
_CREDENTIALS: Final = struct.Struct("3i")
_MAX_BYTES: Final = 1 << 18
_CLOSE_S: Final = 2.0
_MAX_RECORDS: Final = 10_000


class Relay:
    """Prints what arrives until it is closed."""

    def __init__(self) -> None:
        self.pid, self.address = os.getpid(), f"forge-console-{secrets.token_hex(12)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket.bind("\0" + self.address)
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender.setblocking(False)
        self._sender.connect("\0" + self.address)
        self._records: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_MAX_RECORDS)
        self._is_closing = False
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Future[None]
        self._thread = threading.Thread(target=self._run, name="forge-console", daemon=True)
        self._thread.start()

    def put(self, process: str, record: dict[str, Any]) -> None:
        """Show a record of another process soon. The oldest are dropped where the console is not read."""
        self._records.append((process, record))
        self._wake()

    def _wake(self, data: bytes = b"") -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake, or will be
            self._sender.send(data)

    async def close(self) -> None:
        """Print what has arrived, and end. On the control loop."""
        self._loop = asyncio.get_running_loop()
        self._ended, self._is_closing = self._loop.create_future(), True
        try:
            self._wake()
            async with asyncio.timeout(_CLOSE_S):
                await self._ended
            self._socket.close()
        except (OSError, TimeoutError):  # it is not read: the thread ends with the process
            _log.debug("the console is not read; what came last is in log files only")
        finally:
            self._sender.close()

    def _run(self) -> None:
        data: bytes | None = b""
        while data is not None:
            data = self._receive()
            try:
                while self._records:
                    process, record = self._records.popleft()
                    show_record(from_fields(record, process=process))
                message = json.loads(data) if data else {"output": ()}
                for line in message["output"]:
                    print_above(f"[{message['process']}] {without_controls(line)}", to_stderr=True)
            except (ValueError, KeyError, TypeError) as error:
                _log.debug("a message for the console cannot be read: %s", error)
            except OSError:  # the console is closed
                continue
        post(self._loop, self._ended.set_result, None)

    def _receive(self) -> bytes | None:
        """Return the next message, an empty one where there is nothing to show; None when all was read at the end."""
        flags = socket.MSG_DONTWAIT if self._is_closing else 0
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size), flags)
        except BlockingIOError:
            return None
        return data if _uid(ancillary) in (os.geteuid(), 0) else b""


def _uid(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            return int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1])
    return -1


_relay: Relay | None = None
_guard = threading.Lock()


def relay() -> Relay:
    """Return the relay of this process, opened on first use."""
    global _relay
    with _guard:
        if _relay is None or _relay.pid != os.getpid():
            _relay = Relay()
        return _relay


async def close_relay() -> None:
    """Close the relay of this process, if there is one, when its processes have ended: all is printed then."""
    global _relay
    with _guard:
        found, _relay = _relay, None
    if found is not None and found.pid == os.getpid():
        await found.close()
