"""The rendezvous server, in the root process of a run: every process of the run can connect to it.

Each connection is one process's *session* at a named *registry*. The session ends with the connection, for whatever
reason, so a registry can tie to it what must not outlive the process. Everything here runs on the control loop; a large
message is received and sent in small steps between others.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol, cast

from forge.runtime import framing, sockets
from forge.runtime.accepting import Acceptor, RefusalCount
from forge.runtime.rendezvous_client import CANCEL, CLOSE, ERROR, JOIN, NOTIFY, PUSH, REPLY, REQUEST
from forge.runtime.serialization import as_remote, decode, encode
from forge.runtime.sockets import ConnectionFailure

_log = logging.getLogger("forge.runtime")

REGISTRIES: Final[dict[str, str]] = {
    "store": "forge.store.registry_server",
    "reports": "forge.runtime.report_registry",
}
"""The registries by name, and the module whose `open_registry()` opens each, imported when it is
first used. A program may add its own before its run starts."""

HANDSHAKE_S: Final = 10.0
CLOSE_S: Final = 1.0
"""How long to wait for connections and cancelled requests to end."""

_CHECK_PEERS_S: Final = 2.0
_MAX_BACKLOG: Final = 2 * framing.MAX_BODY


class Registry(Protocol):
    """A named set of request handlers at the rendezvous server. Everything is called on the control loop."""

    def joined(self, session: Session) -> None:
        """Admit a session. What this raises is raised to the process, which is turned away."""

    async def handle(self, session: Session, name: str, body: Any) -> Any:
        """Return the reply to a request, or raise what is to be raised to the requester.

        Requests of one session start in the order they were sent, and run concurrently. A requester that stops
        waiting cancels this.
        """

    def left(self, session: Session) -> None:
        """Release what belongs to a session that has ended: called exactly once, after its requests were cancelled."""

    async def close(self) -> None:
        """Close at the end of the run; all sessions have left."""


class Session:
    """One process's connection to one registry."""

    def __init__(self, connection: _Connection, *, id: int, pid: int, host: str) -> None:
        self.id, self.pid, self.host = id, pid, host
        self.peer = f"process {pid} on {host}"
        self._connection = connection

    def push(self, body: Any) -> None:
        """Send a message that replies to no request; it is dropped when the session has ended."""
        self._connection.send(PUSH, 0, encode(body))

    def __repr__(self) -> str:
        return f"Session({self.id}, {self.peer})"


class RendezvousServer:
    """Listens for the processes of one run, which know its `secret`."""

    def __init__(
        self, secret: bytes, *, run_id: str = "", openers: Mapping[str, str | Callable[[], Registry]] = REGISTRIES
    ) -> None:
        self.secret, self.run_id, self.pid = secret, run_id, os.getpid()
        self.is_insecure = False
        self.connections: set[_Connection] = set()
        self.leaving: set[asyncio.Task[None]] = set()
        self.session_ids = itertools.count(1)
        self._openers = openers
        self._registries: dict[str, asyncio.Task[Registry]] = {}
        self._listeners: list[tuple[Acceptor, socket.socket]] = []
        self.refusals = RefusalCount("connections to the rendezvous server", _log)
        self._binds: set[str] = set()
        self._addresses: list[str] = []
        self._check: asyncio.TimerHandle | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens: the Unix socket, then the TCP sockets, newest first."""
        return tuple(self._addresses)

    async def open(self) -> None:
        """Listen for the processes of this machine."""
        await self._listen(f"unix:@forge-{self.run_id}-{secrets.token_hex(8)}")

    async def open_tcp(self, bind: str, *, insecure: bool = False) -> None:
        """Listen for processes of other hosts too, on the address `bind` of this machine and a free port.

        `insecure` allows an address that other machines can reach without TLS, here and in the processes of the run.
        """
        self.is_insecure = self.is_insecure or insecure
        if bind not in self._binds:
            await self._listen(f"tcp:[{bind}]:0" if ":" in bind else f"tcp:{bind}:0")
            self._binds.add(bind)
            if self._check is None:
                self._check_peers()

    async def _listen(self, address: str) -> None:
        tls = sockets.tls_context(server_side=True) if address.startswith("tcp:") else None
        sock = sockets.listen(address, insecure=self.is_insecure)
        acceptor = Acceptor(sock, lambda: _Connection(self, acceptor), tls=tls, limit_s=HANDSHAKE_S)
        self._listeners.append((acceptor, sock))
        self._addresses.insert(1, sockets.address_of(sock))

    def _check_peers(self) -> None:
        for connection in list(self.connections):
            connection.end_if_vanished()
        self._check = asyncio.get_running_loop().call_later(_CHECK_PEERS_S, self._check_peers)

    async def registry(self, name: str) -> Registry:
        """Return the registry of that name, opened on first use."""
        if name not in self._openers:
            raise ConnectionFailure(
                f"there is no registry {name!r} at the rendezvous server",
                path="connect(registry)",
                value=name,
                rule=f"one of {sorted(self._openers)}",
            )
        opening = self._registries.get(name)
        if opening is None:
            opening = self._registries[name] = asyncio.create_task(self._open_registry(name))
        try:
            return await asyncio.shield(opening)
        except BaseException:
            if opening.done() and (opening.cancelled() or opening.exception() is not None):
                self._registries.pop(name, None)  # the next connection tries again
            raise

    async def _open_registry(self, name: str) -> Registry:
        opener = self._openers[name]
        if isinstance(opener, str):  # in a thread: an import may take long
            opener = (await asyncio.to_thread(importlib.import_module, opener)).open_registry
        registry: Registry = opener()
        return registry

    async def close(self) -> None:
        """Announce the end, process what was already sent, end every session, and close the registries."""
        if self._check is not None:
            self._check.cancel()
        for acceptor, sock in self._listeners:
            acceptor.close()
            sock.close()
        for connection in list(self.connections):
            connection.announce_close()
        await self._until_all_left()
        for connection in list(self.connections):
            connection.abort()
        await self._until_all_left()
        registries, self._registries = self._registries, {}
        for name, opening in registries.items():
            try:
                await (await opening).close()
            except Exception:  # noqa: BLE001 - the other registries must be closed too
                _log.exception("the registry %r did not close cleanly", name)

    async def _until_all_left(self) -> None:
        ends = [connection.ended for connection in self.connections]
        if ends:
            await asyncio.wait(ends, timeout=CLOSE_S)
        if self.leaving:
            await asyncio.wait(self.leaving)

    def abandon(self) -> None:
        """Close a forked child's copies of the sockets, which would otherwise outlive the parent."""
        for _, sock in self._listeners:
            sock.close()
        for connection in self.connections:
            connection.abandon()


class _Connection(asyncio.BufferedProtocol):
    """The server's side of a connection: handshake, then a join, then requests."""

    def __init__(self, server: RendezvousServer, acceptor: Acceptor) -> None:
        self._server, self._acceptor = server, acceptor
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._challenge = sockets.ServerHandshake(server.secret)
        self._handshake, self._num_received = bytearray(sockets.RESPONSE_SIZE), 0
        self._reader: framing.FrameReader | None = None  # its memory is for peers that have authenticated
        self._outbox: deque[bytes | memoryview] = deque()
        self._backlog, self._is_paused = 0, False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._joined: tuple[Registry, Session] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        self._join_timer = self._loop.call_later(HANDSHAKE_S, self._transport.abort)
        self._sock = transport.get_extra_info("socket")
        try:
            sockets.tune(self._sock)
            sockets.check_peer(self._sock)
        except OSError as error:  # a ConnectionFailure is one
            self._server.refusals.add(error)
            self.abort()
            return
        self._transport.set_write_buffer_limits(high=4 * framing.CHUNK)
        self._transport.write(self._challenge.hello)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._reader is None:
            return memoryview(self._handshake)[self._num_received :]
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._reader is not None:
                for kind, number, body in self._reader.advance(nbytes):
                    self._take(kind, number, body)
                return
            self._num_received += nbytes
            if self._num_received == sockets.RESPONSE_SIZE:
                self._transport.write(self._challenge.welcome(bytes(self._handshake)))
                self._reader = framing.FrameReader()
                self._acceptor.admit(self)
        except ConnectionFailure as error:
            self._server.refusals.add(error.message)
            self.abort()

    def _take(self, kind: int, number: int, body: memoryview) -> None:
        if self._joined is None:
            if kind == JOIN and not self._tasks:
                self._start(number, self._join(number, bytes(body)))
                return
            raise ConnectionFailure("a request came before the join")
        if kind == CANCEL:
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
        elif kind in (REQUEST, NOTIFY):
            try:
                name, value = decode(body)
            except Exception as error:  # noqa: BLE001 - the requester gets it
                self._fail(kind, number, error)
                return
            registry, session = self._joined
            self._start(number, self._serve(kind, number, functools.partial(registry.handle, session, name, value)))
        else:
            raise ConnectionFailure(f"a process sent a frame of kind {kind}, which only the server sends")

    def _start(self, number: int, work: Any) -> None:
        task = self._tasks[number] = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _join(self, number: int, body: bytes) -> None:
        try:
            name, pid, host = decode(body)
            registry = await self._server.registry(name)
            session = Session(self, id=next(self._server.session_ids), pid=pid, host=host)
            registry.joined(session)
        except Exception as error:  # noqa: BLE001 - the process gets it, and the connection ends
            self._fail(REQUEST, number, error)
            return  # the join timer ends the connection
        self._join_timer.cancel()
        self._joined = (registry, session)
        self.send(REPLY, number, encode((self._server.run_id, session.id)))

    async def _serve(self, kind: int, number: int, handle: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        try:
            answer = await handle()
            if kind == REQUEST:
                self.send(REPLY, number, encode(answer))
        except BaseException as error:  # whatever it is, the requester gets it
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the requester no longer waits
            self._fail(kind, number, error)

    def _fail(self, kind: int, number: int, error: BaseException) -> None:
        if kind == NOTIFY:
            _log.error("a notification from %s failed", self._who(), exc_info=error)
            return
        self.send(ERROR, number, encode(as_remote(error)))

    def send(self, kind: int, number: int, body: bytes) -> None:
        """Send a frame soon, after those before it; it is dropped when the connection has ended."""
        pieces = framing.pack(kind, number, body)
        if self._transport.is_closing():
            return
        self._backlog += len(body)
        self._outbox.extend(pieces)
        self._flush()
        if self._backlog > _MAX_BACKLOG:
            _log.warning("%s does not read what it is sent, and is treated as lost", self._who())
            self.abort()

    def _flush(self) -> None:
        while self._outbox and not self._is_paused:
            self._transport.write(self._outbox.popleft())
        if not self._outbox:
            self._backlog = 0

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._join_timer.cancel()
        self._acceptor.admit(self)
        self._outbox.clear()
        self._server.connections.discard(self)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            leaving = self._loop.create_task(self._leave_after(tasks))
            self._server.leaving.add(leaving)
            leaving.add_done_callback(self._server.leaving.discard)
        else:
            self._leave()

    async def _leave_after(self, tasks: list[asyncio.Task[None]]) -> None:
        _, unfinished = await asyncio.wait(tasks, timeout=CLOSE_S)
        if unfinished:
            _log.warning("%d requests of %s ignore their cancellation", len(unfinished), self._who())
        self._leave()

    def _leave(self) -> None:
        self.ended.set_result(None)
        if self._joined is None:
            return
        registry, session = self._joined
        try:
            registry.left(session)
        except Exception:  # noqa: BLE001 - the other sessions continue
            _log.exception("the registry failed at the end of %s", session)

    def announce_close(self) -> None:
        """Ask the peer to close; what it sent before is still read."""
        if self._joined is None:
            self.abort()
        else:
            self.send(CLOSE, 0, b"")

    def end_if_vanished(self) -> None:
        if not self._transport.is_closing() and sockets.has_vanished(self._sock):
            _log.warning("the host of %s no longer responds", self._who())
            self.abort()

    def _who(self) -> str:
        return "a process that has not joined" if self._joined is None else repr(self._joined[1])

    def abort(self) -> None:
        self._transport.abort()

    def abandon(self) -> None:
        self._sock._sock.close()
