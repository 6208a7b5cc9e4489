"""Rotary embeddings on a CPU, in float32 and without gradients: one pass in place of a dozen small operations."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from forge.models.cpu_attention import FLAG_SETS
from forge.runtime import native_build

KERNEL: Final = native_build.Kernel(
    Path(__file__).with_name("cpu_rotary.c"), without="generation on a CPU is slower, with the same results"
)


class Rotation(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "table", "out", "positions")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "width", "x_token", "x_head", "num_positions")),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernel of this process, compiled if nobody has yet; None where torch stands in."""
    return native_build.load(KERNEL, ["forge_rotate"], flag_sets=FLAG_SETS, level=logging.INFO)


def rotated(x_LNH: Tensor, table: Tensor, positions_L: Tensor) -> Tensor | None:
    """Heads turned to their positions, float32 [L, N, H], in the bits of torch's operations; None without the kernel.

    Args:
        x_LNH: plain float32 on a CPU, of any strides if the last is 1.
        table: [positions, 2 * H], cosines and sines.
        positions_L: int64.
    """
    native = library()
    if native is None or x_LNH.stride(-1) != 1 or x_LNH.shape[-1] % 2:
        return None
    positions_L = positions_L.contiguous()
    out = torch.empty(x_LNH.shape)
    addresses = (tensor.data_ptr() for tensor in (x_LNH, table, out, positions_L))
    job = Rotation(*addresses, *x_LNH.shape, *x_LNH.stride()[:2], table.shape[0])
    if native.forge_rotate(ctypes.addressof(job)):
        raise IndexError(f"positions up to {int(positions_L.max())}, in a table of {table.shape[0]}")
    return out
