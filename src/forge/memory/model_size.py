"""How many of a model's parameters one rank of a trainer holds."""

from __future__ import annotations

from dataclasses import dataclass

from forge.models.sizes import Sizes
from forge.trainer.layout import Layout

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
MASTER_BYTES = {"float32": 4, "bfloat16": 4, "bfloat16_pure": 2, "float64": 8}
"""Of a weight as the trainer keeps it, by `distributed.precision`."""


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
