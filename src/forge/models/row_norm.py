"""The root mean square norm of every model here, with a gradient in one pass on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchtitan.models.common.nn_modules import RMSNorm

from forge.kernels import cpu_layers
from forge.kernels.cpu_linear import is_rowwise


class RowNorm(RMSNorm):  # type: ignore[misc]
    """TorchTitan's norm, with its bits. In float32 on a CPU and with gradients, `forge.kernels.cpu_layers` does it."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):  # type: ignore[misc]
        pass

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and is_rowwise(x) and is_rowwise(self.weight) and cpu_layers.library() is not None:
            by_rows: Tensor = _Normed.apply(x, self.weight, self.eps)
            return by_rows
        out: Tensor = super().forward(x)
        return out


class _Normed(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        factors = x.square().mean(-1).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, factors)
        return cpu_layers.normed(_rows(x), factors, weight).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factors = ctx.saved_tensors
        of_x, of_weight = cpu_layers.norm_gradients(_rows(grad.contiguous()), _rows(x), factors, weight)
        return of_x.view(x.shape), of_weight, None


def _rows(tensor: Tensor) -> Tensor:
    width = tensor.shape[-1]
    return tensor.view(tensor.numel() // width, width)
