"""The directory: where other processes ask for the routing tables of the services that this one owns.

There is one for each process, with one lasting port. Whoever holds a handle elsewhere asks once, by the service's name
for machines, and then gets every change and a regular tick. A service that has ended is answered too, so that nobody
waits for it.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any, Protocol

from forge.runtime.backend import Channel
from forge.service.table import Entry

RENEW_AFTER = 20
"""A subscriber asks again after so many ticks."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The answer for a service that this process does not have (any more)."""


@dataclass(frozen=True, slots=True)
class Silence:
    """The owner has not been heard for too long. It may come back: it, or this process, may have been held up."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The owner is alive and nothing has changed."""


class Publisher(Protocol):
    """What the directory needs of a service's keeper."""

    def subscribe(self, subscriber: int, port: Any) -> None: ...


class Directory:
    """Answers subscriptions. Lives on the control loop."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.port, self._wishes = Channel.open()
        self._services: dict[str, Publisher] = {}
        self._task = asyncio.create_task(self._serve())

    def add(self, uid: str, publisher: Publisher) -> None:
        self._services[uid] = publisher

    def remove(self, uid: str) -> None:
        self._services.pop(uid, None)

    async def _serve(self) -> None:
        while True:
            uid, subscriber, port = await self._wishes.recv()
            port.return_undeliverable = False
            publisher = self._services.get(uid)
            if publisher is None:
                port.send(Gone())
            else:
                publisher.subscribe(subscriber, port)


_directory: Directory | None = None


def directory() -> Directory:
    """This process's directory. Called on the control loop."""
    global _directory
    if _directory is None or _directory.pid != os.getpid():
        _directory = Directory()
    return _directory


Message = Entry | Gone | Silence | Tick
