"""An event loop whose clock jumps to the next timer, so that minutes of a simulated cluster take seconds."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines unchanged. Time passes while nothing is ready to run, and where a callback says so."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        """Let what runs now take so long."""
        self.now_s += seconds

    def _run_once(self) -> None:
        timers: list[Any] = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:  # a limit that was not reached does not move the clock
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1
        if timers and not self._ready:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, timers[0]._when)
        super()._run_once()  # type: ignore[misc]


def run_virtually(body: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Run a coroutine on a clock of its own, and cancel what it leaves behind."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(body)
