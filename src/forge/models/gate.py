"""The gated middle of a feed-forward layer, in which an element's result does not depend on where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchtitan.models.common.feed_forward import FeedForward

from forge.kernels import cpu_layers
from forge.kernels.cpu_linear import is_rowwise


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. In float32 on a CPU an element's bits depend on the two elements alone."""
    if is_rowwise(gate) and is_rowwise(up) and cpu_layers.library() is not None:
        out: Tensor = _Gated.apply(gate, up)
        return out
    return F.silu(gate) * up


class _Gated(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return cpu_layers.gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return cpu_layers.gate_gradients(grad.contiguous(), gate, up)


class RowFeedForward(FeedForward):  # type: ignore[misc]
    """TorchTitan's feed-forward layer by `gated`: what a token gets does not depend on its batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):  # type: ignore[misc]
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(gated(self.w1(x), self.w3(x)))
