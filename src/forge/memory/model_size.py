"""How many numbers a model consists of, and how many of them one rank of a trainer holds."""

from __future__ import annotations

from dataclasses import dataclass

from forge.config import ModelConfig
from forge.trainer.layout import Layout

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The widths of an architecture.

    Attributes:
        hidden, vocab, num_layers: of the whole model.
        inner: the width inside a dense feed-forward layer, or inside one expert.
        queries, keys: the width of all query heads and of all key heads.
        head_dim: of one head; `num_heads` and `num_kv_heads` how many there are.
        has_head_norms: whether queries and keys are normalised.
        is_tied: whether embedding and output layer are one matrix.
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
    num_experts: int = 0
    num_chosen: int = 1

    @classmethod
    def of(cls, model: ModelConfig) -> Sizes:
        """The widths of a model whose facts are complete, which `forge.models.facts.complete` makes sure of."""
        is_mixture = model.num_experts is not None
        inner = model.expert_intermediate_size if is_mixture else model.intermediate_size
        return cls(
            hidden=model.hidden_size or 0,
            vocab=model.vocab_size or 0,
            num_layers=model.num_layers or 0,
            inner=inner or 0,
            num_heads=model.num_heads or 1,
            num_kv_heads=model.num_kv_heads or 1,
            head_dim=model.head_dim or (model.hidden_size or 0) // (model.num_heads or 1),
            has_head_norms=model.family != "llama",
            is_tied=bool(model.tie_embeddings),
            num_experts=model.num_experts or 0,
            num_chosen=model.num_experts_per_token or 1,
        )

    @property
    def queries(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """The numbers of the embedding, and as many of the output layer."""
        return self.vocab * self.hidden

    @property
    def layer_matrices(self) -> int:
        """Those of a layer that every token meets, without its norms: tensor parallel ranks split them."""
        attention = 2 * self.hidden * (self.queries + self.keys)
        router = self.hidden * self.num_experts
        return attention + (router if self.num_experts else 3 * self.hidden * self.inner)

    @property
    def layer_experts(self) -> int:
        """Those of a layer's experts."""
        return self.num_experts * 3 * self.hidden * self.inner

    @property
    def layer_norms(self) -> int:
        """Those of a layer's norms, which tensor parallel ranks each hold whole."""
        return 2 * self.hidden + (2 * self.head_dim if self.has_head_norms else 0)

    @property
    def layer(self) -> int:
        return self.layer_matrices + self.layer_experts + self.layer_norms

    @property
    def total(self) -> int:
        """All parameters, exactly; tied ones once."""
        return self.embedding * (1 if self.is_tied else 2) + self.num_layers * self.layer + self.hidden


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank has of a model, in numbers.

    Attributes:
        num_layers: of its pipeline stages.
        has_embedding, has_head: whether these are among its stages.
        held: parameters that it keeps, its shard of them.
        gathered_layer: one layer as it computes with it, when its shards are together.
        gathered_embedding: the embedding, or the output layer, likewise.
        vocab: rows of the output layer that it has.
    """

    num_layers: int
    has_embedding: bool
    has_head: bool
    held: int
    gathered_layer: int
    gathered_embedding: int
    vocab: int

    @property
    def gathered(self) -> int:
        """Everything that its stages compute with, when all of it is together, tied embeddings counted twice."""
        ends = self.has_embedding + self.has_head
        return self.num_layers * self.gathered_layer + ends * self.gathered_embedding


def holdings(sizes: Sizes, layout: Layout) -> tuple[tuple[str, Holding], ...]:
    """What ranks hold, by kind of rank: all are alike without a pipeline, and with one its ends differ."""
    per_stage = -(-sizes.num_layers // layout.num_stages)
    num_layers = min(sizes.num_layers, per_stage * (layout.num_stages // layout.pipeline))
    if layout.pipeline == 1:
        return (("", _holding(sizes, layout, num_layers, first=True, last=True)),)
    return (
        (" (first stage)", _holding(sizes, layout, num_layers, first=True, last=False)),
        (" (last stage)", _holding(sizes, layout, num_layers, first=False, last=True)),
    )


def _holding(sizes: Sizes, layout: Layout, num_layers: int, *, first: bool, last: bool) -> Holding:
    tensor = layout.tensor
    layer = sizes.layer_matrices // tensor + sizes.layer_norms
    experts = sizes.layer_experts // max(tensor, layout.expert)
    ends = sizes.embedding // tensor * (1 if sizes.is_tied and first and last else first + last)
    norm = sizes.hidden if last else 0
    dense = num_layers * layer + ends + norm
    sparse = num_layers * sizes.layer_experts // (layout.shard * tensor)
    return Holding(
        num_layers=num_layers,
        has_embedding=first,
        has_head=last,
        held=-(-dense // layout.shard) + sparse,
        gathered_layer=layer + experts,
        gathered_embedding=sizes.embedding // tensor,
        vocab=sizes.vocab // tensor,
    )
