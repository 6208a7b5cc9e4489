"""A worker goes from one controller to the next."""

from __future__ import annotations

import asyncio
import os
import socket

from forge.runtime.hosts import is_released

NAME = f"\0forge-test-{os.getpid()}"


def test_a_host_whose_holder_ends_is_released() -> None:
    async def body() -> bool:
        holder = socket.socket(socket.AF_UNIX)
        holder.bind(NAME)
        holder.listen()
        waiting = asyncio.ensure_future(is_released(NAME, 60))
        while not waiting.done():
            await asyncio.sleep(0)
            holder.close()
        return waiting.result()

    assert asyncio.run(body())


def test_a_host_that_is_held_is_not() -> None:
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(NAME)
        holder.listen()
        assert not asyncio.run(is_released(NAME, 0.05))


def test_a_host_that_nobody_holds_is_free() -> None:
    assert asyncio.run(is_released(NAME, 60))
