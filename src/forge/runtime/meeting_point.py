"""The meeting point: where every process of a run can reach its root. This is the root's side.

It listens on lines of the run, and each connection is one process's *session* at a named *desk*, a service of the root.
The end of a connection, for whatever reason, is the end of the session: a desk can tie to it what must not outlive the
process. Everything here runs on the control loop, and a large message is received and sent in small steps between
others.
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

from forge.runtime import frames, lines
from forge.runtime.lines import LineError
from forge.runtime.travelling import portable
from forge.runtime.wire import decode, encode

_log = logging.getLogger("forge.runtime")

SERVICES: Final[dict[str, str]] = {"store": "forge.store.desk"}
"""The desks by name, and the module whose `open_desk()` opens each; it is imported when the first process asks for it.
A program may add its own before its run begins."""

GREETING_S: Final = 10.0
FAREWELL_S: Final = 1.0
"""How long the ends of connections and of cancelled answers are waited for."""

_VANISHED_CHECK_S: Final = 2.0
_MAX_BACKLOG: Final = 2 * frames.MAX_BODY


class Desk(Protocol):
    """A service at the meeting point. Everything is called on the control loop."""

    def joined(self, session: Session) -> None:
        """A process has come. What this raises is raised to it, and it is turned away."""

    async def answer(self, session: Session, name: str, body: Any) -> Any:
        """The answer to a request, or the exception that is to be raised to the requester.

        Requests of one session begin in the order they were sent, and run side by side. A requester that gives up
        cancels this.
        """

    def left(self, session: Session) -> None:
        """The session has ended, however: called exactly once, after its unfinished answers were cancelled."""

    async def close(self) -> None:
        """The run is ending; all sessions have left."""


class Session:
    """One process at one desk, from its connection to the end of it."""

    def __init__(self, connection: _Connection, *, id: int, pid: int, host: str) -> None:
        self.id, self.pid, self.host = id, pid, host
        self.peer = f"process {pid} on {host}"
        self.info: dict[str, Any] = {}
        """For the desk's own use."""
        self._connection = connection

    def push(self, body: Any) -> None:
        """Send a message that answers no request. To a session that has ended: nothing happens."""
        self._connection.send(frames.PUSH, 0, encode(body))

    def __repr__(self) -> str:
        return f"Session({self.id}, {self.peer})"


class MeetingPoint:
    """Listens for the processes of one run, who know its `secret`."""

    def __init__(
        self, secret: bytes, *, run_id: str = "", services: Mapping[str, str | Callable[[], Desk]] = SERVICES
    ) -> None:
        self.secret, self.run_id, self.pid = secret, run_id, os.getpid()
        self.connections: set[_Connection] = set()
        self.leaving: set[asyncio.Task[None]] = set()
        self.session_ids = itertools.count(1)
        self._services = services
        self._desks: dict[str, asyncio.Task[Desk]] = {}
        self._listeners: list[tuple[asyncio.Server, socket.socket]] = []
        self._binds: set[str] = set()
        self._addresses: list[str] = []
        self._check: asyncio.TimerHandle | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens: the Unix line, then those on tcp, newest first."""
        return tuple(self._addresses)

    async def open(self) -> None:
        """Listen for the processes of this machine."""
        await self._listen(f"unix:@forge-{self.run_id}-{secrets.token_hex(8)}")

    async def open_tcp(self, bind: str) -> None:
        """Listen for processes of other hosts too, on the address `bind` of this machine and a free port."""
        if bind not in self._binds:
            await self._listen(f"tcp:[{bind}]:0" if ":" in bind else f"tcp:{bind}:0")
            self._binds.add(bind)
            if self._check is None:
                self._look_for_vanished()

    async def _listen(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        tls = lines.tls_context(server_side=True) if address.startswith("tcp:") else None
        sock = lines.listen(address)
        options: dict[str, Any] = {"ssl": tls, "ssl_handshake_timeout": GREETING_S} if tls else {}
        make = loop.create_server if address.startswith("tcp:") else loop.create_unix_server
        server = await make(lambda: _Connection(self), sock=sock, backlog=1024, **options)
        self._listeners.append((server, sock))
        self._addresses.insert(1, lines.address_of(sock))

    def _look_for_vanished(self) -> None:
        for connection in list(self.connections):
            connection.end_if_vanished()
        self._check = asyncio.get_running_loop().call_later(_VANISHED_CHECK_S, self._look_for_vanished)

    async def desk(self, name: str) -> Desk:
        """The desk of that name, opened when it is first asked for."""
        if name not in self._services:
            raise LineError(
                f"there is no desk {name!r} at the meeting point",
                path="meet(service)",
                value=name,
                rule=f"one of {sorted(self._services)}",
            )
        opening = self._desks.get(name)
        if opening is None:
            opening = self._desks[name] = asyncio.create_task(self._open_desk(name))
        try:
            return await asyncio.shield(opening)
        except BaseException:
            if opening.done() and (opening.cancelled() or opening.exception() is not None):
                self._desks.pop(name, None)  # the next one may have more luck
            raise

    async def _open_desk(self, name: str) -> Desk:
        service = self._services[name]
        if isinstance(service, str):  # in a thread: an import may take long
            service = (await asyncio.to_thread(importlib.import_module, service)).open_desk
        desk: Desk = service()
        return desk

    async def close(self) -> None:
        """Say goodbye, hear what the processes have still to say, end every session, and close the desks."""
        if self._check is not None:
            self._check.cancel()
        for server, _ in self._listeners:
            server.close()
        for connection in list(self.connections):
            connection.say_goodbye()
        await self._until_all_left()
        for connection in list(self.connections):
            connection.abort()
        await self._until_all_left()
        desks, self._desks = self._desks, {}
        for name, opening in desks.items():
            try:
                await (await opening).close()
            except Exception:  # noqa: BLE001 - the other desks must be closed too
                _log.exception("the desk %r did not close cleanly", name)

    async def _until_all_left(self) -> None:
        ends = [connection.ended for connection in self.connections]
        if ends:
            await asyncio.wait(ends, timeout=FAREWELL_S)
        if self.leaving:
            await asyncio.wait(self.leaving)

    def abandon(self) -> None:
        """In a forked child: let go of the parent's sockets, which would otherwise outlive it here."""
        for _, sock in self._listeners:
            sock.close()
        for connection in self.connections:
            connection.abandon()


class _Connection(asyncio.BufferedProtocol):
    """One connection: greeting, then a join, then requests."""

    def __init__(self, point: MeetingPoint) -> None:
        self._point = point
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._challenge: lines.Challenge | None = lines.Challenge(point.secret)
        self._greeting, self._num_greeted = bytearray(lines.ANSWER_SIZE), 0
        self._reader = frames.FrameReader()
        self._outbox: deque[bytes | memoryview] = deque()
        self._backlog, self._is_paused = 0, False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._joined: tuple[Desk, Session] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._point.connections.add(self)
        self._patience = self._loop.call_later(GREETING_S, self._transport.abort)
        self._sock = transport.get_extra_info("socket")
        try:
            lines.tune(self._sock)
            lines.check_peer(self._sock)
        except OSError as error:  # a LineError is one
            _log.warning("a connection was refused: %s", error)
            self.abort()
            return
        self._transport.set_write_buffer_limits(high=4 * frames.CHUNK)
        if self._challenge is not None:
            self._transport.write(self._challenge.hello)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._challenge is not None:
            return memoryview(self._greeting)[self._num_greeted :]
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._challenge is None:
                for kind, number, body in self._reader.advance(nbytes):
                    self._take(kind, number, body)
                return
            self._num_greeted += nbytes
            if self._num_greeted == lines.ANSWER_SIZE:
                self._transport.write(self._challenge.welcome(bytes(self._greeting)))
                self._challenge = None
        except LineError as error:
            _log.warning("a connection was closed: %s", error.message)
            self.abort()

    def _take(self, kind: int, number: int, body: memoryview) -> None:
        if self._joined is None:
            if kind == frames.JOIN and not self._tasks:
                self._start(number, self._join(number, bytes(body)))
                return
            raise LineError("a request came before the join")
        if kind == frames.CANCEL:
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
        elif kind in (frames.REQUEST, frames.TELL):
            try:
                name, value = decode(body)  # type: ignore[arg-type]  # any buffer will do
            except Exception as error:  # noqa: BLE001 - it is the requester's to know
                self._fail(kind, number, error)
                return
            desk, session = self._joined
            self._start(number, self._serve(kind, number, functools.partial(desk.answer, session, name, value)))
        else:
            raise LineError(f"a frame of kind {kind} came, which only the root sends")

    def _start(self, number: int, work: Any) -> None:
        task = self._tasks[number] = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _join(self, number: int, body: bytes) -> None:
        try:
            service, pid, host = decode(body)
            desk = await self._point.desk(service)
            session = Session(self, id=next(self._point.session_ids), pid=pid, host=host)
            desk.joined(session)
        except Exception as error:  # noqa: BLE001 - it is told, and the connection ends
            self._fail(frames.REQUEST, number, error)
            return  # the patience with a connection that has not joined ends it
        self._patience.cancel()
        self._joined = (desk, session)
        self.send(frames.ANSWER, number, encode((self._point.run_id, session.id)))

    async def _serve(self, kind: int, number: int, ask: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        try:
            answer = await ask()
            if kind == frames.REQUEST:
                self.send(frames.ANSWER, number, encode(answer))
        except BaseException as error:  # whatever it is, the requester must hear of it
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # nobody waits for it any more
            self._fail(kind, number, error)

    def _fail(self, kind: int, number: int, error: BaseException) -> None:
        if kind == frames.TELL:
            _log.error("what a process told could not be taken", exc_info=error)
            return
        traveller = portable(error)
        self.send(frames.ERROR, number, encode((traveller.error, traveller.text)))

    def send(self, kind: int, number: int, body: bytes) -> None:
        """Send a frame soon, after those before it; nothing happens when the connection has ended."""
        pieces = frames.pack(kind, number, body)
        if self._transport.is_closing():
            return
        self._backlog += len(body)
        self._outbox.extend(pieces)
        self._flush()
        if self._backlog > _MAX_BACKLOG:
            _log.warning("%s does not read what it is sent, and counts as lost", self._who())
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
        self._patience.cancel()
        self._outbox.clear()
        self._point.connections.discard(self)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            leaving = self._loop.create_task(self._leave_after(tasks))
            self._point.leaving.add(leaving)
            leaving.add_done_callback(self._point.leaving.discard)
        else:
            self._leave()

    async def _leave_after(self, tasks: list[asyncio.Task[None]]) -> None:
        _, unfinished = await asyncio.wait(tasks, timeout=FAREWELL_S)
        if unfinished:
            _log.warning("%d answers to %s do not heed their cancellation", len(unfinished), self._who())
        self._leave()

    def _leave(self) -> None:
        self.ended.set_result(None)
        if self._joined is None:
            return
        desk, session = self._joined
        try:
            desk.left(session)
        except Exception:  # noqa: BLE001 - the loop and the other sessions go on
            _log.exception("the end of %s was not taken well", session)

    def say_goodbye(self) -> None:
        """Ask the other side to hang up; what it sent before is still read."""
        if self._joined is None:
            self.abort()
        else:
            self.send(frames.BYE, 0, b"")

    def end_if_vanished(self) -> None:
        if not self._transport.is_closing() and lines.has_vanished(self._sock):
            _log.warning("the host of %s does not answer any more", self._who())
            self.abort()

    def _who(self) -> str:
        return "a process that has not joined" if self._joined is None else repr(self._joined[1])

    def abort(self) -> None:
        self._transport.abort()

    def abandon(self) -> None:
        self._sock._sock.close()
