"""A registry for tests of the rendezvous server: it notes who comes and goes, and does what a request says."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from forge.runtime.rendezvous import Session


class NoAnswer(Exception):
    """An exception of the registry's own, with a field."""

    def __init__(self, code: int) -> None:
        super().__init__(f"no answer: {code}")
        self.code = code


class Unreadable:
    """Can be encoded, and not decoded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_refuse, ("cannot be read",))


def _refuse(text: str) -> None:
    raise ValueError(text)


class NotPicklable:
    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("does not travel")


class TestRegistry:
    """Everything that happened is in `log`; other threads wait for it with `until`."""

    __test__ = False

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}
        self.log: list[Any] = []
        self.gates: dict[str, asyncio.Event] = {}
        self._changed = threading.Condition()

    def note(self, entry: Any) -> None:
        with self._changed:
            self.log.append(entry)
            self._changed.notify_all()

    def until(self, entry: Any, *, count: int = 1) -> None:
        """Wait, in a thread of the test, until `entry` was noted that often."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.log.count(entry) >= count, timeout=600), (entry, self.log)

    def joined(self, session: Session) -> None:
        if session.host == "unwelcome":
            raise NoAnswer(403)
        self.sessions[session.id] = session
        self.note(("joined", session.pid))

    def left(self, session: Session) -> None:
        del self.sessions[session.id]  # a second time would raise
        self.note(("left", session.pid))

    async def close(self) -> None:
        self.note("closed")

    async def handle(self, session: Session, name: str, body: Any) -> Any:
        return await getattr(self, f"do_{name}")(session, body)

    async def do_echo(self, session: Session, body: Any) -> Any:
        return body

    async def do_who(self, session: Session, body: Any) -> Any:
        return session.id, session.pid, session.host

    async def do_num_sessions(self, session: Session, body: Any) -> int:
        return len(self.sessions)

    async def do_note(self, session: Session, body: Any) -> None:
        self.note(body)

    async def do_read(self, session: Session, body: Any) -> list[Any]:
        return list(self.log)

    async def do_fail(self, session: Session, body: Any) -> None:
        if body == "exit":
            raise SystemExit(3)
        if body == "cancel":
            raise asyncio.CancelledError
        raise NoAnswer(body)

    async def do_unencodable(self, session: Session, body: Any) -> Any:
        return NotPicklable()

    async def do_unreadable(self, session: Session, body: Any) -> Any:
        return Unreadable()

    async def do_hold(self, session: Session, key: str) -> str:
        """Answer when somebody opens the gate `key`."""
        self.note(("hold", key))
        try:
            await self.gates.setdefault(key, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.note(("cancelled", key))
            raise
        return key

    async def do_open(self, session: Session, key: str) -> None:
        self.gates.setdefault(key, asyncio.Event()).set()

    async def do_push(self, session: Session, bodies: list[Any]) -> None:
        for body in bodies:
            session.push(body)

    async def do_push_all(self, session: Session, body: Any) -> None:
        for other in self.sessions.values():
            other.push(body)


opened: list[TestRegistry] = []


def open_registry() -> TestRegistry:
    opened.append(TestRegistry())
    return opened[-1]
