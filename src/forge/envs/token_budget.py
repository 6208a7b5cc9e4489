"""The sampled tokens that an episode has left, shared by branches that run at the same time."""

from __future__ import annotations

import asyncio
from collections import deque


class TokenBudget:
    """Hands out tokens to turns in the order in which they start.

    A turn holds what it was given until it ends, and then returns what it did not use. So turns that run at the same
    time never sample more than the limit together, and what each of them gets does not depend on which ends first. A
    turn for which nothing is left waits until those before it have ended.

    Args:
        limit: tokens of the whole episode; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._left = limit
        self._num_held = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, wanted: int) -> int:
        """Return how many tokens a turn may sample, at most `wanted`; 0 where the episode has none left."""
        if self._left is None:
            return wanted
        if self._waiting or (self._left < 1 and self._num_held):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._wake()
                raise
        given = min(wanted, self._left)
        self._left -= given
        self._num_held += given > 0
        if self._left > 0 or not self._num_held:
            self._wake()
        return given

    def shrink(self, given: int, wanted: int) -> None:
        """Return a part of what a turn was given before it starts; all of it where it will not start."""
        if self._left is None:
            return
        if not wanted:
            self.give_back(given, used=0)
        elif given > wanted:
            self._left += given - wanted
            self._wake()

    def give_back(self, given: int, *, used: int) -> None:
        """Return what a turn did not use, when it has ended."""
        if self._left is None:
            return
        self._left += given - used
        self._num_held -= 1
        if not self._num_held:
            self._wake()

    def _wake(self) -> None:
        """Let the next turn go on."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
