"""Norms, rotary embeddings and gates with gradients on a CPU, in float32: one pass over memory for each direction.

torch takes a dozen passes for the gradient of a norm, and each is a meeting of all threads. Here it is one. Forward
results have the bits of torch's operations, so that models give the same logprobs with and without gradients; gradients
are right to rounding, and do not depend on the number of threads. Without a compiler, or with `FORGE_NATIVE=0`,
`library` is None and callers leave the work to torch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from forge.errors import ModelError
from forge.models.cpu_attention import FLAG_SETS
from forge.runtime import native_build

PART_ROWS: Final = 64
"""Rows whose contributions to a weight's gradient are added up together, as in the C."""
KERNEL: Final = native_build.Kernel(
    Path(__file__).with_name("cpu_training.c"), without="training on a CPU is slower, with the same results"
)
_FUNCTIONS: Final = ("forge_norm", "forge_norm_backward", "forge_turn", "forge_gate_backward")


class _Norm(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "factors", "grad", "out", "parts")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        ("num_threads", ctypes.c_int32),
    )


class _Turning(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "table", "out", "positions")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "width", "x_token", "x_head", "num_positions")),
        *((name, ctypes.c_int32) for name in ("backward", "num_threads")),
    )


class _Gating(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate", "up", "grad", "gate_grad", "up_grad")),
        ("count", ctypes.c_int64),
        ("num_threads", ctypes.c_int32),
    )


def build(flag_sets: tuple[tuple[str, ...], ...] = FLAG_SETS) -> ctypes.CDLL | None:
    """The kernels as these flags compile them; None where they cannot be built."""
    return native_build.load(KERNEL, _FUNCTIONS, flag_sets=flag_sets, level=logging.INFO)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels of this process, compiled if nobody has yet; None where torch stands in."""
    return build()


def _kernels() -> ctypes.CDLL:
    native = library()
    assert native is not None, "callers ask library() before they come here"
    return native


def normed(x_ND: Tensor, factors_N: Tensor, weight_D: Tensor) -> Tensor:
    """x * factors[:, None] * weight, in that order, of contiguous float32 tensors."""
    out = torch.empty(x_ND.shape)
    addresses = (tensor.data_ptr() for tensor in (x_ND, weight_D, factors_N))
    job = _Norm(*addresses, None, out.data_ptr(), None, *x_ND.shape, torch.get_num_threads())
    _kernels().forge_norm(ctypes.addressof(job))
    return out


def norm_gradients(grad_ND: Tensor, x_ND: Tensor, factors_N: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and of the weight of a root mean square norm, whose factors these are."""
    rows, width = x_ND.shape
    out, parts = torch.empty(x_ND.shape), torch.empty(max(-(-rows // PART_ROWS), 1), width)
    addresses = (tensor.data_ptr() for tensor in (x_ND, weight_D, factors_N, grad_ND, out, parts))
    job = _Norm(*addresses, rows, width, torch.get_num_threads())
    _kernels().forge_norm_backward(ctypes.addressof(job))
    return out, parts[0].clone()


def turned(x_LNH: Tensor, table: Tensor, positions_L: Tensor, *, backward: bool = False) -> Tensor:
    """Heads turned to their positions, contiguous [L, N, H]; with `backward`, the gradient of what was turned.

    Args:
        x_LNH: float32 of any strides if the last is 1; H is even.
        table: [positions, 2 * H], cosines and sines.
        positions_L: int64, contiguous.
    """
    out = torch.empty(x_LNH.shape)
    addresses = (tensor.data_ptr() for tensor in (x_LNH, table, out, positions_L))
    job = _Turning(
        *addresses, *x_LNH.shape, *x_LNH.stride()[:2], table.shape[0], int(backward), torch.get_num_threads()
    )
    if _kernels().forge_turn(ctypes.addressof(job)):
        raise ModelError(
            "a token stands where the model has no position",
            path="positions_L",
            value=[int(positions_L.min()), int(positions_L.max())],
            rule=f"at least 0 and below {table.shape[0]}",
            repair="raise training.max_seq_len, or cut what is longer",
        )
    return out


def gate_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up in silu(gate) * up, of contiguous float32 tensors."""
    found = torch.empty(gate.shape), torch.empty(gate.shape)
    addresses = (tensor.data_ptr() for tensor in (gate, up, grad, *found))
    job = _Gating(*addresses, gate.numel(), torch.get_num_threads())
    _kernels().forge_gate_backward(ctypes.addressof(job))
    return found
