"""Random weights that do not depend on how a model is laid out over ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge.models.weights import local_box, named_parameters

STD = 0.02
_OUTPUTS = (".wo.weight", ".w2.weight", ".w2_EDF")


def draw_weights(parts: Sequence[nn.Module], *, num_layers: int, seed: int) -> None:
    """Fill the parameters of this rank's parts as a new model's.

    Norms are 1, biases 0, and the rest comes from a normal distribution.

    Each parameter has a generator of its own, made from the seed and its name, and is drawn whole before this rank's
    part is taken. So every layout on one kind of device begins with the same model.
    """
    with torch.no_grad():
        for name, parameter in named_parameters(parts):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if parameter.ndim == 1:
                local.fill_(0.0 if name.endswith(".bias") else 1.0)
                continue
            std = STD / (2 * num_layers) ** 0.5 if name.endswith(_OUTPUTS) else STD
            local.copy_(_draw(name, parameter, std=std, seed=seed)[local_box(parameter)])


def _draw(name: str, parameter: Tensor, *, std: float, seed: int) -> Tensor:
    name = "tok_embeddings.weight" if name == "lm_head.weight" else name  # one parameter where they are tied
    generator = torch.Generator(parameter.device).manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
    shape = tuple(parameter.shape)
    return torch.empty(shape, device=parameter.device).normal_(0.0, std, generator=generator)
