"""Which tensor of a Hugging Face checkpoint is which parameter of ours.

The two differ in names and in one thing more: we stack the experts of a mixture, the hub stores them one by one. No
number is changed on the way, so weights that come in and go out again are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.config.schema import ModelConfig
from forge.errors import ModelError
from forge.models.sizes import Sizes

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING = "tok_embeddings.weight"
HEAD = "lm_head.weight"
"""Our name of the output layer's weight, and Hugging Face's too, of a language model."""
SCORE = "score.weight"
"""Hugging Face's name of the output layer's weight of a classifier: a model with a scalar head."""
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, slots=True)
class FusedSource:
    """Where a stack of experts lies in a checkpoint that stores all experts of a layer as one tensor [E, rows, D].

    Attributes:
        hf_name: the tensor's name.
        shape: its whole shape, which may hold more than one of our stacks side by side in dimension 1.
        first_row: the row at which ours begins.
    """

    hf_name: str
    shape: tuple[int, int, int]
    first_row: int


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One parameter of ours.

    Attributes:
        name: our name, without the parts that wrappers insert.
        shape: the whole parameter's shape.
        hf_names: the one tensor that it is, or for a stack of experts one tensor per expert, in order.
        fused: where a stack is found in a checkpoint that has its experts in one tensor; None if it is no stack.
    """

    name: str
    shape: tuple[int, ...]
    hf_names: tuple[str, ...]
    fused: FusedSource | None = None

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape that each of `hf_names` has."""
        return self.shape if self.fused is None else self.shape[1:]


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that activation checkpointing and torch.compile insert."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def weight_map(config: ModelConfig) -> tuple[WeightSlot, ...]:
    """Return every parameter of a model, in the order of the forward pass. It depends on nothing but the architecture.

    A tied output layer has no slot of its own: `lm_head.weight` is then another name of `tok_embeddings.weight`.
    """
    sizes = Sizes.of(config)
    slots = [WeightSlot(EMBEDDING, (sizes.vocab, sizes.hidden), ("model.embed_tokens.weight",))]
    for layer in range(sizes.num_layers):
        slots += _attention(sizes, layer)
        slots += _mixture(sizes, layer) if sizes.num_experts else _feed_forward(sizes, layer)
    slots.append(WeightSlot("norm.weight", (sizes.hidden,), ("model.norm.weight",)))
    if not sizes.is_tied:
        name = SCORE if config.head == "scalar" else HEAD
        slots.append(WeightSlot(HEAD, (sizes.num_outputs, sizes.hidden), (name,)))
    return tuple(slots)


def slots_by_name(config: ModelConfig) -> dict[str, WeightSlot]:
    """Return the slot of every name that a parameter can have; a tied output layer leads to the embedding's slot."""
    slots = {slot.name: slot for slot in weight_map(config)}
    slots.setdefault(HEAD, slots[EMBEDDING])
    return slots


def hf_views(state: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors under our names as Hugging Face names them. All are views: nothing is copied.

    `state` may hold a part of the model. A tied output layer is left out, as Hugging Face leaves it out.
    """
    slots = {slot.name: slot for slot in weight_map(config)}
    for given, tensor in state.items():
        name = plain_name(given)
        if name == HEAD and HEAD not in slots:
            continue
        slot = slots.get(name)
        if slot is None:
            raise unknown_parameter(given)
        if tuple(tensor.shape) != slot.shape:
            raise wrong_parameter(given, tuple(tensor.shape), slot)
        yield from split(slot, tensor)


def split(slot: WeightSlot, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of Hugging Face that a whole parameter consists of, as views."""
    parts = (tensor,) if slot.fused is None else tensor.unbind(0)
    yield from zip(slot.hf_names, parts, strict=True)


def unknown_parameter(name: str) -> ModelError:
    return ModelError(
        "A parameter of the model has no place in a Hugging Face checkpoint.",
        path=name,
        rule="it is one of those that `weight_map` lists for the architecture",
        repair="Give the configuration that the model was built from.",
    )


def wrong_parameter(name: str, shape: tuple[int, ...], slot: WeightSlot) -> ModelError:
    return ModelError(
        "A parameter of the model is not as large as its configuration says.",
        path=name,
        value=shape,
        rule=f"its shape is {slot.shape}",
        repair="Give the configuration that the model was built from.",
    )


def _attention(sizes: Sizes, layer: int) -> list[WeightSlot]:
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    dim, width, queries, keys = sizes.hidden, sizes.head_dim, sizes.queries, sizes.keys
    slots = [
        WeightSlot(f"{ours}.attention_norm.weight", (dim,), (f"{theirs}.input_layernorm.weight",)),
    ]
    for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
        linear, hf_linear = f"{ours}.attention.qkv_linear.w{name}", f"{theirs}.self_attn.{name}_proj"
        slots.append(WeightSlot(f"{linear}.weight", (outputs, dim), (f"{hf_linear}.weight",)))
        if sizes.has_qkv_bias:
            slots.append(WeightSlot(f"{linear}.bias", (outputs,), (f"{hf_linear}.bias",)))
    slots.append(WeightSlot(f"{ours}.attention.wo.weight", (dim, queries), (f"{theirs}.self_attn.o_proj.weight",)))
    if sizes.has_head_norms:
        slots += [
            WeightSlot(f"{ours}.attention.{norm}.weight", (width,), (f"{theirs}.self_attn.{norm}.weight",))
            for norm in ("q_norm", "k_norm")
        ]
    slots.append(WeightSlot(f"{ours}.ffn_norm.weight", (dim,), (f"{theirs}.post_attention_layernorm.weight",)))
    return slots


def _feed_forward(sizes: Sizes, layer: int) -> list[WeightSlot]:
    dim, inner = sizes.hidden, sizes.inner
    shapes = {"w1": ("gate_proj", (inner, dim)), "w3": ("up_proj", (inner, dim)), "w2": ("down_proj", (dim, inner))}
    return [
        WeightSlot(f"layers.{layer}.feed_forward.{name}.weight", shape, (f"model.layers.{layer}.mlp.{hf}.weight",))
        for name, (hf, shape) in shapes.items()
    ]


def _mixture(sizes: Sizes, layer: int) -> list[WeightSlot]:
    dim, inner, experts = sizes.hidden, sizes.inner, sizes.num_experts
    ours, theirs = f"layers.{layer}.moe", f"model.layers.{layer}.mlp"
    both = (experts, 2 * inner, dim)
    stacks = (
        ("w1_EFD", "gate_proj", (inner, dim), FusedSource(f"{theirs}.experts.gate_up_proj", both, 0)),
        ("w3_EFD", "up_proj", (inner, dim), FusedSource(f"{theirs}.experts.gate_up_proj", both, inner)),
        ("w2_EDF", "down_proj", (dim, inner), FusedSource(f"{theirs}.experts.down_proj", (experts, dim, inner), 0)),
    )
    slots = [WeightSlot(f"{ours}.router.gate.weight", (experts, dim), (f"{theirs}.gate.weight",))]
    for name, hf, shape, fused in stacks:
        names = tuple(f"{theirs}.experts.{expert}.{hf}.weight" for expert in range(experts))
        slots.append(WeightSlot(f"{ours}.routed_experts.inner_experts.{name}", (experts, *shape), names, fused))
    return slots
