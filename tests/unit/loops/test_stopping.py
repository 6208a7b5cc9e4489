"""Work that is left when a run is asked to end."""

from __future__ import annotations

import asyncio

from forge.loops.stopping import Stop


def test_work_is_awaited_or_left_when_the_run_is_asked_to_end() -> None:
    was_cancelled: list[bool] = []

    async def work(event: asyncio.Event) -> int:
        try:
            await event.wait()
        except asyncio.CancelledError:
            was_cancelled.append(True)
            raise
        return 7

    async def body() -> None:
        stop, ready = Stop(), asyncio.Event()
        asyncio.get_running_loop().call_soon(ready.set)
        assert await stop.unless(work(ready)) == 7
        asyncio.get_running_loop().call_soon(stop.ask)
        assert await stop.unless(work(asyncio.Event())) is None
        assert was_cancelled == [True]

    asyncio.run(asyncio.wait_for(body(), 600))
