"""LoRA: the section `adapter` of every training configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, PathText, broken_rule

TargetName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGET_NAMES: tuple[TargetName, ...] = get_args(TargetName)
"""The linear layers that can have an adapter, as Hugging Face and PEFT name them."""

BaseDtype = Literal["int8", "nf4"]
"""In what the frozen linear weights below an adapter can be kept, where not in what is computed with."""

DEFAULT_RANK = 8


class AdapterConfig(ConfigModel):
    """A LoRA adapter: low-rank matrices that are trained beside the frozen weights of the model."""

    rank: int | None = Field(
        default=None, ge=1, description="Rank of the two matrices; null for 8, or for what the adapter in `path` has."
    )
    alpha: float | None = Field(
        default=None,
        gt=0,
        description="The adapter's output is multiplied by alpha / rank; null for twice the rank, or for what the "
        "adapter in `path` has.",
    )
    targets: Literal["all", "attention", "experts"] | tuple[TargetName, ...] | None = Field(
        default=None,
        description="Linear layers with an adapter. `all`: attention and feed-forward layers, experts included; the "
        "embedding, the output layer and the router have none. `attention`: q_proj, k_proj, v_proj and o_proj. "
        "`experts`: gate_proj, up_proj and down_proj of every expert. Or a list of these names. Null for `all`, or for "
        "what the adapter in `path` has.",
    )
    rslora: bool | None = Field(
        default=None,
        description="Whether the output is multiplied by alpha / sqrt(rank) instead (rank-stabilized LoRA); null for "
        "no, or for what the adapter in `path` says.",
    )
    base_dtype: BaseDtype | None = Field(
        default=None,
        description="In what the frozen weights of the linear layers are kept: `int8` (1 byte each and a scale for "
        "each row) or `nf4` (4 bits each and a scale for each 64 of them, as in QLoRA). They are dequantised where "
        "they are used. Needs `torchforge[quantized]`. Null for the precision that is computed in.",
    )
    path: PathText | None = Field(
        default=None, description="Folder of a PEFT adapter to start from; null for a new one, which changes nothing."
    )

    @classmethod
    def of_checkpoint(cls, extra: Mapping[str, Any]) -> AdapterConfig | None:
        """Return the adapter that a checkpoint holds, from its `extra`; None for a checkpoint of all weights."""
        found = extra.get("adapter")
        if found is None:
            return None
        names = {name: found.get(name) for name in ("rank", "alpha", "rslora", "base_dtype")}
        return cls(targets=tuple(found["targets"]), **names)

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if isinstance(self.targets, tuple) and (not self.targets or len(set(self.targets)) != len(self.targets)):
            rule = "at least one name, each of them once"
            raise broken_rule(rule, repair=f"choose from {', '.join(TARGET_NAMES)}, or write `all`", key="targets")
        return self
