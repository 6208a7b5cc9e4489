"""Listening sockets of HTTP servers: with TLS or without, and with bounds on clients that have no key."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Sequence
from typing import cast

from aiohttp import web

from forge.envs.chat_api.errors import Connection, JsonErrorRunner
from forge.runtime.accepting import Acceptor


def bind(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of `host`. Raise `OSError` if there is none to be had."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, place in dict.fromkeys((each[0], each[4]) for each in found):
            sock = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind(place)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL or len(found) == 1:
                    raise
                sockets.pop().close()  # a name may have addresses of a protocol that this machine does not speak
                continue
            sock.listen(128)
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, "this machine has none of its addresses")
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


class HttpListener:
    """Serves an application on listening sockets. Close it before the runner is cleaned up.

    With `send_limit_s`, a client that takes nothing of what is sent to it for so long loses its connection.
    """

    def __init__(
        self,
        runner: JsonErrorRunner,
        sockets: Sequence[socket.socket],
        *,
        tls: ssl.SSLContext | None = None,
        send_limit_s: float | None = None,
    ) -> None:
        self._runner, self._sockets, self._send_limit_s = runner, sockets, send_limit_s
        self._acceptors = [self._accept(sock, tls) for sock in sockets]
        self.port = int(sockets[0].getsockname()[1])

    @property
    def num_waiting(self) -> int:
        """How many connections have not sent a key that is accepted."""
        return sum(acceptor.num_waiting for acceptor in self._acceptors)

    def _accept(self, sock: socket.socket, tls: ssl.SSLContext | None) -> Acceptor:
        def connect() -> web.RequestHandler:
            assert self._runner.server is not None
            connection = cast(Connection, self._runner.server())
            connection.on_admitted = lambda: acceptor.admit(connection)
            connection.send_limit_s = self._send_limit_s
            return connection

        acceptor = Acceptor(sock, connect, tls=tls)
        return acceptor

    def close(self) -> None:
        """Accept nothing more."""
        for acceptor, sock in zip(self._acceptors, self._sockets, strict=True):
            acceptor.close()
            sock.close()


def admit(request: web.Request) -> None:
    """Note that a request has an accepted key: its connection may stay open."""
    connection = request.protocol
    if isinstance(connection, Connection) and connection.on_admitted is not None:
        connection.on_admitted()
