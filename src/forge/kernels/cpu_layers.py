"""Norms, rotary embeddings and gates on a CPU, in float32, with their gradients: one pass over memory for each.

torch takes a dozen passes for the gradient of a norm, and all threads synchronize after each. Here it is one. Norms and
rotary embeddings have the bits of torch's operations, so that models give the same logprobs with and without gradients;
an element of a gate has the same bits wherever it lies. Gradients are right to rounding, and do not depend on the
number of threads. Without a compiler, or with `FORGE_NATIVE=0`, `library` is None and callers leave the work to torch.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from forge.errors import ModelError
from forge.kernels import native_build

PART_ROWS: Final = 64
"""Rows whose contributions to a weight's gradient are added up together, as in the C."""
KERNEL: Final = native_build.Kernel(
    Path(__file__).with_name("cpu_layers.c"),
    without="training and generation on a CPU are slower, and their logprobs may differ in the last bits",
)
_FUNCTIONS: Final = ("forge_norm", "forge_norm_backward", "forge_rotate", "forge_gate", "forge_gate_backward")


class _Norm(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "factors", "grad", "out", "parts")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        ("num_threads", ctypes.c_int32),
    )


class Rotation(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "table", "out", "positions")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "width", "x_token", "x_head", "num_positions")),
        *((name, ctypes.c_int32) for name in ("backward", "num_threads")),
    )


class Gating(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate", "up", "out", "grad", "gate_grad", "up_grad")),
        ("count", ctypes.c_int64),
        ("num_threads", ctypes.c_int32),
    )


def build(flag_sets: tuple[tuple[str, ...], ...] = native_build.EXACT_FLAG_SETS) -> ctypes.CDLL | None:
    """Load the kernels as these flags compile them; None where they cannot be built."""
    return native_build.load(KERNEL, _FUNCTIONS, flag_sets=flag_sets)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernels of this process, compiled if they are not in the cache; None where torch computes."""
    return build()


def _kernels() -> ctypes.CDLL:
    native = library()
    assert native is not None, "callers ask library() before they come here"
    return native


def normed(x_ND: Tensor, factors_N: Tensor, weight_D: Tensor) -> Tensor:
    """Return x * factors[:, None] * weight, in that order, of contiguous float32 tensors."""
    out = torch.empty(x_ND.shape)
    addresses = (tensor.data_ptr() for tensor in (x_ND, weight_D, factors_N))
    job = _Norm(*addresses, None, out.data_ptr(), None, *x_ND.shape, torch.get_num_threads())
    _kernels().forge_norm(ctypes.addressof(job))
    return out


def norm_gradients(grad_ND: Tensor, x_ND: Tensor, factors_N: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and of the weight of a root mean square norm, whose factors these are."""
    rows, width = x_ND.shape
    out, parts = torch.empty(x_ND.shape), torch.empty(max(-(-rows // PART_ROWS), 1), width)
    addresses = (tensor.data_ptr() for tensor in (x_ND, weight_D, factors_N, grad_ND, out, parts))
    job = _Norm(*addresses, rows, width, torch.get_num_threads())
    _kernels().forge_norm_backward(ctypes.addressof(job))
    return out, parts[0].clone()


def rotates(x: Tensor) -> bool:
    """Return whether `rotated` takes heads of this shape and these strides, and there is a kernel."""
    return x.stride(-1) == 1 and x.shape[-1] % 2 == 0 and library() is not None


def rotated(x_LNH: Tensor, table: Tensor, positions_L: Tensor, *, backward: bool = False) -> Tensor:
    """Rotate heads to their positions, contiguous [L, N, H]; with `backward`, return the gradient of what was rotated.

    Args:
        x_LNH: float32 of any strides if the last is 1; H is even.
        table: [positions, 2 * H], contiguous: cosines and sines.
        positions_L: int64.
    """
    out, positions_L = torch.empty(x_LNH.shape), positions_L.contiguous()
    addresses = (tensor.data_ptr() for tensor in (x_LNH, table, out, positions_L))
    job = Rotation(
        *addresses, *x_LNH.shape, *x_LNH.stride()[:2], table.shape[0], int(backward), torch.get_num_threads()
    )
    if _kernels().forge_rotate(ctypes.addressof(job)):
        raise ModelError(
            "a token's position is beyond the model's longest sequence",
            path="positions_L",
            value=[int(positions_L.min()), int(positions_L.max())],
            rule=f"at least 0 and below {table.shape[0]}",
            repair="raise training.max_seq_len, or cut what is longer",
        )
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up of contiguous float32 tensors."""
    out = torch.empty_like(gate)
    addresses = (tensor.data_ptr() for tensor in (gate, up, out))
    job = Gating(*addresses, None, None, None, gate.numel(), torch.get_num_threads())
    _kernels().forge_gate(ctypes.addressof(job))
    return out


def gate_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up in silu(gate) * up, of contiguous float32 tensors."""
    found = torch.empty(gate.shape), torch.empty(gate.shape)
    addresses = (tensor.data_ptr() for tensor in (grad, *found))
    job = Gating(gate.data_ptr(), up.data_ptr(), None, *addresses, gate.numel(), torch.get_num_threads())
    _kernels().forge_gate_backward(ctypes.addressof(job))
    return found
