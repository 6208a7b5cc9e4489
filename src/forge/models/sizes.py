"""How many parameters a model has, and how much arithmetic a token of training takes.

Counted from the configuration alone, so that nothing has to be built to know it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from forge.config import ModelConfig
from forge.errors import ConfigError
from forge.models.families import family_of

GROUP_MULTIPLE: Final = 8
"""Of the widths of experts in bfloat16, where one kernel computes all of them: it wants rows of whole 16 bytes."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The widths of an architecture.

    Attributes:
        hidden, vocab, num_layers: of the whole model.
        inner: the width inside a dense feed-forward layer, or inside one expert.
        queries, keys: the width of all query heads and of all key heads.
        head_dim: of one head; `num_heads` and `num_kv_heads` how many there are.
        has_head_norms: whether queries and keys are normalized.
        has_qkv_bias: whether the projections to queries, keys and values have biases.
        is_tied: whether embedding and output layer are one matrix; a scalar head never is.
        num_outputs: of the output layer: the vocabulary, or 1 for a scalar head.
        num_experts, num_chosen: of a mixture, in all and for one token; 0 and 1 for a dense model.
    """

    hidden: int
    vocab: int
    num_layers: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_head_norms: bool
    is_tied: bool
    num_outputs: int
    has_qkv_bias: bool = False
    num_experts: int = 0
    num_chosen: int = 1

    @classmethod
    def of(cls, model: ModelConfig) -> Sizes:
        """Return the widths of a model. Raises `ConfigError` for a key that is not set."""
        _need(model, "family")
        family = family_of(model)
        return cls(
            hidden=_need(model, "hidden_size"),
            vocab=_need(model, "vocab_size"),
            num_layers=_need(model, "num_layers"),
            inner=_need(model, "expert_intermediate_size" if family.has_experts else "intermediate_size"),
            num_heads=_need(model, "num_heads"),
            num_kv_heads=_need(model, "num_kv_heads"),
            head_dim=_need(model, "head_dim"),
            has_head_norms=family.qk_norm,
            is_tied=_need(model, "tie_embeddings") and model.head == "language",
            num_outputs=_need(model, "vocab_size") if model.head == "language" else 1,
            has_qkv_bias=family.qkv_bias,
            num_experts=_need(model, "num_experts") if family.has_experts else 0,
            num_chosen=_need(model, "num_experts_per_token") if family.has_experts else 1,
        )

    @property
    def queries(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """The parameters of the embedding."""
        return self.vocab * self.hidden

    @property
    def output(self) -> int:
        """The parameters of the output layer, its own or the embedding's."""
        return self.num_outputs * self.hidden

    @property
    def layer_matrices(self) -> int:
        """The parameters of a layer that every token meets, without its norms: tensor parallel ranks split them."""
        attention = 2 * self.hidden * (self.queries + self.keys)
        biases = self.queries + 2 * self.keys if self.has_qkv_bias else 0
        router = self.hidden * self.num_experts
        return attention + biases + (router if self.num_experts else 3 * self.hidden * self.inner)

    @property
    def layer_experts(self) -> int:
        """The parameters of a layer's experts."""
        return self.num_experts * 3 * self.hidden * self.inner

    @property
    def layer_norms(self) -> int:
        """The parameters of a layer's norms, which tensor parallel ranks each hold whole."""
        return 2 * self.hidden + (2 * self.head_dim if self.has_head_norms else 0)

    @property
    def layer(self) -> int:
        return self.layer_matrices + self.layer_experts + self.layer_norms

    @property
    def total(self) -> int:
        """All parameters, exactly; tied ones once."""
        ends = self.embedding + (0 if self.is_tied else self.output)
        return ends + self.num_layers * self.layer + self.hidden

    @property
    def active(self) -> int:
        """The parameters that take part in one token: of a mixture, only the experts that the token is sent to.

        The embedding is a look-up and is left out. The head is a product and is counted, shared or not.
        """
        idle = self.layer_experts - self.num_chosen * 3 * self.hidden * self.inner if self.num_experts else 0
        return self.output + self.num_layers * (self.layer - idle) + self.hidden


def num_parameters(model: ModelConfig) -> int:
    """Count all parameters, exactly. A head that shares the embedding's weights is counted once."""
    return Sizes.of(model).total


def num_active_parameters(model: ModelConfig) -> int:
    """Count the parameters that take part in one token, the head's included and the embedding's not."""
    return Sizes.of(model).active


def flops_per_token(model: ModelConfig, context: float) -> float:
    """Return the floating point operations of one token's forward and backward pass.

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
    sizes = Sizes.of(model)
    return 6.0 * sizes.active + 12.0 * sizes.num_layers * sizes.queries * context


def mean_context(lengths: Iterable[int]) -> float:
    """Return how many tokens a token attends to on average in sequences of these lengths; 0 for none."""
    lengths = tuple(lengths)
    num_tokens = sum(lengths)
    return sum(length * (length + 1) / 2 for length in lengths) / num_tokens if num_tokens else 0.0


def model_flops_utilization(
    tokens_per_s: float | None, *, flops_per_token: float, peak_flops: float | None, num_devices: int = 1
) -> float | None:
    """Return the part of the devices' peak that goes into the model (MFU), 0 to 1; None without a speed or a peak."""
    if tokens_per_s is None or peak_flops is None:
        return None
    return tokens_per_s * flops_per_token / (peak_flops * num_devices)


def _need(model: ModelConfig, key: str) -> Any:
    value = getattr(model, key)
    if value is None:
        raise ConfigError(
            "the size of the model is not known",
            path=f"model.{key}",
            value=None,
            rule="needed to count parameters and operations",
            repair="set it, or name a preset in model.preset",
        )
    return value
