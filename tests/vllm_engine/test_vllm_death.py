"""Engines of several kinds, each to its end: speculation, tensor parallelism, and what a killed process leaves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from forge.errors import EngineDead, PromptError
from forge.store import Weights
from generator_bench import make_engine
from leftovers import has_ended
from vllm_kit import PROMPT, config, greedy, request, token_logprobs, weights

pytestmark = pytest.mark.alone  # engines that are killed leave semaphores, which other tests would take for theirs

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
REPEATING = [(3 * place) % 37 + 8 for place in range(64)]


def alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if not has_ended(pid, limit_s=0)]


async def kill(engine: Any, pid: int) -> None:
    """Kill a process of an engine that works; everything fails at once, and nothing is left."""
    pids = engine.stats().more["pids"]
    stream = engine.stream(request(max_tokens=400))
    await anext(stream)
    waiting = [asyncio.ensure_future(engine.generate(request(max_tokens=400))) for _ in range(3)]
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(600):
        await engine.died.wait()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, EngineDead), outcome
        with pytest.raises(EngineDead) as caught:
            async for _ in stream:
                pass
    assert caught.value.repair
    for call in (
        engine.generate(request()),
        engine.update_weights("latest", "keep"),
        engine.sleep(),
        engine.score([[1, 2]]),
    ):
        with pytest.raises(EngineDead):
            await call
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    await engine.close()
    assert alive(pids) == []


def test_speculation_changes_no_token_and_its_engine_dies_loudly(on_loop):
    async def body() -> None:
        told: list[BaseException] = []
        engine = make_engine(config(engine_args={"speculative_config": NGRAM}), on_death=told.append)
        await engine.start()
        (made,) = await engine.generate(request(REPEATING, max_tokens=48))
        assert list(made.token_ids) == greedy(0, REPEATING, 48)
        expected = token_logprobs(0, REPEATING, made.token_ids)
        assert max(abs(a - b) for a, b in zip(made.logprobs, expected, strict=True)) < 1e-5
        more = engine.stats().more
        assert 0 < more["num_accepted"] <= more["num_drafted"]
        with pytest.raises(PromptError) as caught:
            await engine.generate(request(temperature=0.5))
        assert caught.value.path == "sampling.temperature"
        await kill(engine, more["pids"][0])
        assert [type(error) for error in told] == [EngineDead]
        assert str(more["pids"][0]) in str(told[0])

    on_loop(body())


def test_two_workers_are_one_engine(on_loop):
    async def body() -> None:
        engine = make_engine(config(), tensor_parallel=2)
        await engine.start()
        pids = engine.stats().more["pids"]
        assert len(set(pids)) == 3
        (made,) = await engine.generate(request())
        assert list(made.token_ids) == greedy(0, PROMPT, 12)
        store = Weights(engine.config.weights, rank=0, world_size=1)
        newest = max((info.number for info in await store.versions()), default=0) + 1
        await store.publish(weights(1), version=newest)
        assert (await engine.update_weights("latest", "keep")).version == newest
        (made,) = await engine.generate(request())
        assert list(made.token_ids) == greedy(1, PROMPT, 12)
        longest = [(5 * place) % 450 + 20 for place in range(engine.max_seq_len)]
        scores = await engine.score([longest, PROMPT])
        for ids, found in ((longest, scores[0]), (PROMPT, scores[1])):
            expected = token_logprobs(1, ids[:1], ids[1:])
            assert max(abs(a - b) for a, b in zip(found[1:], expected, strict=True)) < 1e-4
        marks = {name for worker in engine.workers for name in worker["shm_names"]}
        assert len(marks) > 3, "workers speak through shared memory"
        await kill(engine, pids[2])
        for folder in ("/dev/shm", "/tmp"):
            assert [name for name in os.listdir(folder) if name.startswith(tuple(marks))] == []

    on_loop(body())
