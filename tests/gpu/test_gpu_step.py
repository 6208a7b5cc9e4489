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
from forge.models.adapter_segments import LIVE, AdapterSegment
from forge.models.architecture import complete
from forge.models.gpu_step import GpuSteps, joined, neighbours_first
from forge.models.inference import PagedRow, build_for_inference, cache_shapes, paged_layers, parameters_once
from forge.models.language_model import LanguageModel

ON_GPU = torch.cuda.is_available()
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if ON_GPU and not IN_INTERPRETER else "cpu"
NUM_SEQUENCES, NUM_STEPS = (20, 18) if DEVICE == "cuda" else (17, 2)
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


def rows_of(step: int, *, pads: bool) -> PagedRow:
    """All sequences at their token number `step`; every fifth is padding, if that is asked for."""
    sequences = torch.arange(NUM_SEQUENCES)
    is_padding = (sequences % 5 == 4) & pads
    table = torch.stack([2 * sequences, 2 * sequences + 1], dim=1).int()
    slots = table[:, step // PAGE_TOKENS].long() * PAGE_TOKENS + step % PAGE_TOKENS
    layout = PagedLayout(
        torch.arange(NUM_SEQUENCES + 1, dtype=torch.int32, device=DEVICE),
        torch.where(is_padding, 0, step + 1).int().to(DEVICE),
        table.to(DEVICE),
        torch.where(is_padding, -1, slots).to(DEVICE),
        shares=torch.zeros(NUM_SEQUENCES + 1, 4, dtype=torch.int32, device=DEVICE),
    )
    positions = torch.full((1, NUM_SEQUENCES), step, device=DEVICE)
    return PagedRow(positions, torch.arange(NUM_SEQUENCES, device=DEVICE), layout, is_decode=True)


def by_modules(model: LanguageModel, token_ids: Tensor, row: PagedRow) -> Tensor:
    key = model.row_registry.enter(row)
    try:
        hidden: Tensor = model(token_ids, key)
        return hidden
    finally:
        model.row_registry.clear()


MIXTURE = {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_token": 2, "expert_intermediate_size": 64}


@needs_kernels
@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize(
    "changed", [{}, {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24}, {"family": "llama"}, MIXTURE], ids=str
)
@torch.inference_mode()
def test_steps_are_those_of_the_modules(changed: dict[str, Any], joins: bool) -> None:
    facts = facts_of(**changed)
    expected_model, model = model_of(facts, on_gpu=DEVICE == "cuda"), model_of(facts, on_gpu=True, joins=joins)
    assert GpuSteps.supports(model)
    steps = GpuSteps(model)
    assert all((layer.qkv is not None) == joins for layer in steps._layers)
    assert all((layer.up_and_gate is not None) == (joins and changed is not MIXTURE) for layer in steps._layers)
    draw = torch.Generator().manual_seed(1)
    counted = torch.arange(NUM_SEQUENCES, device=DEVICE) % 5 != 4
    for step in range(NUM_STEPS):
        ids = torch.randint(0, facts.vocab_size or 1, (1, NUM_SEQUENCES), generator=draw).to(DEVICE)
        expected = by_modules(expected_model, ids, rows_of(step, pads=False))
        found = steps.hidden(ids, rows_of(step, pads=True))
        torch.testing.assert_close(found[counted], expected[counted], rtol=1e-4, atol=1e-4)


@needs_kernels
@torch.inference_mode()
def test_a_step_does_not_take_over_the_adapters_of_another() -> None:
    facts = facts_of(**MIXTURE)
    model = model_of(facts, on_gpu=True)
    ids, row = torch.zeros(1, NUM_SEQUENCES, dtype=torch.int64, device=DEVICE), rows_of(0, pads=False)
    expected = GpuSteps(model).hidden(ids, row)
    assert model.segments is not None
    model.segments.current = (AdapterSegment(7, 0, 1), AdapterSegment(LIVE, 1, NUM_SEQUENCES))
    torch.testing.assert_close(GpuSteps(model).hidden(ids, row), expected, rtol=0, atol=0)
    assert model.segments.current == ()


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
