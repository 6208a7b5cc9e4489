"""The generator's RMS norm: on a GPU by a kernel that takes several short rows at once.

torch gives every row a block of threads of its own. A head's norm has rows of 64 or 128 numbers, and there are as many
of them as tokens times heads: most of such a block waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
from torch import Tensor
from torchtitan.models.common.nn_modules import RMSNorm

from forge.models.gpu_attention import device_of, power_of_two
from forge.models.gpu_rotary import is_plain

_NUMBERS: Final = 2048
"""What one program takes: as many rows as make up so many, or one."""


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in float32, in x's dtype.

    A row's bits depend on that row alone. `x` and `weight` are contiguous. It can be captured in a CUDA graph as
    `forge.models.gpu_attention` says.
    """
    from forge.models.gpu_program import normalise

    width = x.shape[-1]
    num_rows = x.numel() // width
    out = torch.empty_like(x)
    if not num_rows:
        return out
    padded = power_of_two(width)
    rows = max(1, _NUMBERS // padded)
    with device_of(x):
        normalise[(-(-num_rows // rows),)](
            x, weight, out, num_rows, width, eps, ROWS=rows, WIDTH=padded, num_warps=4 if padded <= 4096 else 8
        )
    return out


class GpuNorm(RMSNorm):  # type: ignore[misc]
    """TorchTitan's norm, by `normed` where that can take it. Without gradients only: it has no backward pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):  # type: ignore[misc]
        pass

    def forward(self, x: Tensor) -> Tensor:
        if is_plain(x) and is_plain(self.weight) and x.is_contiguous() and not torch.is_grad_enabled():
            return normed(x, self.weight, self.eps)
        found: Tensor = super().forward(x)
        return found
