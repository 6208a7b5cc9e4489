"""What layers keep for the backward pass: the formulas against the tensors that autograd saves, to the byte."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.config import ModelConfig, TrainingConfig
from forge.memory.activations import Row, Setting, kept_bytes, recomputed_bytes
from forge.models.language_model import titan_config
from forge.models.rows import Documents, RowRegistry, RowTask, Sharing
from forge.models.sizes import Sizes
from forge.trainer.assembly import head_function
from forge.trainer.microbatches import plan_batch
from forge.trainer.row_building import build_rows
from forge.types import Batch, Sample

TOKENS = 192
DENSE: dict[str, Any] = {
    "family": "qwen3",
    "num_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "tie_embeddings": True,
    "max_seq_len": 512,
    "rope_theta": 1e4,
    "norm_eps": 1e-6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2"},
    "qwen3_moe": {
        "family": "qwen3_moe",
        "intermediate_size": None,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "expert_intermediate_size": 96,
    },
}


def saved_bytes(model: ModelConfig, dtype: torch.dtype, lengths: tuple[int, ...], sharing: Sharing | None) -> int:
    """The bytes of all tensors that the forward pass of the real model saves, weights and tables left out."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        built = titan_config(model, max_seq_len=TOKENS).build()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        built.init_states(buffer_device="cpu")
        for parameter in built.parameters():
            parameter.normal_(std=0.02)
    book = RowRegistry()
    built.use(book, head_function(TrainingConfig(head_chunk_tokens=8)))
    places = torch.arange(8)
    task = RowTask(
        Documents.of(lengths), positions=torch.arange(TOKENS)[None], index=places, targets=places, sharing=sharing
    )
    own = {each.untyped_storage().data_ptr() for each in (*built.parameters(), *built.buffers())}
    own |= {task.positions.untyped_storage().data_ptr(), places.untyped_storage().data_ptr()}
    if sharing is not None:
        tensors = (getattr(sharing, each.name) for each in fields(sharing))
        own |= {each.untyped_storage().data_ptr() for each in tensors if isinstance(each, Tensor)}
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        built(torch.zeros(1, TOKENS, dtype=torch.int64), book.enter(task))
    return sum(storage.nbytes() for storage in kept.values())


def bytes_per_layer(
    facts: dict[str, Any], dtype: torch.dtype, lengths: tuple[int, ...], sharing: Sharing | None = None
) -> int:
    """By the difference of three layers and one, so that embedding and output layer do not count."""
    one, three = (
        saved_bytes(ModelConfig(**{**DENSE, **facts, "num_layers": num}), dtype, lengths, sharing) for num in (1, 3)
    )
    assert (three - one) % 2 == 0
    return (three - one) // 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [(192,), (80, 112)])
def test_a_layer_keeps_what_the_formula_says(family: str, compute: str, lengths: tuple[int, ...]) -> None:
    setting = Setting.of(compute, on_gpu=False)
    if len(lengths) == 1:
        setting = Setting(setting.item, setting.attention, on_gpu=False, several_documents=False)
    sizes = Sizes.of(ModelConfig(**{**DENSE, **FAMILIES[family]}))
    found = bytes_per_layer(FAMILIES[family], getattr(torch, compute), lengths)
    predicted = kept_bytes(sizes, setting, Row(TOKENS, TOKENS))
    if compute == "float32":  # kernels of ours keep less than the operations that they stand for
        assert 0.7 * predicted <= found <= predicted + 256
    elif family == "qwen3_moe":  # offsets of experts: a few numbers that do not grow with the tokens
        assert 0 <= found - predicted <= 256
    else:
        assert found == predicted


def test_shared_beginnings_are_repeated_in_attention_alone() -> None:
    """A prompt of 64 with two completions of 64: 192 tokens are computed, 256 attended to."""
    prompt, first, second = torch.arange(64), torch.arange(64, 128), torch.arange(32, 96)
    weights = torch.cat([torch.zeros(64), torch.ones(64)])
    batch = Batch.of([Sample(torch.cat([prompt, each]), weights) for each in (first, second)])
    (row,) = build_rows(batch, plan_batch(batch, num_ranks=1, max_tokens=TOKENS, share_prefixes=True), 0)
    assert len(row.token_ids_L) == TOKENS
    found = bytes_per_layer({}, torch.bfloat16, row.sample_lengths, row.sharing(row.documents()))
    sizes = Sizes.of(ModelConfig(**DENSE))
    assert found == kept_bytes(sizes, Setting.of("bfloat16", on_gpu=False), Row(192, 256))
    assert found > bytes_per_layer({}, torch.bfloat16, (192,))


def test_checkpointing_keeps_less_and_computes_the_rest_again() -> None:
    sizes, setting, row = Sizes.of(ModelConfig(**DENSE)), Setting.of("bfloat16", on_gpu=True), Row(1000, 1000)
    none, selective, full = (kept_bytes(sizes, setting, row, mode) for mode in ("none", "selective", "full"))
    assert none > 2 * selective > 4 * full
    assert full == 2 * 64 * 1000
    assert recomputed_bytes(sizes, setting, row, "none") == 0
    assert recomputed_bytes(sizes, setting, row, "full") == none
    assert 0 < recomputed_bytes(sizes, setting, row, "selective") < none


def test_the_formula_of_the_guide_is_the_one_that_is_used() -> None:
    sizes, setting = Sizes.of(ModelConfig(**DENSE)), Setting.of("bfloat16", on_gpu=True)
    hidden, inner, queries, keys = 64, 160, 128, 64
    by_hand = 2 * (4 * hidden + 2 * (queries + keys) + keys + queries + 4 * inner) + 8 * 32 + 4 * (2 + 6) + 4 * 4
    assert kept_bytes(sizes, setting, Row(1, 1)) == by_hand


def test_tensor_ranks_share_what_they_split() -> None:
    sizes, row = Sizes.of(ModelConfig(**DENSE)), Row(64, 64)
    whole = kept_bytes(sizes, Setting.of("bfloat16", on_gpu=True), row)
    split = kept_bytes(sizes, Setting.of("bfloat16", on_gpu=True, tensor=2), row)
    with_rows = kept_bytes(sizes, Setting.of("bfloat16", on_gpu=True, tensor=2, splits_rows=True), row)
    assert whole // 2 < with_rows < split < whole
