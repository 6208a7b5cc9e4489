"""A tree of modules that holds nothing but the parameters of a model, under our names."""

from __future__ import annotations

import torch
from torch import nn

from forge.config import ModelConfig
from forge.models.weight_names import weight_map


def tree(config: ModelConfig, *, fill: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """All parameters have one value. A tied head is the embedding."""
    root = nn.Module()
    for slot in weight_map(config):
        *path, leaf = slot.name.split(".")
        at = root
        for name in path:
            if name not in dict(at.named_children()):
                at.add_module(name, nn.Module())
            at = at.get_submodule(name)
        at.register_parameter(leaf, nn.Parameter(torch.full(slot.shape, fill, dtype=dtype)))
    if config.tie_embeddings:
        root.add_module("lm_head", nn.Module())
        root.lm_head.register_parameter("weight", root.tok_embeddings.weight)
    return root
