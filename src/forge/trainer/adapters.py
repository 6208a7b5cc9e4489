"""The LoRA adapter of an engine: where it comes from, what is trained with it, and which base it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge.config import AdapterConfig, ModelConfig
from forge.models.adapter_names import AdapterSpec, is_adapter
from forge.models.adapters import draw_adapters
from forge.models.peft_files import load_adapter, resolve_adapter
from forge.models.weight_names import HEAD
from forge.models.weights import local_box
from forge.trainer.adapter_identity import shape_identity
from forge.trainer.ranks import Ranks

_DIGEST_ROWS_BYTES: Final = 64 * 2**20
"""About the memory in which parts of a weight are widened to float32 for their digest."""


class EngineAdapter:
    """The adapter of one engine. All ranks make the same calls."""

    def __init__(self, config: AdapterConfig, model: ModelConfig) -> None:
        self.config, self._model = config, model
        self.spec: AdapterSpec = resolve_adapter(config, model)
        self._base_digest: str | None = None

    def is_trained(self, name: str) -> bool:
        """Return whether a parameter is trained: the adapter's own, and a scalar head, which no base has."""
        return is_adapter(name) or (name == HEAD and self._model.head == "scalar")

    def freeze(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Let gradients reach only what is trained."""
        for name, parameter in named:
            parameter.requires_grad_(self.is_trained(name))

    def load(self, parts: Sequence[nn.Module], *, seed: int) -> None:
        """Fill the adapter: from its folder, or as a new one, which changes nothing."""
        draw_adapters(parts, seed=seed)
        if self.config.path is not None:
            load_adapter(parts, Path(self.config.path), self._model, self.spec)

    # ---- The base -----------------------------------------------------------------------------------------------

    def identity(self, parameters: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Any]:
        """Return what a checkpoint says of the adapter: its shape, and the digest of the weights below it."""
        if self._base_digest is None:  # they are frozen
            self._base_digest = base_digest(
                {name: tensor for name, tensor in parameters.items() if not self.is_trained(name)}, ranks
            )
        return {**shape_identity(self.spec), "base_digest": self._base_digest}


def base_digest(parameters: Mapping[str, Tensor], ranks: Ranks) -> str:
    """Return the digest of weights, whatever their layout over ranks: of their values in float32, by name."""
    mine = {name: _digest_part(tensor) for name, tensor in parameters.items()}
    sums: dict[str, int] = {}
    for found in ranks.gather(mine):
        for name, part in found.items():
            sums[name] = (sums.get(name, 0) + part) % 2**64
    text = "\n".join(f"{name} {digest:016x}" for name, digest in sorted(sums.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _digest_part(tensor: Tensor) -> int:
    """Return what this rank adds to a weight's digest. Of equal copies on several ranks one counts."""
    from forge.store.digest import digest_tensor
    from forge.store.sharding import Region

    shape, box = tuple(tensor.shape), local_box(tensor)
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        places = zip(coordinate or (), tensor.placements, strict=bool(coordinate))
        if coordinate is None or any(place and split.is_replicate() for place, split in places):
            return 0
        tensor = tensor.to_local()
    if tensor.numel() == 0:
        return 0
    wide = torch.promote_types(tensor.dtype, torch.float32)
    step = max(1, _DIGEST_ROWS_BYTES // (tensor[0].numel() * wide.itemsize))
    total = 0
    for start in range(0, len(tensor), step):
        rows = tensor[start : start + step].detach().to(wide).contiguous()
        offset = (box[0].start + start, *(part.start for part in box[1:]))
        total += digest_tensor(rows, Region(offset, tuple(rows.shape)), shape)
    return total % 2**64
