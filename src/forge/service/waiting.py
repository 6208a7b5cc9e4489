"""Calls that wait for a slot, and how they are woken, on whichever event loop they wait."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from forge.runtime.control import post
from forge.service.records import Request


@dataclass(slots=True, eq=False)
class Waiter:
    """A call that waits for a slot: at any replica, or at the one that its session is pinned to."""

    ready: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop
    request: Request


def wake(sleeper: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
    """Resolve a future on its own loop, unless it is done."""

    def resolve() -> None:
        if not sleeper.done():
            sleeper.set_result(None)

    if asyncio._get_running_loop() is loop:
        resolve()
    else:
        post(loop, resolve)
