"""The memory of an idle engine's cache is released for work inside `paused`, and generation continues afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import generator_models as models
from forge.generator.native import runner
from forge.generator.native.engine import NativeEngine
from forge.generator.native.memory import FixedAddressMemory
from forge.runtime.device_memory import OutOfDeviceMemory, Purpose
from generator_bench import LIMIT_S, last_of, native_engine, request, until
from generator_models import FIRST, prompt
from stand_in_driver import STEP, HostMemory, StandIn


def with_engine(body: Callable[[NativeEngine], Coroutine[Any, Any, None]], **fields: Any) -> None:
    async def limited() -> None:
        torch.set_num_threads(1)
        engine = native_engine(models.config(FIRST, **fields), FIRST)
        async with asyncio.timeout(LIMIT_S):
            await engine.start()
            try:
                await body(engine)
            finally:
                await engine.close()

    asyncio.run(limited())


def has_cache(engine: NativeEngine) -> bool:
    return bool(engine.thread.serving().runner._caches)


async def answer(engine: NativeEngine) -> tuple[int, ...]:
    (completion,) = await engine.generate(request(prompt(40), max_tokens=12))
    return completion.token_ids


def test_a_cache_that_is_restored_does_not_end_a_pause() -> None:
    """The trainer's weights have no version yet: a second optimizer step that fails must not let tokens of them out."""

    async def body(engine: NativeEngine) -> None:
        async with engine.paused(engine.version):
            assert engine.release_cache(preempt=True)
            engine.stay_paused()
        waiting = asyncio.ensure_future(answer(engine))
        async with engine.paused(engine.version):
            engine.restore_cache()
            assert has_cache(engine)
        assert engine.stats().is_asleep
        async with engine.paused(engine.version):
            assert engine.release_cache(preempt=True), "a later step needs the memory, too"
        assert engine.stats().num_tokens == 0
        async with engine.paused(1):
            engine.resume()
        assert await waiting == models.greedy(prompt(40), 12)
        assert engine.version == 1

    with_engine(body)


def test_an_idle_engine_releases_its_cache_and_continues_with_an_empty_one() -> None:
    async def body(engine: NativeEngine) -> None:
        expected = models.greedy(prompt(40), 12)
        assert await answer(engine) == expected
        shared_before = engine.stats().num_shared_tokens
        async with engine.paused(3):
            assert engine.release_cache()
            assert not has_cache(engine)
            assert not engine.thread.serving().scheduler.pool._known
            waiting = asyncio.ensure_future(answer(engine))
            await asyncio.sleep(0)
            engine.restore_cache()
            assert has_cache(engine)
        assert await waiting == expected
        assert engine.stats().num_shared_tokens == shared_before, "what was remembered went with the cache"
        assert await answer(engine) == expected
        assert engine.stats().num_shared_tokens > shared_before

    with_engine(body)


def test_completions_under_way_keep_the_cache() -> None:
    async def body(engine: NativeEngine) -> None:
        # So many that they last until the engine is paused, also where this thread has to wait for its turn.
        stream = engine.stream(request(prompt(30), max_tokens=400))
        await until(stream, num_tokens=3)
        async with engine.paused(3):
            assert not engine.release_cache()
            assert has_cache(engine)
        found = (await last_of(stream)).token_ids
        assert len(found) == 400
        assert found == models.choices(prompt(30), found)

    with_engine(body, max_seq_len=512)


def test_an_engine_that_sleeps_has_nothing_to_lend() -> None:
    async def body(engine: NativeEngine) -> None:
        await engine.sleep()
        async with engine.paused(3):
            assert not engine.release_cache()
        await engine.wake()
        assert await answer(engine) == models.greedy(prompt(40), 12)

    with_engine(body)


def test_an_engine_whose_cache_does_not_come_back_sleeps_until_there_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = StandIn(tmp_path, capacity=64 * STEP)

    def choose(device: torch.device, parameters: Mapping[str, Any]) -> FixedAddressMemory:
        def make(size: int, purpose: Purpose) -> HostMemory:
            return HostMemory(gpu.driver(), size, purpose=purpose)

        return FixedAddressMemory(device, parameters, make=make)

    monkeypatch.setattr(runner, "choose_memory", choose)

    async def body(engine: NativeEngine) -> None:
        expected = models.greedy(prompt(40), 12)
        heal: list[Callable[[], Coroutine[Any, Any, None]]] = [engine.wake, lambda: release_and_restore(engine)]
        for mend in heal:
            used = gpu.used
            with pytest.raises(OutOfDeviceMemory):
                await release_and_restore(engine, meanwhile=lambda: gpu.resize(0))
            assert engine.stats().is_asleep
            waiting = asyncio.ensure_future(answer(engine))
            gpu.resize(64 * STEP)
            await mend()
            assert not engine.stats().is_asleep
            assert await waiting == expected
            assert gpu.used == used

    with_engine(body, kv_cache_gb=0.01)


async def release_and_restore(engine: NativeEngine, meanwhile: Callable[[], object] = lambda: None) -> None:
    """As a step of training does."""
    async with engine.paused(engine.version):
        assert engine.release_cache()
        meanwhile()
        engine.restore_cache()
