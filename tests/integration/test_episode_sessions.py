"""Episodes and the replicas that have their conversations in the cache."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
from typing import Any

import pytest

from forge.rollout.episode_worker import ServicePolicy
from session_actors import Echo

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("leaves_nothing")]

OPTIONS = {"max_tokens": 1, "seed": 0}


def turn(policy: ServicePolicy, *, first: int = 1) -> asyncio.Task[Any]:
    """Sample in a task that knows nothing of the episode's, as a server's handler does."""
    return asyncio.create_task(
        policy.sample([first, 2], options=OPTIONS, session="branch"), context=contextvars.Context()
    )


def test_every_branch_of_an_episode_goes_to_its_replica(drive: Any) -> None:
    async def body() -> None:
        service = await Echo.options(num_replicas=2, routing="least_loaded").as_service()

        async def episode() -> str:
            async with service.session() as session:
                policy = ServicePolicy(service, max_seq_len=8, session=session)
                first = (await turn(policy)).text
                branches = await asyncio.gather(*(turn(policy) for _ in range(3)))
                assert {each.text for each in branches} == {first}
                return str(first)

        homes = await asyncio.gather(*(episode() for _ in range(200)))
        assert sorted(homes.count(home) for home in set(homes)) == [100, 100]
        metrics = await service.get_metrics()
        assert (metrics.num_sessions, [each.num_sessions for each in metrics.replicas]) == (0, [0, 0])

    drive(body())


def test_an_episode_moves_when_its_replica_dies_and_loses_no_turn(drive: Any) -> None:
    async def body() -> None:
        service = await Echo.options(num_replicas=2, restart_backoff_s=30.0, stable_s=0.0).as_service()
        async with service.session() as session:
            policy = ServicePolicy(service, max_seq_len=8, session=session)
            home = int((await turn(policy)).text)
            pending = [turn(policy) for _ in range(3)]
            os.kill(home, signal.SIGKILL)
            found = {each.text for each in await asyncio.gather(*pending)}
            after = {(await turn(policy)).text for _ in range(4)}
            assert len(after) == 1
            assert str(home) not in after
            assert found <= {str(home), *after}, "asked before the death, or asked again after it"

    drive(body())


def test_an_episode_that_is_cancelled_ends_its_session(drive: Any) -> None:
    async def body() -> None:
        service = await Echo.options(num_replicas=2).as_service()
        begun = asyncio.Barrier(21)

        async def episode() -> None:
            async with service.session() as session:
                policy = ServicePolicy(service, max_seq_len=8, session=session)
                waiting = turn(policy, first=0)
                try:
                    await begun.wait()
                    await waiting
                finally:
                    waiting.cancel()

        tasks = [asyncio.create_task(episode()) for _ in range(20)]
        await begun.wait()
        assert (await service.get_metrics()).num_sessions == 20
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await service.get_metrics()).num_sessions == 0

    drive(body())
