"""A publication that nobody awaits says in the log that it failed, also if it was let go of before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import forge.store as ts


class Noticed(logging.Handler):
    """Sets an event of the running loop when something is logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.event, self._loop = asyncio.Event(), asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        self._loop.call_soon_threadsafe(self.event.set)


def test_a_publication_that_nobody_keeps_logs_its_error(
    drive: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        noticed = Noticed()
        logging.getLogger("forge.store").addHandler(noticed)
        weights = ts.Weights("policy", rank=0, world_size=2)
        weights.publish({"w": torch.ones(4)}, version=1, timeout_s=0.3)  # nobody keeps it, and no other rank comes
        try:
            await noticed.event.wait()
        finally:
            logging.getLogger("forge.store").removeHandler(noticed)

    with caplog.at_level(logging.ERROR, "forge.store"):
        drive(body())
    assert [record for record in caplog.messages if "not awaited" in record and "did not begin" in record]
