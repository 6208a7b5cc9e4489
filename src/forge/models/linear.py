"""Linear layers in which a row's result does not depend on how many rows there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchtitan.models.common.linear import Linear

from forge.kernels.cpu_linear import is_rowwise, product


def rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias over the last dimension of `x`.

    In float32 on a CPU a row has the same bits whatever else `x` holds, with and without gradients: both are computed
    by `forge.kernels.cpu_linear`. Gradients are torch's own products. Elsewhere, and for DTensors, it is torch's layer.
    """
    num_rows = x.numel() // max(x.shape[-1], 1)
    if num_rows == 0 or not (is_rowwise(x) and is_rowwise(weight)):
        return F.linear(x, weight, bias)
    rows = x.reshape(num_rows, x.shape[-1])
    wants_gradient = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    found: Tensor = _Product.apply(rows, weight) if wants_gradient else product(rows, weight)
    found = found if bias is None else found + bias
    return found.view(*x.shape[:-1], weight.shape[0])


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_rows = grad.mm(weight) if ctx.needs_input_grad[0] else None
        of_weight = grad.t().mm(rows) if ctx.needs_input_grad[1] else None
        return of_rows, of_weight


class RowLinear(Linear):  # type: ignore[misc]
    """TorchTitan's linear layer by `rows_linear`: what a token gets does not depend on its batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        pass

    def forward(self, input: Tensor) -> Tensor:
        return rows_linear(input, self.weight, self.bias)
