"""A step as one call gives the bits of the model called layer by layer, and leaves to the model what it cannot do."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from forge.config import AdapterConfig, ModelConfig
from forge.kernels import cpu_attention, cpu_step
from forge.kernels.cpu_step import normed
from forge.kernels.paged import PAGE_TOKENS, PagedLayout
from forge.models.adapter_names import AdapterSpec
from forge.models.cpu_step import CpuSteps, cut
from forge.models.inference import PagedRow, build_for_inference, paged_layers
from forge.models.language_model import LanguageModel
from forge.models.layers import rows_linear
from forge.models.weights import draw_weights

pytestmark = pytest.mark.skipif(cpu_step.library() is None, reason="no compiler for the CPU kernels")
FACTS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 80,
    "max_seq_len": 64,
    "rope_theta": 100.0,
    "norm_eps": 1e-6,
}
EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "expert_intermediate_size": 32}
QWEN3 = ModelConfig(family="qwen3", tie_embeddings=True, **FACTS)
LLAMA = ModelConfig(family="llama", tie_embeddings=False, **FACTS)
QWEN2 = ModelConfig(family="qwen2", tie_embeddings=True, **FACTS)
MIXTURE = ModelConfig(family="qwen3_moe", tie_embeddings=False, **EXPERTS, **FACTS)
PAGES = 4  # of each sequence


@pytest.fixture(autouse=True, params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def built(
    facts: ModelConfig = QWEN3,
    *,
    dtype: torch.dtype = torch.float32,
    num_sequences: int = 24,
    adapter: AdapterConfig | None = None,
) -> LanguageModel:
    spec = None if adapter is None else AdapterSpec.of(adapter, facts)
    model = build_for_inference(facts, max_seq_len=64, dtype=dtype, device=torch.device("cpu"), adapter=spec)
    draw_weights([model], num_layers=2, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", ".lora_a", ".lora_b")):  # zero in a new model
            parameter.normal_(generator=torch.Generator().manual_seed(len(parameter)))
    for layer in paged_layers(model):
        layer.k_cache, layer.v_cache = cpu_attention.new_cache(num_sequences * PAGES, num_kv_heads=2, width=16)
        layer.k_cache.zero_()
        layer.v_cache.zero_()
    return model


def row_of(pieces: Sequence[tuple[int, int]], index: Sequence[int] | None = None) -> tuple[Tensor, PagedRow]:
    """Tokens and row of a step that computes [start, end) of each sequence; by default all tokens are asked for."""
    starts, contexts, table, slots, positions = [0], [], [], [], []
    for sequence, (start, end) in enumerate(pieces):
        starts.append(starts[-1] + end - start)
        contexts.append(end)
        pages = [sequence * PAGES + page for page in range(PAGES)]
        table.append(pages)
        positions += range(start, end)
        slots += [
            pages[place // PAGE_TOKENS % PAGES] * PAGE_TOKENS + place % PAGE_TOKENS for place in range(start, end)
        ]
    small = (torch.tensor(values, dtype=torch.int32) for values in (starts, contexts, table))
    wanted = torch.arange(len(positions)) if index is None else torch.tensor(index)
    row = PagedRow(torch.tensor([positions]), wanted, PagedLayout(*small, torch.tensor(slots)))
    draw = torch.Generator().manual_seed(len(positions))
    return torch.randint(0, 80, (len(positions),), generator=draw), row


@torch.inference_mode()
def called(model: LanguageModel, tokens: Tensor, row: PagedRow) -> Tensor:
    hidden: Tensor = model(tokens[None], model.row_registry.enter(row))
    return hidden


@torch.inference_mode()
def found_by(steps: CpuSteps, tokens: Tensor, row: PagedRow) -> Tensor:
    found = steps.hidden(tokens, row)
    if found is None:
        pytest.skip("how this machine's library adds is not known; the model is called")
    return found


def caches(model: LanguageModel) -> list[Tensor]:
    return [cache.clone() for layer in paged_layers(model) for cache in (layer.k_cache, layer.v_cache)]  # type: ignore[union-attr]


PREFILL = [(0, 5), (0, 1), (0, 33), (0, 17), (0, 30), (0, 2)]
MIXED = [(5, 6), (1, 20), (33, 34), (17, 18), (30, 50), (2, 3)]


ADAPTERS = {"none": None, "all": AdapterConfig(rank=3, alpha=5), "some": AdapterConfig(targets=("k_proj", "down_proj"))}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("facts", [QWEN3, LLAMA, QWEN2], ids=["qwen3", "llama", "qwen2"])
def test_a_step_has_the_bits_of_the_model(facts: ModelConfig, adapter: str) -> None:
    model, own = (built(facts, adapter=ADAPTERS[adapter]) for _ in range(2))
    steps = CpuSteps(own)
    for pieces, index in ((PREFILL, [4, 5, 38, 87]), (MIXED, None), ([(end, end + 1) for _, end in MIXED], None)):
        tokens, row = row_of(pieces, index)
        found = found_by(steps, tokens, row)
        assert torch.equal(found, called(model, tokens, row))
        assert all(map(torch.equal, caches(own), caches(model)))


@pytest.mark.parametrize("num_sequences", [1, 7, 8, 16, 23])
def test_any_number_of_sequences(num_sequences: int) -> None:
    model, own = built(), built()
    steps = CpuSteps(own)
    for place in (0, 1):
        tokens, row = row_of([(place, place + 1)] * num_sequences)
        assert torch.equal(found_by(steps, tokens, row), called(model, tokens, row))


@pytest.mark.parametrize("facts", [QWEN3, LLAMA], ids=["tied", "untied"])
@torch.inference_mode()
def test_logits_are_the_heads_of_the_hidden_states(facts: ModelConfig) -> None:
    model = built(facts)
    steps = CpuSteps(model)
    tokens, row = row_of([(0, 1)] * 20)
    hidden = found_by(steps, tokens, row)
    logits = steps.logits(tokens, row)
    assert logits is not None
    assert torch.equal(logits, rows_linear(hidden, model.lm_head.weight))
    fewer = row_of([(1, 2)] * 3)
    again = steps.logits(*fewer)
    assert again is not None
    assert torch.equal(again, rows_linear(found_by(steps, *fewer), model.lm_head.weight))


@torch.inference_mode()
def test_weights_may_change_in_place_and_move() -> None:
    model = built()
    steps = CpuSteps(model)
    tokens, row = row_of(PREFILL)
    before = found_by(steps, tokens, row)
    for parameter in model.parameters():
        parameter.mul_(1.25)
    changed = found_by(steps, tokens, row)
    assert not torch.equal(changed, before)
    assert torch.equal(changed, called(model, tokens, row))
    old = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    moved = found_by(steps, tokens, row)
    assert not torch.equal(moved, changed)
    assert torch.equal(moved, called(model, tokens, row))
    assert len(old) == len(list(model.parameters()))  # kept until here, so that none of the new ones lies where it did


def test_the_cache_may_move_and_is_let_go_of() -> None:
    model = built()
    steps = CpuSteps(model)
    tokens, row = row_of(PREFILL)
    before = found_by(steps, tokens, row)
    gone = [weakref.ref(layer.k_cache) for layer in paged_layers(model)]
    steps.forget()
    for layer in paged_layers(model):
        layer.k_cache = layer.v_cache = None
    assert [each() for each in gone] == [None, None]
    assert steps.hidden(tokens, row) is None
    for layer in paged_layers(model):
        layer.k_cache, layer.v_cache = cpu_attention.new_cache(24 * PAGES, num_kv_heads=2, width=16)
    assert torch.equal(found_by(steps, tokens, row), before)


@pytest.mark.parametrize("kind", ["experts", "bfloat16", "bias", "other norm", "other layer"])
def test_other_models_are_called(kind: str) -> None:
    model = built(
        MIXTURE if kind == "experts" else QWEN3, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32
    )
    first = model.layers["0"]
    if kind == "bias":
        first.attention.wo.bias = nn.Parameter(torch.zeros(64), requires_grad=False)
    elif kind == "other norm":
        first.ffn_norm = nn.RMSNorm(64)
    elif kind == "other layer":
        first.feed_forward = nn.Identity()
    steps = CpuSteps(model)
    tokens, row = row_of(PREFILL)
    assert steps.hidden(tokens, row) is None
    assert steps.logits(tokens, row) is None


@pytest.mark.parametrize("wrong", ["token", "position", "slot", "page"])
def test_what_does_not_exist_is_left_to_the_model_to_name(wrong: str) -> None:
    steps = CpuSteps(built())
    tokens, row = row_of([(0, 4)] * 5)
    found_by(steps, tokens, row)
    if wrong == "token":
        tokens[7] = 80
    elif wrong == "position":
        row.positions[0, 3] = 64
    elif wrong == "slot":
        row.layout.slots[19] = 24 * PAGES * PAGE_TOKENS
    else:
        row.layout.table[2, 0] = -1
    assert steps.hidden(tokens, row) is None


def test_one_long_text_is_not_left_to_one_of_several_threads(num_threads: int) -> None:
    steps = CpuSteps(built())
    short = row_of([(0, 4)] * 5)
    found_by(steps, *short)
    tokens, row = row_of([(0, 1), (0, 6000)])
    if num_threads == 1:
        assert steps._cuts(row) is not None
    else:
        assert steps.hidden(tokens, row) is None


def test_parts_have_about_the_same_cost_and_none_is_empty() -> None:
    starts = np.array([0, 1, 2, 3, 13, 14], dtype=np.int32)
    parts, dearest = cut(starts, np.array([1, 1, 1, 10, 1]), 2)
    assert [(part.first, part.last, part.start, part.end) for part in parts] == [(0, 4, 0, 13), (4, 5, 13, 14)]
    assert dearest == 13
    alone, dearest = cut(np.array([0, 9], dtype=np.int32), np.array([9]), 4)
    assert [(part.first, part.last, part.start, part.end) for part in alone] == [(0, 1, 0, 9)]
    assert dearest == 9
    equal, dearest = cut(np.arange(65, dtype=np.int32), np.full(64, 7), 4)
    assert [part.last - part.first for part in equal] == [16] * 4
    assert dearest == 7 * 16


@pytest.mark.parametrize("width", [8, 16, 40, 64, 100, 256, 511, 512, 576, 4096, 8448, 16400])
def test_norms_have_the_bits_of_torchs(width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    for rows in (1, 3, 24, 300):
        x, weight = 5 * torch.randn(rows, width, generator=draw), torch.randn(width, generator=draw)
        assert torch.equal(normed(x, weight, 1e-5), torch.rms_norm(x, (width,), weight, 1e-5))
