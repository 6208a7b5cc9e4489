"""A decode step of fused kernels, against the same model called module by module.

Where there is no GPU but Triton is installed, `TRITON_INTERPRET=1` runs these in Triton's interpreter, on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.config import ModelConfig
from forge.config.layers import read_preset
from forge.kernels.paged import PAGE_TOKENS, PagedLayout
from forge.models.architecture import complete
from forge.models.gpu_step import GpuSteps, StepOptions, joined, neighbours_first, parts_of, products_as
from forge.models.inference import PagedRow, build_for_inference, cache_shapes, paged_layers, parameters_once
from forge.models.language_model import LanguageModel

ON_GPU = torch.cuda.is_available()
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if ON_GPU and not IN_INTERPRETER else "cpu"
NUM_SEQUENCES, NUM_STEPS = (20, 18) if DEVICE == "cuda" else (17, 2)
OPTIONS = [StepOptions(), StepOptions(joins=False), StepOptions(split_from=16)]
if DEVICE == "cuda":
    OPTIONS += [StepOptions(with_lt=True), StepOptions(split_from=16, product_sms=40)]

needs_kernels = pytest.mark.skipif(not (ON_GPU or IN_INTERPRETER), reason="no NVIDIA GPU is visible here")
pytestmark = pytest.mark.alone


def facts_of(**changed: Any) -> ModelConfig:
    asked = {**read_preset("tiny").data["model"], "num_layers": 2, **changed}
    return complete(ModelConfig.model_validate(asked))


def place_side_by_side(model: LanguageModel) -> None:
    """Put all weights into one memory, in the order of an engine."""
    parameters = parameters_once(model)
    memory = torch.empty(sum(each.numel() for each in parameters.values()), device=DEVICE)
    start = 0
    for name in neighbours_first(parameters):
        parameter = parameters[name]
        place = memory[start : start + parameter.numel()].view(parameter.shape)
        parameter.data = place.copy_(parameter.data)
        start += parameter.numel()


def model_of(facts: ModelConfig, *, on_gpu: bool, joins: bool = False) -> LanguageModel:
    dtype = torch.float32
    model = build_for_inference(facts, max_seq_len=64, dtype=dtype, device=torch.device(DEVICE))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3 + (parameter.dim() == 1))
    if joins:
        place_side_by_side(model)
    for layer, shapes in zip(
        paged_layers(model), [cache_shapes(facts, num_pages=2 * NUM_SEQUENCES, on_gpu=on_gpu)] * 2, strict=True
    ):
        layer.k_cache, layer.v_cache = (torch.zeros(shape, dtype=dtype, device=DEVICE) for shape in shapes)
    return model


def rows_of(step: int, start: int, end: int, *, pads: bool = True) -> PagedRow:
    """The sequences [start, end) at their token number `step`; every fifth is padding, if that is asked for."""
    sequences = torch.arange(start, end)
    is_padding = (sequences % 5 == 4) & pads
    table = torch.stack([2 * sequences, 2 * sequences + 1], dim=1).int()
    slots = table[:, step // PAGE_TOKENS].long() * PAGE_TOKENS + step % PAGE_TOKENS
    layout = PagedLayout(
        torch.arange(end - start + 1, dtype=torch.int32, device=DEVICE),
        torch.where(is_padding, 0, step + 1).int().to(DEVICE),
        table.to(DEVICE),
        torch.where(is_padding, -1, slots).to(DEVICE),
        shares=torch.zeros(end - start + 1, 4, dtype=torch.int32, device=DEVICE),
    )
    positions = torch.full((1, end - start), step, device=DEVICE)
    return PagedRow(positions, torch.arange(end - start, device=DEVICE), layout, is_decode=True)


def by_modules(model: LanguageModel, token_ids: Tensor, row: PagedRow) -> Tensor:
    key = model.row_registry.enter(row)
    try:
        hidden: Tensor = model(token_ids, key)
        return hidden
    finally:
        model.row_registry.clear()


@needs_kernels
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("changed", [{}, {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24}, {"family": "llama"}])
@torch.inference_mode()
def test_steps_are_those_of_the_modules(changed: dict[str, Any], options: StepOptions) -> None:
    facts = facts_of(**changed)
    expected_model, model = model_of(facts, on_gpu=DEVICE == "cuda"), model_of(facts, on_gpu=True, joins=options.joins)
    assert GpuSteps.supports(model)
    steps = GpuSteps(model, options)
    assert all((layer.qkv is not None and layer.up_and_gate is not None) == options.joins for layer in steps._layers)
    draw = torch.Generator().manual_seed(1)
    counted = torch.arange(NUM_SEQUENCES, device=DEVICE) % 5 != 4
    for step in range(NUM_STEPS):
        ids = torch.randint(0, facts.vocab_size or 1, (1, NUM_SEQUENCES), generator=draw).to(DEVICE)
        expected = by_modules(expected_model, ids, rows_of(step, 0, NUM_SEQUENCES, pads=False))
        parts = parts_of(NUM_SEQUENCES, options)
        found = steps.hidden([ids[:, a:b] for a, b in parts], [rows_of(step, a, b) for a, b in parts])
        torch.testing.assert_close(found[counted], expected[counted], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not ON_GPU, reason="the library and the multiprocessors of products are settings of CUDA")
def test_settings_of_products_end_with_the_block() -> None:
    def settings() -> tuple[Any, Any]:
        return torch.backends.cuda.preferred_blas_library(), torch._C._get_sm_carveout_experimental()

    before, device = settings(), torch.device("cuda")
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    limited = StepOptions(split_from=16, product_sms=40)
    with products_as(limited, device, num_parts=2):
        assert settings() == (torch._C._BlasBackend.Cublaslt, num_sms - 40)
    assert settings() == before
    with products_as(limited, device, num_parts=1):
        assert settings() == before
    with products_as(StepOptions(with_lt=True), device, num_parts=1):
        assert settings() == (torch._C._BlasBackend.Cublaslt, None)
    with pytest.raises(KeyError), products_as(limited, device, num_parts=2):
        raise KeyError
    assert settings() == before


def test_parts_are_whole_groups_of_eight() -> None:
    split = StepOptions(split_from=256)
    assert parts_of(512, StepOptions()) == ((0, 512),)
    assert parts_of(255, split) == ((0, 255),)
    assert parts_of(512, split) == ((0, 256), (256, 512))
    assert parts_of(264, split) == ((0, 136), (136, 264))


def test_weights_that_follow_each_other_are_one() -> None:
    memory = torch.randn(12 * 4)
    a, b, c = memory[:16].view(4, 4), memory[16:24].view(2, 4), memory[24:].view(6, 4)
    both = joined([a, b])
    assert both is not None
    assert torch.equal(both, torch.cat([a, b]))
    assert both.data_ptr() == a.data_ptr()
    assert joined([a, c]) is None
    assert joined([b, a]) is None
    assert joined([a, b.clone()]) is None


def test_gates_lie_next_to_what_they_gate() -> None:
    names = ["a.wq.weight", "a.w1.weight", "a.w2.weight", "a.w3.weight", "b.w3.weight"]
    assert neighbours_first(names) == ["a.wq.weight", "a.w1.weight", "a.w3.weight", "a.w2.weight", "b.w3.weight"]
