"""Weights below an adapter in few bits on a GPU: the bits of the CPU, and less memory than bfloat16."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.config import AdapterConfig, DistributedConfig, GeneratorConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.config.adapter import BaseDtype
from forge.config.generator import Sampling
from forge.generator.engine import Request
from forge.generator.native.engine import NativeEngine
from forge.models.locate import resolve
from forge.models.quantized import QuantizedWeight, quantized_tensors
from forge.models.quantized_names import num_scales, packed_shape, quantized_bytes, quantized_slots
from forge.models.tiny import make_tiny
from forge.trainer.engine import Engine
from forge.types import Batch, Sample

pytest.importorskip("bitsandbytes", reason="the extra `quantized` is not installed")
pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here"),
]

KINDS: list[BaseDtype] = ["int8", "nf4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    make_tiny(place, hidden_size=512, intermediate_size=1536)
    return place


def engine(folder: Path, base_dtype: BaseDtype | None, *, on_gpu: bool, precision: Any = "bfloat16") -> Engine:
    return Engine(
        TrainerConfig(
            model=ModelConfig(path=str(folder)),
            adapter=AdapterConfig(rank=4, base_dtype=base_dtype),
            training=TrainingConfig(max_steps=4, max_seq_len=64, learning_rate=1e-2),
            distributed=DistributedConfig(with_gpus=on_gpu, precision=precision),
        )
    )


def batch() -> Batch:
    return Batch.of([Sample(torch.arange(40), torch.tensor([0.0] + [1.0] * 39), identity="one")])


@pytest.mark.parametrize("base_dtype", KINDS)
@pytest.mark.parametrize("shape", [(7, 96), (300, 128), (2, 64, 96)], ids=str)
def test_a_gpu_dequantises_to_the_bits_of_the_cpu(shape: tuple[int, ...], base_dtype: BaseDtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    dtype = torch.int8 if base_dtype == "int8" else torch.uint8
    here = QuantizedWeight(
        torch.empty(packed_shape(shape, base_dtype), dtype=dtype),
        torch.empty(num_scales(shape, base_dtype)),
        shape,
        base_dtype,
    )
    here.store(weight)
    there = QuantizedWeight(here.packed.cuda(), here.scales.cuda(), shape, base_dtype)
    for precision in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(there.dequantize(precision).cpu(), here.dequantize(precision))


@pytest.mark.parametrize("base_dtype", KINDS)
def test_the_same_base_is_trained_in_less_memory(base_dtype: BaseDtype, folder: Path) -> None:
    held: dict[str, int] = {}
    tensors: dict[bool, dict[str, torch.Tensor]] = {}
    losses: dict[bool, float] = {}
    for on_gpu in (True, False):
        trained = engine(folder, base_dtype, on_gpu=on_gpu, precision="float32")
        tensors[on_gpu] = {name: each.cpu() for name, each in quantized_tensors(trained.parts).items()}
        losses[on_gpu] = trained.train_step(batch()).loss
        trained.close()
    assert all(torch.equal(tensors[True][name], tensors[False][name]) for name in tensors[False])
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    for kind in (base_dtype, None):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        trained = engine(folder, kind, on_gpu=True)
        held[str(kind)] = torch.cuda.memory_allocated() - before
        facts = trained.model.architecture
        trained.close()
        del trained
    shapes = [slot.shape for slot in quantized_slots(facts)]
    saved = sum(2 * torch.Size(shape).numel() - quantized_bytes(shape, base_dtype) for shape in shapes)
    assert held["None"] - held[base_dtype] == pytest.approx(saved, rel=0.05)


@pytest.mark.parametrize("base_dtype", KINDS)
def test_a_generator_with_recorded_steps_answers_the_same_after_sleep(base_dtype: BaseDtype, folder: Path) -> None:
    model = ModelConfig(path=str(folder))
    settings = GeneratorConfig(
        model=model,
        adapter=AdapterConfig(rank=4, base_dtype=base_dtype),
        with_gpus=True,
        max_batch=4,
        max_seq_len=128,
        kv_cache_gb=0.25,
    )
    greedy = Sampling(temperature=0, max_tokens=16, ignore_eos=True)

    async def run() -> None:
        native = NativeEngine(settings, model=resolve(model))
        await native.start()
        try:
            (first,) = await native.generate(Request("first", tuple(range(20)), greedy))
            await native.sleep()
            await native.wake()
            (again,) = await native.generate(Request("again", tuple(range(20)), greedy))
            assert again.token_ids == first.token_ids
        finally:
            await native.close()

    asyncio.run(run())
