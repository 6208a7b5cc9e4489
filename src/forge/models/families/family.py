"""What sets one family of models apart from the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of decoders with grouped-query attention, rotary embeddings, RMS norms and gated feed-forward layers.

    Attributes:
        name: the value of `model.family`, and of `model_type` in config.json.
        label: what people call it.
        architecture: the class of `transformers` that config.json names.
        qk_norm: whether queries and keys are normalized, head by head.
        qkv_bias: whether the projections to queries, keys and values have biases.
        has_experts: whether every feed-forward layer is a mixture of experts.
        window: which layers `use_sliding_window` applies to: none, those from `max_window_layers` on, or all.
        fixed: keys of config.json that must have one of these values; the first is written.
        absent: what `transformers` takes for a key that config.json does not have, where other keys do not say it.
        tiny: how the tiny model of this family differs from the preset `tiny`.
    """

    name: str
    label: str
    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    has_experts: bool = False
    window: Literal["none", "upper", "all"] = "none"
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    absent: Mapping[str, int] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
