"""The handle of the generators: what it does when their queues are full, or when one dies."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from episodes import make_completion
from forge.config import Sampling
from forge.errors import ActorFailure, FanoutError, Overloaded, ServiceStopped, SyncError
from forge.generator.engine import UpdateReport
from forge.loops.casting import Cast, PolicyHandle
from forge.service.records import Outcome
from forge.types import Prompt

PROMPT = Prompt("p", text="hello")


class Full:
    """A generator with room for two requests."""

    def __init__(self) -> None:
        self.running = self.num_refused = 0
        self.go_on = asyncio.Event()

    async def route(self, **request: Any) -> list[Any]:
        if self.running == 2:
            self.num_refused += 1
            raise Overloaded("full")
        self.running += 1
        await self.go_on.wait()
        self.running -= 1
        return [make_completion()]


def policy(**endpoints: Any) -> PolicyHandle:
    return PolicyHandle(SimpleNamespace(**endpoints))  # type: ignore[arg-type]


def test_requests_beyond_the_queue_wait_until_others_are_done() -> None:
    async def body() -> None:
        full = Full()
        handle = policy(generate=full)
        asking = [asyncio.ensure_future(handle.generate(PROMPT, sampling=Sampling())) for _ in range(7)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert (full.running, full.num_refused) == (2, 5)
        full.go_on.set()
        assert [len(found) for found in await asyncio.wait_for(asyncio.gather(*asking), 20)] == [1] * 7

    asyncio.run(body())


def test_a_request_that_is_too_large_by_itself_raises() -> None:
    async def body() -> None:
        full = Full()
        full.running = 2
        with pytest.raises(Overloaded):
            await policy(generate=full).generate(PROMPT, sampling=Sampling())

    asyncio.run(body())


def updated(*outcomes: Outcome) -> Any:
    async def fanout(version: int) -> list[Any]:
        if all(outcome.ok for outcome in outcomes):
            return [outcome.value for outcome in outcomes]
        raise FanoutError("some failed", outcomes=outcomes)

    return asyncio.run(policy(update_weights=SimpleNamespace(fanout=fanout)).take(3))


def test_a_generator_that_dies_during_an_update_is_not_waited_for() -> None:
    report = UpdateReport(3, "keep", 0.1, 0.0)
    assert updated(Outcome(0, report), Outcome(1, error=ActorFailure("died"))) == [report]
    assert updated(Outcome(0, report), Outcome(1, None)) == [report]


def test_an_update_that_fails_otherwise_is_raised() -> None:
    report = UpdateReport(3, "keep", 0.1, 0.0)
    with pytest.raises(FanoutError):
        updated(Outcome(0, report), Outcome(1, error=SyncError("not the trainer's weights")))


def test_a_service_that_does_not_end_in_order_cuts_nobody_short() -> None:
    """The trainer completes its last checkpoint as it closes."""
    done: list[str] = []

    class Slow:
        async def close(self) -> None:
            for _ in range(5):
                await asyncio.sleep(0)
            done.append("closed")

    class Lost:
        async def close(self) -> None:
            raise ServiceStopped("all its replicas were given up")

    players: Any = (Slow(), Lost(), Slow(), None)
    asyncio.run(Cast(*players).close())
    assert done == ["closed", "closed"]
    players = (Lost(), Slow(), Slow(), None)
    with pytest.raises(ServiceStopped):
        asyncio.run(Cast(*players).close())
