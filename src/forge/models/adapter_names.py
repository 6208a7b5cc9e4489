"""Which layers of a model have a LoRA adapter, and what its tensors are called here and in PEFT's files.

A layer with weight W [out, in] and an adapter of rank r also has `lora_a` [r, in] and `lora_b` [out, r], and computes
x W^T + (scale * x A^T) B^T. A stack of experts [E, out, in] has stacks [E, r, in] and [E, out, r].
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from forge.config.adapter import DEFAULT_RANK, TARGET_NAMES, AdapterConfig, BaseDtype
from forge.config.schema import ModelConfig
from forge.errors import ConfigError
from forge.models.weight_names import WeightSlot, plain_name, weight_map

A: Final = "lora_a"
B: Final = "lora_b"
PEFT_PREFIX: Final = "base_model.model."

_ATTENTION: Final = TARGET_NAMES[:4]
_FEED_FORWARD: Final = TARGET_NAMES[4:]


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter's shape: everything but its numbers.

    Attributes:
        rank, alpha: of every layer's adapter.
        targets: the layers that have one, by the last part of Hugging Face's name, in the order of `TARGET_NAMES`.
        rslora: whether the scale is alpha / sqrt(rank).
        base_dtype: in what the linear weights of the base are kept, if in fewer bits than are computed with.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False
    base_dtype: BaseDtype | None = None

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @classmethod
    def of(cls, config: AdapterConfig, model: ModelConfig) -> AdapterSpec:
        """Return what a section means for a model; keys that are not set have their default.

        Where the section has a `path`, `forge.models.peft_files.resolve_adapter` is the one to call.
        """
        rank = DEFAULT_RANK if config.rank is None else config.rank
        alpha = 2.0 * rank if config.alpha is None else config.alpha
        targets = _targets(config.targets or "all", model)
        return cls(rank, alpha, targets, rslora=bool(config.rslora), base_dtype=config.base_dtype)


@dataclass(frozen=True, slots=True)
class AdapterSlot:
    """The adapter of one linear layer, or of one stack of experts.

    Attributes:
        base: the weight that it belongs to.
        rank: of the adapter.
    """

    base: WeightSlot
    rank: int

    @property
    def module(self) -> str:
        """The module that holds the weight and the two matrices."""
        return self.base.name.rpartition(".")[0]

    @property
    def attributes(self) -> tuple[str, str]:
        """What the two matrices are called in the module."""
        weight = self.base.name.rpartition(".")[2]
        return (A, B) if self.base.fused is None else (f"{weight}_{A}", f"{weight}_{B}")

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two matrices as parameters of the model."""
        return f"{self.module}.{self.attributes[0]}", f"{self.module}.{self.attributes[1]}"

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the two matrices."""
        *stack, num_out, num_in = self.base.shape
        return (*stack, self.rank, num_in), (*stack, num_out, self.rank)

    @property
    def peft_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tensors in PEFT's file: one for each matrix, or for a stack one per expert, in order."""
        layers = [PEFT_PREFIX + name.removesuffix(".weight") for name in self.base.hf_names]
        return tuple(f"{each}.lora_A.weight" for each in layers), tuple(f"{each}.lora_B.weight" for each in layers)


def adapter_map(model: ModelConfig, spec: AdapterSpec) -> tuple[AdapterSlot, ...]:
    """Return the adapters of a model's layers, in the order of the forward pass."""
    slots = (slot for slot in weight_map(model) if len(slot.shape) > 1)
    return tuple(AdapterSlot(slot, spec.rank) for slot in slots if layer_of(slot) in spec.targets)


def adapter_slots(model: ModelConfig, spec: AdapterSpec) -> dict[str, AdapterSlot]:
    """Return the adapter of each weight that has one, by the name of the weight."""
    return {slot.base.name: slot for slot in adapter_map(model, spec)}


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith((A, B))


def num_adapter_parameters(slots: Iterable[AdapterSlot]) -> int:
    """Return the number of weights of some adapters."""
    return sum(math.prod(shape) for slot in slots for shape in slot.shapes)


def base_name(name: str) -> str:
    """Return the name of the weight that a parameter of an adapter belongs to."""
    name = plain_name(name)
    if name.endswith((f".{A}", f".{B}")):
        return f"{name.rpartition('.')[0]}.weight"
    return name.removesuffix(f"_{A}").removesuffix(f"_{B}")


def layer_of(slot: WeightSlot) -> str:
    """Return the layer that a weight belongs to, by the last part of Hugging Face's name."""
    return slot.hf_names[0].removesuffix(".weight").rpartition(".")[2]


def _targets(asked: str | tuple[str, ...], model: ModelConfig) -> tuple[str, ...]:
    if asked == "experts" and model.num_experts is None:
        raise ConfigError(
            "This model has no experts that could have an adapter.",
            path="adapter.targets",
            value=asked,
            rule="`experts` needs a mixture-of-experts model",
            repair="write `all`, or the names of layers: [gate_proj, up_proj, down_proj]",
        )
    named = {"all": TARGET_NAMES, "attention": _ATTENTION, "experts": _FEED_FORWARD}
    chosen = named[asked] if isinstance(asked, str) else asked
    return tuple(name for name in TARGET_NAMES if name in chosen)
