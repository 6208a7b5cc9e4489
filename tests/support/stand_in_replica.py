"""A replica without a process (what a routing table touches of an actor), and a table of such replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from forge.service.records import Health, Request
from forge.service.routing import round_robin
from forge.service.routing_table import RoutingTable
from forge.service.targets import Entry, Target

LIMIT_S = 600


class Verb:
    """An endpoint that remembers what was broadcast to it."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def broadcast(self, *args: Any) -> None:
        self.sent.append(args)


class StandInReplica:
    """The endpoints of an actor that callers use without the user knowing."""

    def __init__(self) -> None:
        self._forge_connect, self._forge_invoke, self._forge_cancel = Verb(), Verb(), Verb()


def entry(index: int, *, generation: int = 0, health: Health = "healthy", failure: str | None = None) -> Entry:
    """What the owner would publish about a replica of one rank."""
    actor = StandInReplica() if health == "healthy" else None
    return Entry(index, generation, health, actor, "box", num_ranks=1, failure=failure)


def make_table(
    num_replicas: int = 2, *, limit: int | None = None, max_queue: int | None = None, router: Any = round_robin
) -> RoutingTable:
    table = RoutingTable("policy", router=router, limit=limit, max_queue=max_queue)
    for index in range(num_replicas):
        table.update(entry(index))
    return table


def request(session: str | None = None) -> Request:
    return Request("generate", session, 0)


def take(table: RoutingTable, session: str | None = None) -> Target:
    target = table.try_acquire(request(session))
    assert target is not None
    return target


def drive(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, LIMIT_S))


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def queue_up(table: RoutingTable, *sessions: str | None) -> list[asyncio.Task[Target]]:
    """Callers that come one after another and wait."""
    tasks = []
    for session in sessions:
        tasks.append(asyncio.create_task(table.acquire(request(session))))
        await settle()
    return tasks
