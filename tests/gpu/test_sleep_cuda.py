"""Sleeping engines give memory back to the *device*, where another process can have it: that is what `turns` needs."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

import forge
import generator_models as models
from forge.config import Sampling
from forge.generator.engine import GenerationEngine, Request
from forge.generator.native.engine import NativeEngine
from forge.trainer.actor import _empty_cache
from generator_models import FIRST, prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here")

GIB = 1 << 30
CACHE_GIB = 4.0
KEPT_GIB = {"native": 1.0, "vllm": 3.0}
"""What an engine may keep: kernels and work space; for vLLM, a process of its own with its context and activations."""


def free_gib() -> float:
    torch.cuda.synchronize()
    return float(torch.cuda.mem_get_info()[0] / GIB)


def make(name: str, **fields: Any) -> GenerationEngine:
    config = models.config(FIRST, engine=name, with_gpus=True, max_batch=16, kv_cache_gb=CACHE_GIB, **fields)
    if name == "native":
        return NativeEngine(config, model=models.model(FIRST), tokenizer=models.tokenizer(FIRST))
    from forge.generator.vllm.engine import VllmEngine

    return VllmEngine(config)


async def answer(engine: GenerationEngine) -> tuple[int, ...]:
    greedy = Sampling(temperature=0, max_tokens=16, ignore_eos=True)
    (completion,) = await engine.generate(Request("test", prompt(20), greedy))
    return completion.token_ids


def run(body: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(180), forge.run():
            return await body

    return asyncio.run(limited())


@pytest.mark.parametrize("name", ["native", "vllm"])
def test_what_an_engine_took_is_free_while_it_sleeps(name: str) -> None:
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    square = torch.ones(64, 64, device="cuda")
    assert float((square @ square)[0, 0]) == 64  # this process has its context and work space
    gc.collect()
    torch.cuda.empty_cache()

    async def body() -> None:
        before = free_gib()
        precision = "float32" if name == "native" else "bfloat16"
        engine = make(name, gpu_memory_share=0.2, cuda_graphs=name == "native", precision=precision)
        await engine.start()
        try:
            first = await answer(engine)
            for _ in range(2):
                awake = free_gib()
                assert before - awake > CACHE_GIB
                await engine.sleep()
                asleep = free_gib()
                assert asleep - awake > 0.98 * CACHE_GIB, "the cache, at least"
                assert before - asleep < KEPT_GIB[name]
                await engine.wake()
                assert await answer(engine) == first
        finally:
            await engine.close()

    run(body())


def test_a_trainer_gives_back_what_a_step_needed() -> None:
    _empty_cache()
    before = free_gib()
    kept = torch.ones(GIB // 4, device="cuda")
    needed = torch.ones(3 * GIB // 4, device="cuda")
    del needed
    assert before - free_gib() > 3.9, "PyTorch keeps what was freed"
    _empty_cache()
    assert 0.9 < before - free_gib() < 1.2
    assert float(kept.sum()) == GIB // 4
