"""Memory goes back to the *device*, where another process can have it, and comes back to the addresses that recorded
steps know: that is what `turns` and `shared` need."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import forge
import generator_models as models
from forge.config import DistributedConfig, ModelConfig, Sampling, TrainerConfig, TrainingConfig
from forge.generator.engine import GenerationEngine, Request
from forge.generator.native.cache_size import ColocatedGeneratorConfig
from forge.generator.native.engine import NativeEngine
from forge.generator.native.runner import ModelRunner
from forge.generator.native.thread import WeightUpdate
from forge.loops.colocated import SharedPolicy
from forge.runtime.device_memory import DeviceMemory, OutOfDeviceMemory, Purpose, open_driver, release_dropped
from forge.trainer.actor import _empty_cache
from forge.types import Batch, Sample
from generator_bench import make_engine
from generator_models import FIRST, SECOND, prompt

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here"),
]

GIB = 1 << 30
CACHE_GIB = 4.0
KEPT_GIB = {"native": 1.0, "vllm": 3.0}
"""What an engine may keep: kernels and work space; for vLLM, a process of its own with its context and activations."""


GREEDY = Sampling(temperature=0, max_tokens=16, ignore_eos=True)
PURPOSE = Purpose("a test", "test.size", "ask for less")


@pytest.fixture(autouse=True)
def _clean() -> None:
    """This process has its context and work space, and nothing of the test before."""
    square = torch.ones(64, 64, device="cuda")
    assert float((square @ square)[0, 0]) == 64
    del square
    gc.collect()
    release_dropped()
    torch.cuda.empty_cache()


def free_gib() -> float:
    torch.cuda.synchronize()
    return float(torch.cuda.mem_get_info()[0] / GIB)


def make(name: str, **fields: Any) -> GenerationEngine:
    config = models.config(FIRST, engine=name, with_gpus=True, max_batch=16, kv_cache_gb=CACHE_GIB, **fields)
    if name == "native":
        return NativeEngine(config, model=models.model(FIRST), tokenizer=models.tokenizer(FIRST))
    return make_engine(config)


async def answer(engine: GenerationEngine) -> tuple[int, ...]:
    (completion,) = await engine.generate(Request("test", prompt(20), GREEDY))
    return completion.token_ids


def runner_of(engine: NativeEngine) -> ModelRunner:
    return engine.thread.serving().runner


async def with_native(body: Callable[[NativeEngine], Coroutine[Any, Any, None]], **fields: Any) -> None:
    engine = make("native", precision="float32", **fields)
    assert isinstance(engine, NativeEngine)
    await engine.start()
    try:
        await body(engine)
    finally:
        await engine.close()


def run(body: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(180), forge.run():
            return await body

    return asyncio.run(limited())


@pytest.mark.parametrize("name", ["native", "vllm"])
def test_what_an_engine_took_is_free_while_it_sleeps(name: str) -> None:
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")

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


# ---- Addresses that stay -------------------------------------------------------------------------------------------


def new_memory(num_bytes: int, **options: Any) -> DeviceMemory:
    torch.cuda.init()
    driver = open_driver(torch.cuda.current_device())
    assert driver is not None, "the driver of these tests maps memory"
    return DeviceMemory(driver, num_bytes, purpose=PURPOSE, **options)


def test_recorded_operations_survive_that_memory_goes_and_comes() -> None:
    memory = new_memory(GIB)
    before = free_gib()
    memory.restore()
    source = memory.tensor().view(torch.float32)[: 1 << 20]
    target = torch.zeros_like(source)
    assert (source.data_ptr(), source.is_cuda) == (memory.address, True)
    stream = torch.cuda.Stream()
    source.fill_(3)
    with torch.cuda.stream(stream):
        target.copy_(source).add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        target.copy_(source).add_(1)
    for value in (5, 7):
        assert before - free_gib() > 0.9
        memory.release()
        assert before - free_gib() < 0.1
        memory.restore()
        source.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert float(target.min()) == float(target.max()) == value + 1


def test_a_tensor_keeps_its_memory() -> None:
    before = free_gib()
    memory = new_memory(GIB)
    memory.restore()
    part, gone = memory.tensor()[5:9].fill_(4), weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is not None
    assert part.tolist() == [4] * 4
    assert before - free_gib() > 0.9
    del part
    gc.collect()
    assert gone() is None
    release_dropped()
    assert before - free_gib() < 0.1


def test_what_torch_holds_for_later_is_freed_first() -> None:
    held = torch.empty(int((free_gib() - 3) * GIB), dtype=torch.uint8, device="cuda")
    memory = new_memory(8 * GIB, spare=torch.cuda.empty_cache)
    with pytest.raises(OutOfDeviceMemory, match="no room for a test") as caught:
        memory.restore()
    assert (caught.value.path, caught.value.value, caught.value.repair) == ("test.size", "8 GiB", "ask for less")
    assert "at most what is free" in (caught.value.rule or "")
    del held
    assert free_gib() < 8, "torch keeps it"
    memory.restore()
    assert int(memory.tensor()[::GIB].fill_(1).sum()) == 8
    memory.close()


# ---- The embedded engine -------------------------------------------------------------------------------------------


def test_recorded_steps_survive_sleep() -> None:
    async def body(engine: NativeEngine) -> None:
        first = await answer(engine)
        runner = runner_of(engine)
        graphs, addresses = runner._graphs, {name: each.data_ptr() for name, each in runner.parameters.items()}
        caches = [each.data_ptr() for pair in runner._caches for each in pair]
        assert graphs is not None
        for _ in range(2):
            await engine.sleep()
            assert runner._graphs is None, "nothing can be replayed meanwhile"
            assert not any(each.is_cuda for each in runner.parameters.values())
            await engine.wake()
            assert runner._graphs is graphs
            assert {name: each.data_ptr() for name, each in runner.parameters.items()} == addresses
            assert [each.data_ptr() for pair in runner._caches for each in pair] == caches
            assert await answer(engine) == first == models.greedy(prompt(20), 16)

    run(with_native(body))


def test_weights_that_came_during_sleep_are_what_recorded_steps_use() -> None:
    async def body(engine: NativeEngine) -> None:
        await answer(engine)
        graphs = runner_of(engine)._graphs
        await engine.sleep()
        await engine.thread.update_weights(
            WeightUpdate("keep", 5, lambda: runner_of(engine).update_weights(models.weights(SECOND)))
        )
        await engine.wake()
        assert runner_of(engine)._graphs is graphs
        assert await answer(engine) == models.greedy(prompt(20), 16, SECOND)

    run(with_native(body))


def test_waking_without_room_is_told_and_can_be_tried_again() -> None:
    async def body(engine: NativeEngine) -> None:
        first = await answer(engine)
        await engine.sleep()
        held = torch.empty(int((free_gib() - 2) * GIB), dtype=torch.uint8, device="cuda")
        with pytest.raises(OutOfDeviceMemory, match="the cache for keys and values") as caught:
            await engine.wake()
        assert caught.value.path == "generator.kv_cache_gb"
        assert engine.stats().is_asleep
        assert not any(each.is_cuda for each in runner_of(engine).parameters.values())
        del held
        await engine.wake()
        assert await answer(engine) == first

    run(with_native(body))


def test_the_cache_of_an_idle_engine_is_lent() -> None:
    async def body(engine: NativeEngine) -> None:
        first = await answer(engine)
        graphs, before = runner_of(engine)._graphs, free_gib()
        for version in (1, 2):
            async with engine.paused(version):
                assert engine.release_cache()
                assert free_gib() - before > 0.98 * CACHE_GIB
                engine.restore_cache()
            assert runner_of(engine)._graphs is graphs
            assert await answer(engine) == first
        stream = engine.stream(Request("under way", prompt(30), GREEDY.model_copy(update={"max_tokens": 200})))
        await anext(stream)
        async with engine.paused(3):
            assert not engine.release_cache()
        async for _ in stream:
            pass

    run(with_native(body))


def test_a_guest_takes_what_it_wants_and_no_more() -> None:
    config = models.config(FIRST, with_gpus=True, max_batch=16, max_seq_len=256)
    guest = ColocatedGeneratorConfig(
        **{name: getattr(config, name) for name in type(config).model_fields}, expected_bytes=GIB
    )
    alone, beside = (ModelRunner(each, models.model(FIRST), max_seq_len=256) for each in (config, guest))
    wanted = 17 * 16 + 1
    assert (alone.num_pages, beside.num_pages) == (4 * wanted, wanted)


def test_a_trainer_that_generates_trains_with_the_memory_of_the_cache() -> None:
    free: dict[str, float] = {}

    class Watching(SharedPolicy):
        async def _do(self, function: Any, *args: Any, **kwargs: Any) -> Any:
            free.setdefault(getattr(function, "func", function).__name__, free_gib())
            return await super()._do(function, *args, **kwargs)

    async def body() -> None:
        training = TrainingConfig(max_seq_len=256, schedule="constant", warmup_steps=0, learning_rate=1e-2)
        distributed = DistributedConfig(with_gpus=True, precision="bfloat16")
        model = ModelConfig(path=str(models.folder(FIRST)))
        generator = models.config(FIRST, with_gpus=True, max_batch=16, kv_cache_gb=CACHE_GIB)
        policy = Watching(TrainerConfig(model=model, training=training, distributed=distributed), None, generator)
        await policy.setup()
        try:
            (first,) = await policy.generate(token_ids=prompt(20), sampling=GREEDY)
            line = torch.tensor([*first.prompt_ids, *first.token_ids])
            weights = torch.ones(len(line))
            weights[0] = 0
            await policy.train_step(Batch.of([Sample(line, weights)]))
            await policy.publish_weights(1)
            (second,) = await policy.generate(token_ids=prompt(20), sampling=GREEDY)
            assert (second.version, len(second.token_ids)) == (1, 16)
            assert second.token_ids != first.token_ids
        finally:
            await policy.close()

    run(body())
    assert free["train_step"] - free["release_cache"] > 0.98 * CACHE_GIB
    assert free["train_step"] - free["copy_weights"] > 0.9 * CACHE_GIB, "it was taken again"
