"""How many parameters a model has, and how much arithmetic a token of training takes.

Counted from the configuration alone, so that nothing has to be built to know it. The families are those of
`ModelConfig.family`; none of them has biases, and every layer of a mixture is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.errors import ConfigError

if TYPE_CHECKING:
    from forge.config import ModelConfig


def num_parameters(model: ModelConfig) -> int:
    """All parameters, exactly. A head that shares the embedding's weights is counted once."""
    sizes = _sizes(model)
    head = 0 if sizes.tied else sizes.head
    return sizes.head + sizes.layers(active_only=False) + head


def num_active_parameters(model: ModelConfig) -> int:
    """The parameters that take part in one token: of a mixture, only the experts that the token is sent to.

    The embedding is a look-up and is left out. The head is a product and is counted, shared with the embedding or not.
    """
    sizes = _sizes(model)
    return sizes.layers(active_only=True) + sizes.head


def flops_per_token(model: ModelConfig, context: float) -> float:
    """The floating point operations of one token's forward and backward pass.

    `context` is how many tokens a token attends to on average, itself included: (n + 1) / 2 for a sequence of n tokens
    with causal attention, `mean_context(lengths)` for packed ones.

        6 x num_active_parameters + 12 x layers x heads x head_dim x context

    A product of a token with a matrix of P weights is 2 P operations forward and 4 P backward (for its input and for
    its weights). Scores and weighted values are 2 x heads x head_dim x context each forward, and twice that backward.
    What is computed again for activation checkpointing is not counted: it is not work that the model needs.
    """
    if context < 0:
        raise ConfigError(
            "a context is a number of tokens",
            path="context",
            value=context,
            rule="0 or more",
            repair="pass mean_context(lengths)",
        )
    sizes = _sizes(model)
    attention = 12.0 * sizes.num_layers * sizes.attention_width * context
    return 6.0 * num_active_parameters(model) + attention


def mean_context(lengths: Iterable[int]) -> float:
    """How many tokens a token attends to on average in sequences of these lengths with causal attention; 0 for none."""
    lengths = tuple(lengths)
    num_tokens = sum(lengths)
    return sum(length * (length + 1) / 2 for length in lengths) / num_tokens if num_tokens else 0.0


def model_flops_utilization(
    tokens_per_s: float | None, *, flops_per_token: float, peak_flops: float | None, num_devices: int = 1
) -> float | None:
    """The part of the devices' peak that goes into the model (MFU), 0 to 1; None where speed or peak is unknown."""
    if tokens_per_s is None or peak_flops is None:
        return None
    return tokens_per_s * flops_per_token / (peak_flops * num_devices)


@dataclass(frozen=True, slots=True)
class _Sizes:
    num_layers: int
    attention_width: int
    layer_without_mlp: int
    mlp: int
    active_mlp: int
    final_norm: int
    head: int
    tied: bool

    def layers(self, *, active_only: bool) -> int:
        mlp = self.active_mlp if active_only else self.mlp
        return self.num_layers * (self.layer_without_mlp + mlp) + self.final_norm


def _sizes(model: ModelConfig) -> _Sizes:
    family = model.family
    if family is None:
        raise _missing("family")
    hidden, heads = _need(model, "hidden_size"), _need(model, "num_heads")
    kv_heads, head_dim = _need(model, "num_kv_heads"), _need(model, "head_dim")
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    norms = 2 * hidden + (0 if family == "llama" else 2 * head_dim)
    if family == "qwen3_moe":
        expert = 3 * hidden * _need(model, "expert_intermediate_size")
        router = hidden * _need(model, "num_experts")
        mlp = router + _need(model, "num_experts") * expert
        active_mlp = router + _need(model, "num_experts_per_token") * expert
    else:
        mlp = active_mlp = 3 * hidden * _need(model, "intermediate_size")
    if model.tie_embeddings is None:
        raise _missing("tie_embeddings")
    return _Sizes(
        num_layers=_need(model, "num_layers"),
        attention_width=heads * head_dim,
        layer_without_mlp=attention + norms,
        mlp=mlp,
        active_mlp=active_mlp,
        final_norm=hidden,
        head=_need(model, "vocab_size") * hidden,
        tied=model.tie_embeddings,
    )


def _need(model: ModelConfig, key: str) -> int:
    value = getattr(model, key)
    if value is None:
        raise _missing(key)
    return int(value)


def _missing(key: str) -> ConfigError:
    return ConfigError(
        "the size of the model is not known",
        path=f"model.{key}",
        value=None,
        rule="needed to count parameters and operations",
        repair="set it, or name a preset in model.preset",
    )
