"""Weights of a Hugging Face checkpoint under this library's names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from forge.config import ModelConfig
from forge.models.weight_names import weight_map


def to_ours(hf: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the inverse of `hf_views` for a whole model; experts may be separate or fused in one tensor."""
    ours: dict[str, Tensor] = {}
    for slot in weight_map(config):
        if slot.fused is not None and slot.fused.hf_name in hf:
            first = slot.fused.first_row
            ours[slot.name] = hf[slot.fused.hf_name][:, first : first + slot.shape[1]]
            continue
        parts = [hf[name] for name in slot.hf_names]
        ours[slot.name] = parts[0] if slot.fused is None else torch.stack(parts)
    return ours
