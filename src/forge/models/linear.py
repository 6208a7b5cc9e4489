"""Linear layers in which a row's result does not depend on how many rows there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.linear import Linear

from forge.models import cpu_linear
from forge.runtime.row_floor import is_rowwise, row_floor

_NARROW: Final = 16
"""For fewer outputs the library reads rows at whatever address they lie, and adds in an order that depends on it."""
_ALIGNED: Final = 4


def rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias over the last dimension of `x`.

    In float32 on a CPU a row has the same bits whatever else `x` holds: few rows are padded with zeros to
    `forge.runtime.row_floor.row_floor`, or computed by a kernel of our own (`forge.models.cpu_linear`) where there are
    no gradients; a weight with few outputs, such as a router's, is padded too. Elsewhere, and for DTensors, it is
    torch's own product.
    """
    num_rows = x.numel() // max(x.shape[-1], 1)
    if num_rows == 0 or not (is_rowwise(x) and is_rowwise(weight)):
        return F.linear(x, weight, bias)
    num_outputs = weight.shape[0]
    if num_outputs < _NARROW and (num_outputs == 1 or x.shape[-1] % _ALIGNED):
        missing = _NARROW - num_outputs
        wide_bias = None if bias is None else F.pad(bias, (0, missing))
        return rows_linear(x, F.pad(weight, (0, 0, 0, missing)), wide_bias)[..., :num_outputs]
    if bias is None and not torch.is_grad_enabled():
        found = cpu_linear.product(x.reshape(num_rows, x.shape[-1]), weight)
        if found is not None:
            return found.view(*x.shape[:-1], weight.shape[0])
    floor = row_floor()
    if num_rows >= floor:
        return F.linear(x, weight, bias)
    padded = F.pad(x.reshape(num_rows, x.shape[-1]), (0, 0, 0, floor - num_rows))
    return F.linear(padded, weight, bias)[:num_rows].view(*x.shape[:-1], weight.shape[0])


class RowLinear(Linear):  # type: ignore[misc]
    """TorchTitan's linear layer by `rows_linear`: what a token gets does not depend on its batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        pass

    def forward(self, input: Tensor) -> Tensor:
        return rows_linear(input, self.weight, self.bias)
