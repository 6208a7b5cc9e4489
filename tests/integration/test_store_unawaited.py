"""A publication that nobody awaits says in the log that it failed, also if it was let go of before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import torch

import forge.store as ts


class Noticed(logging.Handler):
    """Gives the running loop what is logged, from whatever thread."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: asyncio.Queue[str] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        self._loop.call_soon_threadsafe(self.messages.put_nowait, record.getMessage())


def test_a_publication_that_nobody_keeps_logs_its_error(drive: Callable[[Any], Any]) -> None:
    async def body() -> str:
        noticed = Noticed()
        logging.getLogger("forge.store").addHandler(noticed)
        weights = ts.Weights("policy", rank=0, world_size=2)
        weights.publish({"w": torch.ones(4)}, version=1, timeout_s=0.3)  # nobody keeps it, and no other rank comes
        try:
            return await noticed.messages.get()
        finally:
            logging.getLogger("forge.store").removeHandler(noticed)

    message = drive(body())
    assert "not awaited" in message
    assert "did not begin" in message
