"""The parts of the model that are ours: rows and their documents, attention, rotary embeddings, experts, the head."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forge.config import ModelConfig
from forge.models.attention import DocumentAttention
from forge.models.language_model import titan_config
from forge.models.layers import Experts, Rotary
from forge.models.rows import Documents, RowRegistry, RowTask
from forge.models.weights import draw_weights

FACTS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "vocab_size": 32,
    "max_seq_len": 64,
    "rope_theta": 100.0,
    "norm_eps": 1e-6,
}
MODELS = {
    "qwen3": ModelConfig(family="qwen3", tie_embeddings=False, **FACTS),
    "llama": ModelConfig(family="llama", tie_embeddings=True, **FACTS),
    "qwen2": ModelConfig(family="qwen2", tie_embeddings=True, **FACTS),
    "mixture": ModelConfig(
        family="qwen3_moe",
        tie_embeddings=False,
        num_experts=4,
        num_experts_per_token=2,
        expert_intermediate_size=12,
        **FACTS,
    ),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def task(lengths: tuple[int, ...], *, num_padding: int = 0) -> RowTask:
    positions = torch.cat([torch.arange(length) for length in lengths] + [torch.zeros(num_padding, dtype=torch.int64)])
    nothing = torch.zeros(0, dtype=torch.int64)
    return RowTask(Documents.of(lengths, num_padding=num_padding), positions[None], nothing, nothing)


class TestRows:
    def test_offsets_count_padding_as_documents_of_one_token(self) -> None:
        documents = Documents.of((3, 1, 5), num_padding=2)
        assert documents.offsets.tolist() == [0, 3, 4, 9, 10, 11]
        assert documents.offsets.dtype == torch.int32
        assert documents.longest == 5

    def test_a_row_of_padding_alone(self) -> None:
        documents = Documents.of((), num_padding=2)
        assert documents.offsets.tolist() == [0, 1, 2]
        assert documents.longest == 1

    def test_keys_find_their_rows_until_they_are_forgotten(self) -> None:
        book, rows = RowRegistry(), [task((2,)), task((3,))]
        keys = [book.enter(row) for row in rows]
        assert [book.find(key) for key in keys] == rows
        assert keys[0].shape == (1, 1)
        book.clear()
        with pytest.raises(KeyError):
            book.find(keys[0])
        assert int(book.enter(rows[0])) not in [int(key) for key in keys]


class TestAttention:
    LENGTHS = (5, 1, 7)

    def heads(self, num_tokens: int, *, seed: int = 0) -> list[Tensor]:
        maker = torch.Generator().manual_seed(seed)
        return [torch.randn(1, num_tokens, n, 8, generator=maker, dtype=torch.float64) for n in (4, 2, 2)]

    def attend(self, row: RowTask, qkv: list[Tensor]) -> Tensor:
        attention = DocumentAttention(DocumentAttention.Config())
        return attention(*qkv, attention_masks=attention.row_registry.enter(row))

    def test_a_token_sees_its_document_up_to_itself(self) -> None:
        query, key, value = qkv = self.heads(15)
        found = self.attend(task(self.LENGTHS, num_padding=2), qkv)
        names = torch.tensor([0] * 5 + [1] + [2] * 7 + [3, 4])
        visible = (names[:, None] == names[None]) & torch.ones(15, 15).tril().bool()
        wide_key, wide_value = key.repeat_interleave(2, dim=2), value.repeat_interleave(2, dim=2)
        scores = torch.einsum("bqnh,bknh->bnqk", query, wide_key) / math.sqrt(8)
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        expected = torch.einsum("bnqk,bknh->bqnh", weights, wide_value)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

    def test_other_documents_and_later_tokens_change_nothing(self) -> None:
        row, qkv = task(self.LENGTHS), self.heads(13)
        other = self.heads(13, seed=1)
        mixed = [torch.cat([new[:, :6], old[:, 6:]], dim=1) for old, new in zip(qkv, other, strict=True)]
        found = self.attend(row, qkv)
        assert torch.equal(self.attend(row, mixed)[:, 6:], found[:, 6:])
        later = [torch.cat([old[:, :11], new[:, 11:]], dim=1) for old, new in zip(qkv, other, strict=True)]
        assert torch.equal(self.attend(row, later)[:, :11], found[:, :11])

    def test_every_input_of_a_row_without_samples_has_a_gradient(self) -> None:
        """FSDP sums only what has one: ranks must agree, even where one has no sample."""
        qkv = [tensor.requires_grad_() for tensor in self.heads(2)]
        found = self.attend(task((), num_padding=2), qkv)
        assert torch.equal(found, qkv[2].repeat_interleave(2, dim=2))
        gradients = torch.autograd.grad(found.sum(), qkv, allow_unused=True)
        assert [gradient is not None for gradient in gradients] == [True] * 3


class TestRotary:
    @pytest.mark.parametrize("scaled", [False, True])
    def test_angles_are_those_of_transformers(self, scaled: bool) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
        stretch: dict[str, Any] = {}
        if scaled:
            rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            rope["original_max_position_embeddings"] = 64
            stretch = {"scaling": "llama", "scaling_factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            stretch["original_max_position_embeddings"] = 64
        config = LlamaConfig(
            hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=512, rope_parameters=rope
        )
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(512)[None])
        ours = Rotary(Rotary.Config(dim=32, max_seq_len=512, theta=10_000.0, **stretch))._precompute_cache()
        torch.testing.assert_close(ours, torch.cat([cos, sin], dim=-1)[0], rtol=0, atol=1e-6)

    def test_turning_keeps_float64(self) -> None:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        maker = torch.Generator().manual_seed(0)
        cache = Rotary(Rotary.Config(dim=8, max_seq_len=16, theta=100.0))._precompute_cache()
        query, key = (torch.randn(1, 16, 2, 8, generator=maker, dtype=torch.float64) for _ in range(2))
        turned = Rotary.apply_rotary_emb(query, key, cache[None, :, None])
        cos, sin = (half[None].double() for half in cache.chunk(2, dim=-1))
        expected = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
        for mine, theirs in zip(turned, expected, strict=True):
            assert mine.dtype == torch.float64
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_experts_compute_in_the_precision_of_their_input(dtype: torch.dtype, tolerance: float) -> None:
    experts = Experts(Experts.Config(dim=6, hidden_dim=10, num_experts=4)).to(dtype)
    maker = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=maker, dtype=torch.float64))
    counts = torch.tensor([3, 0, 4, 1])
    tokens = torch.randn(10, 6, generator=maker, dtype=torch.float64).to(dtype)
    found = experts(tokens, counts)
    assert found.dtype == dtype
    assert torch.equal(found[8:], torch.zeros(2, 6, dtype=dtype)), "rows of no expert"
    owners = torch.repeat_interleave(torch.arange(4), counts)
    gate, down, up = (weight.double() for weight in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD))
    for token, result, owner in zip(tokens.double(), found, owners, strict=False):
        expected = down[owner] @ (F.silu(gate[owner] @ token) * (up[owner] @ token))
        assert (result.double() - expected).abs().max() <= tolerance * expected.abs().max()
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in experts.parameters())
    assert not experts.w1_EFD.grad[1].any(), "an expert without tokens learns nothing"


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_row_has_the_logits_of_its_documents(name: str) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = titan_config(MODELS[name], max_seq_len=32).build()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    draw_weights([model], num_layers=1, seed=2)
    book = RowRegistry()
    model.use(book, None)
    lengths = (6, 1, 9)
    tokens = torch.randint(32, (1, 18), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        packed = model(tokens, book.enter(task(lengths, num_padding=2)))
        assert packed.shape == (1, 18, 32)
        documents = zip(tokens[:, :16].split(lengths, 1), packed[:, :16].split(lengths, 1), strict=True)
        for document, logits in documents:
            alone = model(document, book.enter(task((document.shape[1],))))
            torch.testing.assert_close(logits, alone, rtol=0, atol=1e-12)
