"""Weights below an adapter in 8 or 4 bits: their bits, their memory, and what is not quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge.config import AdapterConfig, GeneratorConfig, ModelConfig
from forge.config.adapter import BaseDtype
from forge.errors import ConfigError, ModelError
from forge.generator.native.cache_size import step_work
from forge.memory.generator import GeneratorJob
from forge.models.adapter_names import AdapterSpec
from forge.models.inference import build_for_inference, parameters_once
from forge.models.locate import resolve
from forge.models.quantized import QuantizedWeight, quantized_tensors, quantized_weights
from forge.models.quantized_names import (
    BLOCK,
    QuantizedSizes,
    check_library,
    num_scales,
    packed_shape,
    quantized_bytes,
    quantized_slots,
)
from forge.models.sizes import Sizes
from forge.models.tiny import make_tiny
from forge.models.weights import load_hf

bitsandbytes = pytest.importorskip("bitsandbytes", reason="the extra `quantized` is not installed")

SHAPES = [(7, 96), (6, 96), (4, 40), (64, 64), (3, 5), (2, 10, 50)]
KINDS: list[BaseDtype] = ["int8", "nf4"]


def quantized(weight: Tensor, base_dtype: BaseDtype) -> QuantizedWeight:
    shape = tuple(weight.shape)
    dtype = torch.int8 if base_dtype == "int8" else torch.uint8
    packed = torch.full(packed_shape(shape, base_dtype), 77, dtype=dtype)
    found = QuantizedWeight(packed, torch.full((num_scales(shape, base_dtype),), torch.nan), shape, base_dtype)
    found.store(weight)
    return found


def by_hand(weight: QuantizedWeight) -> Tensor:
    """Dequantise in float64 from the definition of the formats; the table of NF4 is the library's."""
    if weight.base_dtype == "int8":
        rows = weight.packed.reshape(-1, weight.shape[-1]).double()
        return (rows * weight.scales.double()[:, None] / 127).view(weight.shape)
    table = bitsandbytes.functional.get_4bit_type("nf4", device="cpu").double()
    values = table[torch.stack([weight.packed >> 4, weight.packed & 15], dim=-1).long()].view(-1, BLOCK)
    size = torch.Size(weight.shape).numel()
    return (values * weight.scales.double()[:, None]).view(-1)[:size].view(weight.shape)


@pytest.mark.parametrize("base_dtype", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_are_those_of_the_format_in_every_precision(shape: tuple[int, ...], base_dtype: BaseDtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[0] = 0
    found = quantized(weight, base_dtype)
    wide = found.dequantize(torch.float32)
    assert torch.allclose(wide.double(), by_hand(found), rtol=3e-7, atol=0)
    assert torch.equal(found.dequantize(torch.bfloat16), wide.bfloat16())
    assert torch.equal(found.dequantize(torch.float64), wide.double())
    assert torch.equal(wide[0], torch.zeros_like(wide[0]))
    assert base_dtype == "nf4" or not found.packed[0].any(), "0 / 0 has no bits of its own"
    largest = float(weight.abs().max())
    assert float((wide - weight).abs().max()) <= largest * (0.5 / 127 if base_dtype == "int8" else 0.16)
    assert found.packed.nbytes + found.scales.nbytes == quantized_bytes(shape, base_dtype)


def test_whole_blocks_have_the_bits_of_the_library() -> None:
    weight = torch.randn(300, 128, generator=torch.Generator().manual_seed(2))
    found = quantized(weight, "nf4")
    packed, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(found.packed, packed.view(-1))
    assert torch.equal(found.scales, state.absmax)
    assert torch.equal(found.dequantize(torch.float32), bitsandbytes.functional.dequantize_4bit(packed, state))
    rows = quantized(weight, "int8")
    values, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weight)
    assert torch.equal(rows.packed, values)
    assert torch.equal(rows.scales, scales)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    make_tiny(place)
    return place


def built(facts: ModelConfig, base_dtype: BaseDtype, dtype: torch.dtype = torch.float32) -> Any:
    spec = AdapterSpec.of(AdapterConfig(targets="attention", base_dtype=base_dtype), facts)
    return build_for_inference(facts, max_seq_len=16, dtype=dtype, device=torch.device("cpu"), adapter=spec)


@pytest.mark.parametrize("base_dtype", KINDS)
def test_only_linear_weights_are_quantised_with_or_without_an_adapter(folder: Path, base_dtype: BaseDtype) -> None:
    facts = resolve(ModelConfig(path=str(folder))).architecture
    narrow, wide = (built(facts, base_dtype, dtype) for dtype in (torch.bfloat16, torch.float32))
    for model in (narrow, wide):
        load_hf([model], folder, facts)
    slots = {slot.name: slot for slot in quantized_slots(facts)}
    assert len(slots) == 7 * (facts.num_layers or 0)
    weights = quantized_weights([narrow])
    assert set(weights) == set(slots)
    assert not set(slots) & set(parameters_once(narrow)), "none of them exists in full"
    kept = {name.rpartition(".")[0] for name in parameters_once(narrow) if "lora" not in name}
    assert {"tok_embeddings", "norm"} <= kept
    for name, tensor in quantized_tensors([wide]).items():
        assert torch.equal(tensor, quantized_tensors([narrow])[name]), "the bits do not depend on the precision"
    source = built_plain(facts, folder)
    for name, weight in weights.items():
        assert torch.equal(
            weight.dequantize(torch.float32), quantized(source[name], base_dtype).dequantize(torch.float32)
        )


def test_a_model_that_shares_weights_shares_those_in_few_bits(folder: Path) -> None:
    """As a generator in the trainer's process and the models of pinned versions do."""
    facts = resolve(ModelConfig(path=str(folder))).architecture
    first = built(facts, "nf4")
    shared = parameters_once(first) | quantized_tensors([first])
    spec = AdapterSpec.of(AdapterConfig(targets="attention", base_dtype="nf4"), facts)
    places: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "adapter": spec}
    second = build_for_inference(facts, max_seq_len=16, shared=shared, **places)
    for name, tensor in quantized_tensors([second]).items():
        assert tensor.data_ptr() == shared[name].data_ptr()
    missing = {name: tensor for name, tensor in shared.items() if not name.endswith("wq.weight_scales")}
    with pytest.raises(ModelError) as refused:
        build_for_inference(facts, max_seq_len=16, shared=missing, **places)
    assert "wq.weight_scales" in str(refused.value.value)


def built_plain(facts: ModelConfig, folder: Path) -> dict[str, nn.Parameter]:
    model = build_for_inference(facts, max_seq_len=16, dtype=torch.float32, device=torch.device("cpu"))
    load_hf([model], folder, facts)
    return parameters_once(model)


@pytest.mark.parametrize("base_dtype", KINDS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_plan_knows_the_bytes(base_dtype: BaseDtype, family: Any) -> None:
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_token": 2, "expert_intermediate_size": 12}
    facts = ModelConfig(
        family=family,
        num_layers=3,
        hidden_size=40,
        intermediate_size=56,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=64,
        max_seq_len=64,
        rope_theta=100.0,
        norm_eps=1e-6,
        tie_embeddings=False,
        **(experts if family == "qwen3_moe" else {}),
    )
    model = built(facts, base_dtype, torch.bfloat16)
    tensors = [*quantized_tensors([model]).values()]
    tensors += [each for name, each in parameters_once(model).items() if "lora" not in name]
    sizes = QuantizedSizes.of(facts, base_dtype)
    job = GeneratorJob(
        facts, Sizes.of(facts), GeneratorConfig(), max_seq_len=64, on_gpu=True, capacity=1 << 30, quantized=sizes
    )
    assert job.weights == sum(tensor.nbytes for tensor in tensors)
    assert sizes.largest == max(torch.Size(weight.shape).numel() for weight in quantized_weights([model]).values())
    work = step_work(facts, GeneratorConfig(), item=2, on_gpu=True, base_dtype=base_dtype)
    assert work.weight == sizes.dequantized_bytes(2) >= 2 * sizes.largest
    assert work.num_bytes == work.weight + step_work(facts, GeneratorConfig(), item=2, on_gpu=True).num_bytes


def test_the_missing_package_is_named_with_its_extra() -> None:
    check_library(None, package="forge_has_no_such_package")
    with pytest.raises(ConfigError) as refused:
        check_library("nf4", package="forge_has_no_such_package")
    assert refused.value.path == "adapter.base_dtype"
    assert "torchforge[quantized]" in str(refused.value.repair)
