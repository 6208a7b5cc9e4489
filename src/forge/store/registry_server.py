"""The store's registry at the rendezvous server: brings requests to the registry, and its decisions to processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from forge.errors import StoreError
from forge.runtime.rendezvous import Session, host_id
from forge.store.records import Acquire, Assignment, Begin, Commit, Holder, Lease, Part
from forge.store.registry_relays import RelayingRegistry
from forge.store.registry_state import Key

_log = logging.getLogger("forge.store")
PATIENCE_S = 30.0
"""After so long a publication that waits for other ranks says so in the log."""
HERE = 0
"""Stands for the registry's own process where a session is named."""


def open_registry() -> RegistryServer:
    return RegistryServer()


class RegistryServer:
    """One for a run, in its root process, on the control loop."""

    def __init__(self) -> None:
        self._registry = RelayingRegistry(self)
        self._sessions: dict[int, Session] = {}
        self._waiting: dict[Key, list[asyncio.Event]] = {}
        self._held: dict[str, int] = {}
        registry = self._registry
        self._plain: dict[str, Callable[[int, Any], Any]] = {
            "hello": lambda session, _: session,
            "give_up": lambda _, body: registry.close_assignment(*body),
            "withdraw": lambda session, token: registry.withdraw(session, token),
            "release": lambda _, lease: registry.release(lease),
            "pin": lambda session, body: registry.pin(session, *body),
            "pinned": lambda _, key: registry.pinned(key),
            "versions": lambda _, key: registry.versions(key),
            "keys": lambda _, body: registry.keys(*body),
            "exists": lambda _, key: registry.newest(key) is not None,
            "delete": lambda _, body: registry.delete(*body),
            "retire": lambda _, body: registry.retire(body[0], keep=body[1]),
            "rewind": lambda _, body: registry.rewind(body[0], to=body[1]),
            "volume": lambda session, volume: registry.add_volume(session, volume),
            "copies": lambda _, copies: registry.set_copies(copies),
            "distribution": lambda _, distribution: registry.set_distribution(distribution),
            "route": lambda _, body: registry.route(*body),
        }
        """The requests that are answered at once; the others have a method each."""

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
        if name in self._plain:
            return self._plain[name](session.id, body)
        answer = getattr(self, f"on_{name}", None)
        if answer is None:
            raise StoreError(f"the store's registry does not answer {name!r}", value=name)
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

    async def on_begin(self, session: Session, request: Begin) -> Assignment:
        number = self._registry.begin(session.id, request)
        if number is None:
            return Assignment(0, -1, needs_layout=True)
        patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._log_waiting, number)
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

    def _log_waiting(self, assignment: int) -> None:
        _log.warning("a publication waits for %s to begin", self._registry.waiting_for(assignment))

    async def on_commit(self, session: Session, body: tuple[Key, Commit]) -> tuple[int, str]:
        """Wait until the version is complete; return its number and digest."""
        key, commit = body
        try:
            self._registry.commit(replace(commit, part=self._hold(commit.part)))
            while (version := self._registry.outcome(commit.assignment)) is None:
                await self._changes(key)
        finally:
            self._registry.close_assignment(commit.assignment)
        return version.number, version.digest

    def _hold(self, part: Part) -> Part:
        """Hold the segment of a publisher on this host too: the data then outlives it."""
        holders = part.segment.holders
        mine = [holder for holder in holders if holder.transport == "shm" and not holder.volume]
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
        """Lease a version; wait up to so many seconds for it to come."""
        request, wait_s = body
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):  # the registry says what is missing
                await asyncio.wait_for(self._wait_for((request.kind, request.key), request.version), wait_s)
        return self._registry.acquire(session.id, request)

    async def _wait_for(self, key: Key, number: int | None) -> None:
        """Wait until a version is there, or cannot come any more: versions rise."""
        while (newest := self._registry.newest(key)) is None or (number is not None and newest < number):
            await self._changes(key)

    async def on_wait(self, session: Session, body: tuple[Key, int]) -> int:
        key, at_least = body
        while (newest := self._registry.newest(key)) is None or newest < at_least:
            await self._changes(key)
        return newest
