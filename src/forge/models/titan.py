"""From the facts of an architecture to TorchTitan's definition of it."""

from __future__ import annotations

from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.moe import MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.qwen3.model import Qwen3TransformerBlock

from forge.config import ModelConfig
from forge.models.attention import DocumentAttention
from forge.models.experts import Experts
from forge.models.families import family_of
from forge.models.gate import RowFeedForward
from forge.models.language_model import Head, LanguageModel
from forge.models.linear import RowLinear
from forge.models.rotary import Rotary
from forge.models.row_norm import RowNorm

_LATER = dict.fromkeys(("weight", "bias", "w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init)
"""Weights are loaded or drawn by us, in a way that does not depend on the layout; TorchTitan is to leave them alone."""


def titan_config(model: ModelConfig, *, max_seq_len: int) -> LanguageModel.Config:
    """TorchTitan's configuration of a model whose facts are complete. Positions go up to `max_seq_len`."""
    dim, vocab = _given(model.hidden_size), _given(model.vocab_size)
    return LanguageModel.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=bool(model.tie_embeddings),
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=_LATER),
        norm=_norm(model, dim),
        lm_head=Head.Config(in_features=dim, out_features=vocab, param_init=_LATER),
        layers=[_layer(model, max_seq_len) for _ in range(_given(model.num_layers))],
    )


def _given(fact: int | None) -> int:
    assert fact is not None, "the facts of the model are checked for completeness before"
    return fact


def _norm(model: ModelConfig, size: int) -> RowNorm.Config:
    return RowNorm.Config(normalized_shape=size, eps=model.norm_eps or 1e-6, param_init=_LATER)


def _linear(num_in: int, num_out: int, *, bias: bool = False) -> RowLinear.Config:
    return RowLinear.Config(in_features=num_in, out_features=num_out, bias=bias, param_init=_LATER)


def _layer(model: ModelConfig, max_seq_len: int) -> Qwen3TransformerBlock.Config:
    dim = _given(model.hidden_size)
    mixture = family_of(model).has_experts
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(model, dim),
        ffn_norm=_norm(model, dim),
        attention=_attention(model, max_seq_len),
        moe=_mixture(model) if mixture else None,
        feed_forward=None if mixture else _feed_forward(model),
    )


def _attention(model: ModelConfig, max_seq_len: int) -> GQAttention.Config:
    dim, heads, kv_heads = _given(model.hidden_size), _given(model.num_heads), _given(model.num_kv_heads)
    width, family = model.head_dim or dim // heads, family_of(model)
    return GQAttention.Config(
        dim=dim,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=width,
        qkv_linear=QKVLinear.Config(
            head_dim=width,
            wq=_linear(dim, heads * width, bias=family.qkv_bias),
            wkv=_linear(dim, kv_heads * width, bias=family.qkv_bias),
        ),
        wo=_linear(heads * width, dim),
        qk_norm=_norm(model, width) if family.qk_norm else None,
        inner_attention=DocumentAttention.Config(),
        rope=_rotary(model, width, max_seq_len),
    )


def _rotary(model: ModelConfig, width: int, max_seq_len: int) -> Rotary.Config:
    stretch: dict[str, Any] = {}
    if model.rope_scaling is not None:
        stretch = {
            "scaling": "llama",
            "scaling_factor": model.rope_scaling.factor,
            "low_freq_factor": model.rope_scaling.low_freq_factor,
            "high_freq_factor": model.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling.original_max_seq_len,
        }
    return Rotary.Config(dim=width, max_seq_len=max_seq_len, theta=model.rope_theta or 10_000.0, **stretch)


def _feed_forward(model: ModelConfig) -> RowFeedForward.Config:
    dim, inner = _given(model.hidden_size), _given(model.intermediate_size)
    return RowFeedForward.Config(w1=_linear(dim, inner), w2=_linear(inner, dim), w3=_linear(dim, inner))


def _mixture(model: ModelConfig) -> MoE.Config:
    dim, num_experts, top_k = _given(model.hidden_size), _given(model.num_experts), _given(model.num_experts_per_token)
    experts = Experts.Config(
        dim=dim,
        hidden_dim=_given(model.expert_intermediate_size),
        num_experts=num_experts,
        param_init=_LATER,
    )
    return MoE.Config(
        num_experts=num_experts,
        load_balance_coeff=None,  # it would add a bias that Hugging Face's model does not have
        router=TokenChoiceTopKRouter.Config(
            num_experts=num_experts,
            gate=_linear(dim, num_experts),
            top_k=top_k,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=experts,
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=num_experts, top_k=top_k),
        ),
    )
