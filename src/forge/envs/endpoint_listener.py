"""Connections from inside a sandbox to the endpoint of its episode, and to nothing else."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any, Final, cast

from aiohttp import web

from forge.envs.chat_api.errors import Connection

MAX_CONNECTIONS: Final = 64
"""The most connections of one sandbox at once. Further ones wait until another one ends; none is kept open then."""

_RETRY_S: Final = 1.0
_OURS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept(2) that say that this process, not the program, has run out of something."""


class SandboxListener:
    """Accepts on a socket that was made in a sandbox's network. Requests on its connections may only have `key`.

    Attributes:
        failure: why connections of the sandbox could not be accepted; None where all were.
    """

    def __init__(self, listener: socket.socket, server: Callable[[], web.RequestHandler], *, key: str) -> None:
        self._listener, self._server, self._key = listener, server, key
        self._loop = asyncio.get_running_loop()
        self._open: dict[Connection, asyncio.Task[Any]] = {}
        self._is_accepting = self._is_closed = False
        self._retry: asyncio.TimerHandle | None = None
        self._all_ended = asyncio.Event()
        self.failure: OSError | None = None
        self._start()

    def __len__(self) -> int:
        return len(self._open)

    def _start(self) -> None:
        if not self._is_accepting and not self._is_closed:
            self._is_accepting = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _stop(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        while len(self._open) < MAX_CONNECTIONS:
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._stop()
                self.failure = error
                if error.errno in _OURS:
                    self._retry = self._loop.call_later(_RETRY_S, self._start)
                return
            self._serve(client)
        self._stop()
        for connection in list(self._open):
            if connection.is_idle:
                connection.force_close()  # kept open by a client that has no request

    def _serve(self, client: socket.socket) -> None:
        client.setblocking(False)
        connection = cast(Connection, self._server())
        connection.only_key = self._key
        connection.on_lost = lambda: self._lost(connection)
        connection.is_crowded = lambda: len(self._open) >= MAX_CONNECTIONS
        connecting = self._loop.create_task(self._loop.connect_accepted_socket(lambda: connection, client))
        self._open[connection] = connecting
        connecting.add_done_callback(lambda task: self._connected(connection, task))

    def _connected(self, connection: Connection, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, OSError):
            self.failure = error
        if error is not None or task.cancelled():  # it will not report its end
            self._lost(connection)

    def _lost(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        self._start()
        if not self._open:
            self._all_ended.set()

    async def close(self) -> None:
        """Accept nothing more, and end the connections."""
        self._stop()
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        if not self._open:
            return
        self._all_ended.clear()
        await asyncio.wait(set(self._open.values()))
        for connection in list(self._open):
            if connection.transport is not None:
                connection.transport.abort()
        if self._open:
            await self._all_ended.wait()
