"""Copies of tokens that several documents have in common, and the sum of what comes back for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.models.gpu_attention import device_of, power_of_two
from forge.models.rows import Sharing


def copied(values_LKD: Tensor, sharing: Sharing) -> Tensor:
    """The values of whole documents [E, K, D] from those of a row [L, K, D].

    The gradient of a place is the sum over its copies, added up in float32 in a fixed order: the same bits every time,
    which the gradient of `index_select` on a GPU has not.
    """
    found: Tensor = _Copied.apply(values_LKD, sharing)
    return found


class _Copied(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, values_LKD: Tensor, sharing: Sharing) -> Tensor:
        ctx.sharing = sharing
        return values_LKD.index_select(0, sharing.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_EKD: Tensor) -> tuple[Tensor, None]:
        return sum_copies(grad_EKD, ctx.sharing), None


def sum_copies(values_EKD: Tensor, sharing: Sharing) -> Tensor:
    """The sum of the values of each place's copies [L, K, D]."""
    values_EKD = values_EKD.contiguous()
    num_places, shape = sharing.own.shape[0], values_EKD.shape[1:]
    if values_EKD.is_cuda and values_EKD.dtype != torch.float64:
        from forge.models.gpu_copies import sum_copies as program

        tokens, starts = sharing.copies
        sums = values_EKD.new_empty(num_places, *shape)
        width = shape.numel()
        with device_of(values_EKD):
            program[(num_places,)](values_EKD, tokens, starts, sums, width, WIDTH=power_of_two(width), num_warps=4)
        return sums
    wide = torch.promote_types(values_EKD.dtype, torch.float32)
    total = torch.zeros(num_places, *shape, dtype=wide, device=values_EKD.device)
    return total.index_add_(0, sharing.places, values_EKD.to(wide)).to(values_EKD.dtype)
