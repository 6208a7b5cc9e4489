"""The model that trainer and generator share: TorchTitan's decoder, taking packed rows and returning logprobs.

With a scalar head it returns values instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
import spmd_types as spmd
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.token_dispatcher import update_ep_token_dispatcher_config
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.protocols.sharding import ShardingConfig

from forge.config import ModelConfig
from forge.models.adapter_segments import StepSegments
from forge.models.attention import DocumentAttention
from forge.models.expert_rows import RowDispatcher
from forge.models.layers import Experts, Rotary, RowFeedForward, RowLinear, RowNorm, SegmentedMoE, rows_linear
from forge.models.rows import RowRegistry, RowTask
from forge.models.sizes import Sizes

HeadFunction = Callable[[Tensor, Tensor, RowTask, Any], Any]
"""(hidden [N, D], weight [V, D], row, tensor parallel group or None) -> what the model returns for a row.

With a group, `weight` is this rank's part of the vocabulary, and the gradient of `hidden` is to be this rank's part of
the sum."""


class Head(Linear):  # type: ignore[misc]
    """The output layer. It never makes logits for a whole row: a `HeadFunction` turns hidden states into logprobs.

    Without a function it returns the logits [1, L, V], which only tests and small models can afford.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        pass

    function: HeadFunction | None = None

    def forward(self, input: Tensor, row: RowTask) -> Any:
        weight, group = self.weight, None
        if isinstance(weight, DTensor):
            group = weight.device_mesh.get_group("tp")
            weight = weight.to_local()
        if isinstance(input, DTensor):
            everywhere = input.redistribute(placements=[Replicate()])
            input = everywhere.to_local(grad_placements=[Partial()])
        if self.function is None:
            return rows_linear(input, weight)
        return self.function(input.squeeze(0).index_select(0, row.index), weight, row, group)


class ScalarHead(Linear):  # type: ignore[misc]
    """An output layer with one output: the value of what has been read, for reward models and critics.

    It returns a tuple of one tensor, float32 or wider: the values [N] of the places that the row asks about. Tensor
    parallel ranks each hold it whole and compute the same.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        pass

    def forward(self, input: Tensor, row: RowTask) -> Tensor | tuple[Tensor]:
        weight = self.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local(grad_placements=[Replicate()])
        if isinstance(input, DTensor):
            input = input.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
        wide = torch.promote_types(torch.float32, input.dtype)
        hidden = input.squeeze(0).index_select(0, row.index)
        values = rows_linear(hidden.to(wide), weight.to(wide))
        if row.as_row:
            return values.new_zeros(row.positions.shape[1], 1).index_copy(0, row.index, values).unsqueeze(0)
        return (values.squeeze(-1),)


class LanguageModel(Qwen3Model):  # type: ignore[misc]
    """A decoder for every family: they differ in what their layers' configurations hold.

    `forward` takes tokens [1, L] (in a later stage of a pipeline, hidden states) and the key of a row in its registry.
    The key may be a plain number: FSDP moves tensors to the device, and every layer would wait for it to read the key.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):  # type: ignore[misc]
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Say how the model is split over ranks, as TorchTitan's method of this name does for a Qwen3 model.

            That method also imports TorchTitan's trainer, and with it `datasets` and pandas, to check a configuration
            that ours is not. What it checks of the layout, `forge.trainer.layout` has checked.
            """
            update_ep_token_dispatcher_config(self, config)
            set_qwen3_sharding_config(
                self,
                enable_sp=config.parallelism.enable_sequence_parallel,
                enable_ep=config.parallelism.expert_parallel_degree > 1,
            )
            # The head takes what the norm gives and keeps its part of the vocabulary to itself.
            shardings = self.lm_head.sharding_config.state_shardings
            if isinstance(self.lm_head, ScalarHead.Config):
                shardings = {"weight": dense_param_placement(tp=spmd.R)}
            self.lm_head.sharding_config = ShardingConfig(state_shardings=shardings)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.row_registry = RowRegistry()
        self.segments: StepSegments | None = None

    def use(self, registry: RowRegistry, function: HeadFunction | None) -> None:
        """Share one registry of rows with the attention of every layer, and say what the head computes."""
        for module in self.modules():
            if hasattr(module, "row_registry"):
                module.row_registry = registry
        if isinstance(self.lm_head, Head):
            self.lm_head.function = function

    def forward(self, tokens: Tensor, key: Tensor | int) -> Any:
        key = torch.tensor([[key]]) if isinstance(key, int) else key
        row = self.row_registry.find(key)
        if self.segments is not None:
            self.segments.current = row.segments
        hidden = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            hidden = layer(hidden, key, row.positions)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.lm_head(hidden, row) if self.lm_head is not None else hidden


_STACKS = ("w1_EFD", "w2_EDF", "w3_EFD")
_ADAPTERS = ("lora_a", "lora_b", *(f"{stack}_{end}" for stack in _STACKS for end in ("lora_a", "lora_b")))
_LATER = dict.fromkeys(("weight", "bias", *_STACKS, *_ADAPTERS), skip_param_init)
"""Skips TorchTitan's initialization: we load or initialize weights in a way that does not depend on the layout."""


def titan_config(model: ModelConfig, *, max_seq_len: int) -> LanguageModel.Config:
    """Return TorchTitan's configuration of a model. Positions go up to `max_seq_len`."""
    sizes = Sizes.of(model)
    dim, vocab = sizes.hidden, sizes.vocab
    return LanguageModel.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=sizes.is_tied,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=_LATER),
        norm=_norm(model, dim),
        lm_head=_head(model, sizes),
        layers=[_layer(model, sizes, max_seq_len) for _ in range(sizes.num_layers)],
    )


def _head(model: ModelConfig, sizes: Sizes) -> Linear.Config:
    kind = ScalarHead if model.head == "scalar" else Head
    return kind.Config(in_features=sizes.hidden, out_features=sizes.num_outputs, param_init=_LATER)


def _norm(model: ModelConfig, size: int) -> RowNorm.Config:
    return RowNorm.Config(normalized_shape=size, eps=model.norm_eps or 1e-6, param_init=_LATER)


def _linear(num_in: int, num_out: int, *, bias: bool = False) -> RowLinear.Config:
    return RowLinear.Config(in_features=num_in, out_features=num_out, bias=bias, param_init=_LATER)


def _layer(model: ModelConfig, sizes: Sizes, max_seq_len: int) -> Qwen3TransformerBlock.Config:
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(model, sizes.hidden),
        ffn_norm=_norm(model, sizes.hidden),
        attention=_attention(model, sizes, max_seq_len),
        moe=_mixture(sizes) if sizes.num_experts else None,
        feed_forward=None if sizes.num_experts else _feed_forward(sizes),
    )


def _attention(model: ModelConfig, sizes: Sizes, max_seq_len: int) -> GQAttention.Config:
    dim, width = sizes.hidden, sizes.head_dim
    return GQAttention.Config(
        dim=dim,
        n_heads=sizes.num_heads,
        n_kv_heads=sizes.num_kv_heads,
        head_dim=width,
        qkv_linear=QKVLinear.Config(
            head_dim=width,
            wq=_linear(dim, sizes.queries, bias=sizes.has_qkv_bias),
            wkv=_linear(dim, sizes.keys, bias=sizes.has_qkv_bias),
        ),
        wo=_linear(sizes.queries, dim),
        qk_norm=_norm(model, width) if sizes.has_head_norms else None,
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


def _feed_forward(sizes: Sizes) -> RowFeedForward.Config:
    dim, inner = sizes.hidden, sizes.inner
    return RowFeedForward.Config(w1=_linear(dim, inner), w2=_linear(inner, dim), w3=_linear(dim, inner))


def _mixture(sizes: Sizes) -> SegmentedMoE.Config:
    dim, num_experts, top_k = sizes.hidden, sizes.num_experts, sizes.num_chosen
    experts = Experts.Config(dim=dim, hidden_dim=sizes.inner, num_experts=num_experts, param_init=_LATER)
    return SegmentedMoE.Config(
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
            token_dispatcher=RowDispatcher.Config(num_experts=num_experts, top_k=top_k),
        ),
    )
