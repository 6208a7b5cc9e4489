"""The gated middle of a feed-forward layer, in which an element's result does not depend on where it lies."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchtitan.models.common.feed_forward import FeedForward

from forge.models import cpu_training
from forge.models.cpu_attention import FLAG_SETS
from forge.runtime import native_build
from forge.runtime.row_floor import is_rowwise

KERNEL: Final = native_build.Kernel(
    Path(__file__).with_name("cpu_gate.c"), without="logprobs of trainer and generator may differ in the last bits"
)


class _Gating(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate", "up", "out")),
        ("count", ctypes.c_int64),
        ("num_threads", ctypes.c_int32),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernel of this process, compiled if nobody has yet; None where torch stands in."""
    return native_build.load(KERNEL, ["forge_gate"], flag_sets=FLAG_SETS)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. In float32 on a CPU an element's bits depend on the two elements alone."""
    if is_rowwise(gate) and is_rowwise(up) and library() is not None:
        out: Tensor = _Gated.apply(gate, up)
        return out
    return F.silu(gate) * up


class _Gated(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        native = library()
        assert native is not None, "the kernel was there when this was called"
        addresses = (tensor.data_ptr() for tensor in (gate, up, out))
        job = _Gating(*addresses, gate.numel(), torch.get_num_threads())
        native.forge_gate(ctypes.addressof(job))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if cpu_training.library() is not None:
            return cpu_training.gate_gradients(grad.contiguous(), gate, up)
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class RowFeedForward(FeedForward):  # type: ignore[misc]
    """TorchTitan's feed-forward layer by `gated`: what a token gets does not depend on its batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):  # type: ignore[misc]
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(gated(self.w1(x), self.w3(x)))
