"""How many groups of ranks start on a host at once: a thousand together would all be late, and be given up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

Ask = Callable[[asyncio.Future[None]], Awaitable[None]]
"""Awaits a turn; it may raise instead, as when the group that waits is stopped."""


class StartTurns:
    """The turns of one host: `num` groups start at once, the others wait in order. For one event loop."""

    def __init__(self, num: int) -> None:
        self.num_free = num
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, ask: Ask) -> None:
        """Wait for a turn. Whoever has one gives it back."""
        if self.num_free:
            self.num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await ask(turn)
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back()  # it came just when its group no longer wanted it
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def give_back(self) -> None:
        """Let the next group start."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.num_free += 1


class _HasTurns(Protocol):
    name: str
    start_turns: StartTurns


@asynccontextmanager
async def turns_of(hosts: Iterable[_HasTurns], ask: Ask) -> AsyncIterator[None]:
    """Hold a turn of each host inside the block. All groups take them in the same order: none wait in a circle."""
    held: list[StartTurns] = []
    try:
        for host in sorted(hosts, key=lambda host: host.name):
            await host.start_turns.take(ask)
            held.append(host.start_turns)
        yield
    finally:
        for turns in held:
            turns.give_back()
