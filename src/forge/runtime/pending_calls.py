"""The calls that wait for a group of ranks, and how its death reaches them."""

from __future__ import annotations

import asyncio
from typing import Any

from forge.errors import ActorFailure
from forge.runtime.control import post


class PendingCalls:
    """The calls that wait for one group, so that its death reaches them without waiting for Monarch to notice.

    Callers on any thread add their future and take it away again; `fail` may come from another thread.
    """

    def __init__(self) -> None:
        self.failure: ActorFailure | None = None
        self._waiting: dict[asyncio.Future[Any], asyncio.AbstractEventLoop] = {}

    def add(self, reply: asyncio.Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._waiting[reply] = loop
        if self.failure is not None:  # after adding: `fail` either saw this future or was seen here
            _fail_call(reply, self.failure)

    def discard(self, reply: asyncio.Future[Any]) -> None:
        self._waiting.pop(reply, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def fail(self, failure: ActorFailure) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        for reply, loop in list(self._waiting.items()):
            post(loop, _fail_call, reply, failure)


def _fail_call(reply: asyncio.Future[Any], failure: ActorFailure) -> None:
    if not reply.done():
        # a fresh exception for each caller: a shared one would grow every caller's traceback
        fresh = ActorFailure(failure.message, path=failure.path, repair=failure.repair)
        reply.set_exception(fresh.with_log(failure.log))
