"""What a policy survives: the death of a replica amid requests, with new weights and without."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import generator_models as models
from forge.errors import ActorFailure
from forge.generator.actor import Generator
from forge.types import VersionSpan
from generator_actor import publish
from generator_models import FIRST, SECOND, prompt
from late_generator import LateGenerator

pytestmark = pytest.mark.usefixtures("leaves_nothing")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


async def restarted(policy: Any, *, restarts: int) -> None:
    await policy.wait_until(lambda metrics: metrics.restarts >= restarts and metrics.num_healthy == 2, timeout_s=600)


def test_a_killed_replica_loses_nothing_and_comes_back_with_the_newest_weights(drive: Any) -> None:
    async def body() -> None:
        policy = await Generator.options(num_replicas=2, num_threads=1, with_gpus=False).as_service(
            models.config(FIRST, max_seq_len=512, max_batch=16)
        )
        await publish(1, FIRST, canary=FIRST)
        await policy.update_weights.fanout()
        await kill_amid_requests(policy)

    drive(body())


def test_a_version_that_came_while_a_replica_restarted_is_not_lost(drive: Any, tmp_path: Path) -> None:
    async def body() -> None:
        options = {"num_replicas": 2, "num_threads": 1, "with_gpus": False, "env": {"FORGE_TEST_GATE": str(tmp_path)}}
        policy = await LateGenerator.options(**options).as_service(models.config(FIRST, max_seq_len=512))
        await publish(1, FIRST, canary=FIRST)
        await policy.update_weights.fanout()
        gate = tmp_path / "gate"
        os.mkfifo(gate)
        os.kill((await policy.get_metrics()).replicas[0].pids[0], signal.SIGKILL)
        opened = await asyncio.to_thread(gate.open, "w")  # when its setup has taken version 1, and is not over
        await publish(2, SECOND, canary=SECOND)
        assert [report.version for report in await policy.update_weights.fanout()] == [2]
        opened.close()
        await restarted(policy, restarts=1)
        asked = [policy.generate.route(token_ids=prompt(20), sampling={**GREEDY, "max_tokens": 8}) for _ in range(8)]
        for (completion,) in await asyncio.gather(*asked):
            assert completion.versions[-1].version == 2
        assert [stats.version for stats in await policy.stats.fanout()] == [2, 2]

    drive(body())


async def kill_amid_requests(policy: Any) -> None:
    await publish(2, SECOND, canary=SECOND)  # and nobody is told: only the restart brings a replica there
    streams = [policy.generate_stream.stream(token_ids=prompt(9 + place), sampling=GREEDY) for place in range(2)]
    asked = [prompt(10 + place) for place in range(24)]
    calls = [
        asyncio.ensure_future(policy.generate.route(token_ids=ids, sampling={**GREEDY, "max_tokens": 480}))
        for ids in asked
    ]
    for stream in streams:
        await anext(stream)
    busiest = max((await policy.get_metrics()).replicas, key=lambda replica: replica.in_flight)
    os.kill(busiest.pids[0], signal.SIGKILL)
    found = [completion for (completion,) in await asyncio.gather(*calls)]
    assert [completion.prompt_ids for completion in found] == asked
    for completion in found:
        assert len(completion.versions) == 1
        kind = {1: FIRST, 2: SECOND}[completion.version]
        assert completion.token_ids == models.choices(completion.prompt_ids, completion.token_ids, kind)
    assert (await policy.get_metrics()).num_retried > 0, "nothing was in flight: the test shows nothing"
    lost = await asyncio.gather(*(rest(stream) for stream in streams), return_exceptions=True)
    assert [type(each) for each in lost if isinstance(each, Exception)] == [ActorFailure]
    await restarted(policy, restarts=1)
    assert sorted(stats.version for stats in await policy.stats.fanout()) == [1, 2]
    reports = await policy.update_weights.fanout()
    assert [report.version for report in reports] == [2, 2]
    again = [policy.generate.route(token_ids=prompt(20), sampling={**GREEDY, "max_tokens": 8}) for _ in range(4)]
    for (completion,) in await asyncio.gather(*again):
        assert completion.versions == (VersionSpan(2, 0, 8),)
        assert completion.token_ids == models.greedy(prompt(20), 8, SECOND)


async def rest(stream: Any) -> int:
    return len([delta async for delta in stream])
