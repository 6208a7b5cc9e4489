"""The store's registry at the rendezvous server: brings requests to the registry, and its decisions to processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import replace
from typing import Any

from forge.errors import StoreError
from forge.runtime.rendezvous import Session, host_id
from forge.store.records import Acquire, Assignment, Begin, Commit, Holder, Lease, Part, VersionInfo
from forge.store.registry import Registry
from forge.store.registry_state import Key

_log = logging.getLogger("forge.store")
PATIENCE_S = 30.0
"""After so long a publication that waits for other ranks says so in the log."""
HERE = 0
"""Stands for the registry's own process where a session is named."""


def open_registry() -> StoreDesk:
    return StoreDesk()


class StoreDesk:
    """One for a run, in its root process, on the control loop."""

    def __init__(self) -> None:
        self._registry = Registry(self)
        self._sessions: dict[int, Session] = {}
        self._waiting: dict[Key, list[asyncio.Event]] = {}
        self._held: dict[str, int] = {}

    # what the registry tells others

    def changed(self, key: Key) -> None:
        for event in self._waiting.pop(key, ()):
            event.set()

    def drop(self, session: int, segment: str) -> None:
        if session == HERE:
            fd = self._held.pop(segment, None)
            if fd is not None:
                os.close(fd)
        elif session in self._sessions:
            self._sessions[session].push(("drop", segment))

    # sessions

    def joined(self, session: Session) -> None:
        self._sessions[session.id] = session

    def left(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        self._registry.left(session.id, f"pid {session.pid} on host {session.host.split('/')[0]}")

    async def handle(self, session: Session, name: str, body: Any) -> Any:
        answer = getattr(self, f"on_{name}", None)
        if answer is None:
            raise StoreError(f"the store's desk has no answer to {name!r}", value=name)
        return await answer(session, body)

    async def close(self) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()

    async def _changes(self, key: Key) -> None:
        """Wait until something happens to a key."""
        event = asyncio.Event()
        waiting = self._waiting.setdefault(key, [])
        waiting.append(event)
        try:
            await event.wait()
        finally:
            if event in waiting:
                waiting.remove(event)
                if not waiting and self._waiting.get(key) is waiting:
                    del self._waiting[key]

    # requests

    async def on_hello(self, session: Session, _: None) -> int:
        return session.id

    async def on_begin(self, session: Session, request: Begin) -> Assignment:
        number = self._registry.begin(session.id, request)
        if number is None:
            return Assignment(0, -1, needs_layout=True)
        patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._tell_waiting, number)
        try:
            async with asyncio.timeout(request.timeout_s):
                while (assignment := self._registry.assignment(number)) is None:
                    await self._changes((request.kind, request.key))
        except TimeoutError:
            late = StoreError(
                f"{self._registry.waiting_for(number)} did not begin in time",
                path=request.key,
                value=f"{request.timeout_s} s",
                rule=f"all {request.world_size} ranks publish a version",
                repair="publish from every rank, or say which rank of how many this is: Weights(rank=, world_size=)",
            )
            self._registry.close_assignment(number, late.message)
            raise late from None
        except BaseException:
            self._registry.close_assignment(number)
            raise
        finally:
            patience.cancel()
        return assignment

    def _tell_waiting(self, assignment: int) -> None:
        _log.warning("a publication waits for %s to begin", self._registry.waiting_for(assignment))

    async def on_commit(self, session: Session, body: tuple[Key, Commit]) -> tuple[int, str]:
        """Answers when the version is complete: with its number and digest."""
        key, commit = body
        try:
            self._registry.commit(replace(commit, part=self._hold(commit.part)))
            while (version := self._registry.outcome(commit.assignment)) is None:
                await self._changes(key)
        finally:
            self._registry.close_assignment(commit.assignment)
        return version.number, version.digest

    async def on_give_up(self, session: Session, body: tuple[int, str]) -> None:
        self._registry.close_assignment(*body)

    async def on_withdraw(self, session: Session, token: str) -> None:
        self._registry.withdraw(session.id, token)

    def _hold(self, part: Part) -> Part:
        """Where the publisher is on this host, hold its segment too: the data then outlives it."""
        holders = part.segment.holders
        mine = [holder for holder in holders if holder.way == "shm" and not holder.volume]
        if not mine or mine[0].host != host_id() or mine[0].pid == os.getpid():
            return part
        holder = mine[0]
        if holder.segment not in self._held:
            try:
                self._held[holder.segment] = os.open(f"/proc/{holder.pid}/fd/{holder.fd}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                _log.warning("segment %s could not be opened here: %s", holder.segment, error)
                return part
        own = Holder("shm", holder.host, os.getpid(), HERE, segment=holder.segment, fd=self._held[holder.segment])
        return replace(part, segment=replace(part.segment, holders=(*holders, own)))

    async def on_acquire(self, session: Session, body: tuple[Acquire, float]) -> Lease:
        """A version; waits up to so many seconds for it to come."""
        request, wait_s = body
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):  # the registry says what is missing
                await asyncio.wait_for(self._wait_for((request.kind, request.key), request.version), wait_s)
        return self._registry.acquire(session.id, request)

    async def _wait_for(self, key: Key, number: int | None) -> None:
        """Until it is there, or cannot come any more: versions rise."""
        while (newest := self._registry.newest(key)) is None or (number is not None and newest < number):
            await self._changes(key)

    async def on_release(self, session: Session, lease: int) -> None:
        self._registry.release(lease)

    async def on_wait(self, session: Session, body: tuple[Key, int]) -> int:
        key, at_least = body
        while (newest := self._registry.newest(key)) is None or newest < at_least:
            await self._changes(key)
        return newest

    async def on_versions(self, session: Session, key: Key) -> list[VersionInfo]:
        return self._registry.versions(key)

    async def on_keys(self, session: Session, body: tuple[str, str]) -> list[str]:
        return self._registry.keys(*body)

    async def on_exists(self, session: Session, key: Key) -> bool:
        return self._registry.newest(key) is not None

    async def on_delete(self, session: Session, body: tuple[str, list[str]]) -> int:
        kind, names = body
        return self._registry.delete(kind, names)

    async def on_retire(self, session: Session, body: tuple[Key, int]) -> list[int]:
        key, keep = body
        return self._registry.retire(key, keep=keep)

    async def on_rewind(self, session: Session, body: tuple[Key, int]) -> list[int]:
        key, to = body
        return self._registry.rewind(key, to=to)

    async def on_volume(self, session: Session, volume: Holder) -> None:
        self._registry.add_volume(session.id, volume)

    async def on_copies(self, session: Session, copies: int) -> None:
        self._registry.set_copies(copies)
