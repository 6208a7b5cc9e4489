"""PEFT folders with LoRA adapters that change what a tiny model samples."""

from __future__ import annotations

from pathlib import Path

import torch

from forge.config import ModelConfig
from forge.config.adapter import TARGET_NAMES
from forge.models.adapter_names import AdapterSpec, adapter_map
from forge.models.peft_files import write_adapter


def make_adapter(
    folder: Path,
    model: ModelConfig,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    targets: tuple[str, ...] = TARGET_NAMES,
) -> Path:
    """Write an adapter of random numbers, drawn from its seed."""
    spec = AdapterSpec(rank, alpha, targets)
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        name: 0.5 * torch.randn(shape, generator=draw) * shape[-1] ** -0.5
        for slot in adapter_map(model, spec)
        for name, shape in zip(slot.names, slot.shapes, strict=True)
    }
    write_adapter(folder, tensors, model=model, spec=spec)
    return folder
