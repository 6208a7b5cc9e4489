"""Rows of several adapters in one step of a model with experts: each has the bits of a step of its adapter alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapter_folders import make_adapter
from forge.config import ModelConfig
from forge.kernels import cpu_attention
from forge.kernels.paged import PAGE_TOKENS, PagedLayout
from forge.models.adapter_segments import BASE, LIVE, AdapterSegment
from forge.models.adapters import attach_numbered, detach_numbered
from forge.models.inference import PagedRow, build_for_inference, paged_layers
from forge.models.language_model import LanguageModel
from forge.models.peft_files import load_adapter, read_adapter_folder
from forge.models.weights import draw_weights

MIXTURE = ModelConfig(
    family="qwen3_moe",
    tie_embeddings=False,
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=80,
    max_seq_len=64,
    rope_theta=100.0,
    norm_eps=1e-6,
    num_experts=4,
    num_experts_per_token=2,
    expert_intermediate_size=32,
)
LENGTHS, ADAPTERS = (5, 9, 1, 16), (BASE, LIVE, 1, 2)
SHAPES = {LIVE: (4, ("gate_proj", "q_proj")), 1: (2, ("up_proj", "down_proj")), 2: (3, ("q_proj", "v_proj"))}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    place = tmp_path_factory.mktemp("adapters")
    return {
        number: make_adapter(place / str(number), MIXTURE, seed=number, rank=rank, targets=targets)
        for number, (rank, targets) in SHAPES.items()
    }


def built(own: Path | None) -> LanguageModel:
    spec = None if own is None else read_adapter_folder(own, MIXTURE).spec
    cpu = torch.device("cpu")
    model = build_for_inference(MIXTURE, max_seq_len=64, dtype=torch.float32, device=cpu, adapter=spec)
    draw_weights([model], num_layers=2, seed=0)
    if own is not None and spec is not None:
        load_adapter([model], own, MIXTURE, spec)
    for layer in paged_layers(model):
        layer.k_cache, layer.v_cache = cpu_attention.new_cache(len(LENGTHS), num_kv_heads=2, width=16)
    return model


@torch.inference_mode()
def hidden(model: LanguageModel, sequences: Sequence[int], segments: tuple[AdapterSegment, ...] = ()) -> Tensor:
    """The hidden states of some of the sequences, each of which has a page."""
    lengths = [LENGTHS[each] for each in sequences]
    starts = torch.tensor([sum(lengths[:place]) for place in range(len(lengths) + 1)], dtype=torch.int32)
    small = (starts, torch.tensor(lengths, dtype=torch.int32), torch.tensor([[each] for each in sequences]).int())
    slots = torch.cat([torch.arange(LENGTHS[each]) + each * PAGE_TOKENS for each in sequences])
    positions = torch.cat([torch.arange(length) for length in lengths])
    row = PagedRow(positions[None], torch.arange(len(slots)), PagedLayout(*small, slots), segments=segments)
    tokens = torch.cat([(torch.arange(LENGTHS[each]) * 7 + each) % 80 for each in sequences])
    found: Tensor = model(tokens[None], model.row_registry.enter(row))
    return found


def test_experts_compute_each_segment_with_its_adapter(folders: dict[int, Path]) -> None:
    model = built(folders[LIVE])
    for number in (1, 2):
        folder = read_adapter_folder(folders[number], MIXTURE)
        attach_numbered(model, number, folder.tensors, config=MIXTURE, spec=folder.spec)
    ends = [sum(LENGTHS[: place + 1]) for place in range(4)]
    segments = [AdapterSegment(*each) for each in zip(ADAPTERS, [0, *ends], ends, strict=False)]
    mixed = hidden(model, range(4), tuple(segments))
    for place, segment in enumerate(segments):
        alone = built(folders.get(segment.adapter))
        assert torch.equal(mixed[segment.start : segment.end], hidden(alone, [place]))
    assert torch.equal(hidden(model, [1]), mixed[5:14]), "without segments a step is of the live adapter"
    with_live = hidden(model, [3], (AdapterSegment(LIVE, 0, 16),))
    assert not torch.equal(with_live, mixed[-16:])
    detach_numbered(model, 2)
    assert not torch.equal(hidden(model, [3], (AdapterSegment(2, 0, 16),)), mixed[-16:])
