"""Products with a weight on a CPU, in float32 and without gradients, with the bits of torch's own.

torch leaves products to a library (MKL), which is made for many rows: at the 64 rows of a decode step it reaches three
quarters of what a core can do, at 16 half. The kernel here is as fast for few rows as for many. It adds in the same
order, so that a generator goes on computing what its trainer computes, bit for bit. In which order the library adds
is found out by trying, once for each shape and number of threads; where it cannot be found out, nothing is lost but
time: the library computes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.models.cpu_attention import FLAG_SETS
from forge.runtime import native_build
from forge.runtime.row_floor import row_floor

KERNEL: Final = native_build.Kernel(
    Path(__file__).with_name("cpu_linear.c"), without="generation on a CPU is slower, with the same results"
)

_log = logging.getLogger(__name__)
_PROBE_OUTPUTS: Final = 48
_PROBE_ROWS: Final = 72  # more than the kernel computes at once
_CHAIN_STEP: Final = 16
_LONGEST_CHAIN: Final = 1024
_LARGEST_PROBE: Final = 1 << 26  # weights that a trial may have; beyond, memory is what products wait for anyway


class Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "outputs", "x_row", "out_row", "chain")),
        ("num_threads", ctypes.c_int32),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernel of this process, compiled if nobody has yet; None where torch stands in."""
    return native_build.load(KERNEL, ["forge_linear"], flag_sets=FLAG_SETS[:1], level=logging.INFO)


def product(x_RK: Tensor, weight_NK: Tensor) -> Tensor | None:
    """x @ weight.T, float32 [R, N], in the bits that torch gives a row among many; None where that cannot be promised.

    Both are plain float32 tensors on a CPU. The result has no gradient.
    """
    if library() is None or not weight_NK.is_contiguous() or x_RK.stride(-1) != 1:
        return None
    known = chain(weight_NK.shape[1], weight_NK.shape[0], torch.get_num_threads())
    return None if known is None else _multiplied(x_RK, weight_NK, chain=known)


def _multiplied(x: Tensor, weight: Tensor, *, chain: int) -> Tensor:
    native = library()
    assert native is not None, "the kernel was there when this was called"
    out = torch.empty(len(x), len(weight))
    addresses = (tensor.data_ptr() for tensor in (x, weight, out))
    job = Product(*addresses, len(x), x.shape[1], len(weight), x.stride(0), len(weight), chain, torch.get_num_threads())
    if native.forge_linear(ctypes.addressof(job)):
        raise MemoryError("no memory for a product of matrices")
    return out


@functools.cache
def chain(width: int, num_outputs: int, num_threads: int) -> int | None:
    """How many terms the library adds in one go for weights of this shape; None if no number explains its results."""
    if not 0 < width * num_outputs <= _LARGEST_PROBE:
        return None
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, width, generator=draw)
    x = torch.randn(max(_PROBE_ROWS, row_floor()), width, generator=draw)
    few, many = F.linear(x[: row_floor()], weight), F.linear(x, weight)
    if not torch.equal(few, many[: len(few)]):
        return None
    lengths: tuple[int, ...] = (width, -(-width // 2), *range(_CHAIN_STEP, min(width, _LONGEST_CHAIN + 1), _CHAIN_STEP))
    for length in dict.fromkeys(lengths):
        found = _multiplied(x, weight[:_PROBE_OUTPUTS], chain=length)
        if torch.equal(found, many[:, :_PROBE_OUTPUTS]) and torch.equal(_multiplied(x, weight, chain=length), many):
            return length
    _log.info("no order of adding explains the products of %d by %d; torch computes them", num_outputs, width)
    return None
