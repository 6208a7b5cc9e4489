"""Leases end, and so does the thread that ends them."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import forge
import forge.store as ts


class Unreadable(torch.nn.Linear):
    """A module that does not give its state dict."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not now")


def test_a_fetch_into_a_module_that_has_no_state_dict_lets_its_version_go(drive: Callable[[Any], Any]) -> None:
    async def body() -> None:
        weights = ts.Weights("policy", rank=0, world_size=1)
        await weights.publish({"w": torch.ones(1 << 16)}, version=1)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="not now"):
                await weights.fetch(Unreadable(2, 2))
        assert [info.num_readers for info in await weights.versions()] == [0]

    drive(body())


def test_a_run_that_has_ended_leaves_no_thread_for_leases() -> None:
    async def body() -> None:
        async with forge.run():
            weights = ts.Weights("policy", rank=0, world_size=1)
            await weights.publish({"w": torch.ones(1 << 16)}, version=1)
            fetched = await weights.fetch()
            fetched.release()

    def num_threads() -> int:
        return sum(thread.name == "forge-leases" for thread in threading.enumerate())

    before = num_threads()
    for _ in range(3):
        asyncio.run(body())
    gc.collect()
    deadline = time.monotonic() + 600
    while num_threads() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert num_threads() <= before
