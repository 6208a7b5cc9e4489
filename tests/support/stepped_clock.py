"""An event loop whose clock a test advances, so that limits pass without waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class SteppedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock runs as always, and jumps ahead when `skip` is called. Sockets and threads are real."""

    def __init__(self) -> None:
        super().__init__()
        self._skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self._skipped_s

    def skip(self, seconds: float) -> None:
        """Let so much time have passed."""
        self._skipped_s += seconds


def run_stepped(body: Coroutine[Any, Any, None]) -> None:
    """Run a test on such a loop."""
    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(body)


def skip(seconds: float) -> None:
    """Let so much time have passed on the loop that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    loop.skip(seconds)
