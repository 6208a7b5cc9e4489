"""Products with a weight on a CPU in float32, in which a row's bits depend on the row and the weight alone.

A library of matrix products (MKL, OpenBLAS) chooses how to add by the number of rows and threads, and each processor
makes it choose differently: a row then has other last bits in another batch. Trainer and generator both compute with
the kernel here, with and without gradients, so their logprobs agree bit for bit on any processor and with any number
of threads. It is as fast as the library for many rows, and faster for few.

Without a compiler, or with `FORGE_NATIVE=0`, `library` is None and torch computes (`forge.models.layers`).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.kernels import native_build, row_check

KERNEL: Final = native_build.Kernel(
    Path(__file__).with_name("cpu_linear.c"),
    without="training and generation on a CPU are slower, and their logprobs differ in the last bits",
)

_NARROW: Final = 16
"""For fewer outputs libraries read rows at whatever address they lie, and add in an order that depends on it."""
_ALIGNED: Final = 4
_LEAST_ROWS: Final = 16
_ROWS_PER_THREAD: Final = 4
_PLAIN: Final = (torch.Tensor, nn.Parameter)
_log = logging.getLogger("forge.kernels")


class Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "outputs", "x_row", "out_row")),
        ("num_threads", ctypes.c_int32),
    )


def build(flag_sets: tuple[tuple[str, ...], ...] = native_build.EXACT_FLAG_SETS) -> ctypes.CDLL | None:
    """Load the kernel as these flags compile it; None where it cannot be built."""
    return native_build.load(KERNEL, ["forge_linear"], flag_sets=flag_sets)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernel of this process, compiled if it is not in the cache; None where torch computes.

    A kernel whose results are wrong, or in which a row depends on the others, is not used.
    """
    native = build()
    if native is None:
        return None
    problem = row_check.problem_of(functools.partial(kernel_product, native), num_threads=torch.get_num_threads())
    if problem is not None:
        _log.warning("the kernel cpu_linear is not used: %s; %s", problem, KERNEL.without)
        return None
    return native


def product(x_RK: Tensor, weight_NK: Tensor, *, out_RN: Tensor | None = None) -> Tensor:
    """Return x @ weight.T, float32 [R, N], without a gradient.

    Args:
        x_RK: plain float32 on a CPU; R is at least 1.
        weight_NK: the same.
        out_RN: where the result goes, if given. Its rows have no gaps.
    """
    native = library()
    if native is None:
        found = torch_product(x_RK, weight_NK)
        return found if out_RN is None else out_RN.copy_(found)
    return kernel_product(native, x_RK, weight_NK, out_RN=out_RN)


def kernel_product(
    native: ctypes.CDLL, x: Tensor, weight: Tensor, *, num_threads: int | None = None, out_RN: Tensor | None = None
) -> Tensor:
    """Return the product by a kernel, with as many threads as torch uses unless told otherwise."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight.contiguous()
    out = torch.empty(len(x), len(weight), dtype=torch.float32) if out_RN is None else out_RN
    addresses = (tensor.data_ptr() for tensor in (x, weight, out))
    sizes = (*x.shape, len(weight), x.stride(0), out.stride(0))
    job = Product(*addresses, *sizes, num_threads or torch.get_num_threads())
    if native.forge_linear(ctypes.addressof(job)):
        raise MemoryError("no memory for a matrix product")
    return out


def dependent_cases(cases: Iterable[row_check.Case]) -> tuple[row_check.Case, ...]:
    """Return the cases in which what this process computes with gives a row other bits in another batch."""
    native, before = library(), torch.get_num_threads()

    def by_torch(x: Tensor, weight: Tensor, *, num_threads: int) -> Tensor:
        torch.set_num_threads(num_threads)
        return torch_product(x, weight)

    try:
        multiply = by_torch if native is None else functools.partial(kernel_product, native)
        return row_check.dependent_cases(multiply, cases)
    finally:
        torch.set_num_threads(before)


def row_floor() -> int:
    """Return the least number of rows with which a row's bits do not depend on their number.

    Measured with torch's own library (MKL) on AMD: from four rows for each thread on. On Intel that holds for most
    shapes only, so where there is no kernel, products are padded to this number, and nothing is promised.
    """
    num_threads: int = torch.get_num_threads()
    return max(_LEAST_ROWS, _ROWS_PER_THREAD * num_threads)


def is_rowwise(tensor: Tensor) -> bool:
    """Return whether rows are kept independent of their number: plain float32 on a CPU, not being compiled."""
    return (
        type(tensor) in _PLAIN and tensor.dtype == torch.float32 and tensor.is_cpu and not torch.compiler.is_compiling()
    )


def torch_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product by torch, padded to where most libraries give a row the same bits in any batch."""
    num_outputs, floor = len(weight), row_floor()
    if num_outputs < _NARROW and (num_outputs == 1 or x.shape[1] % _ALIGNED):
        return torch_product(x, F.pad(weight, (0, 0, 0, _NARROW - num_outputs)))[:, :num_outputs]
    if len(x) >= floor:
        return F.linear(x, weight)
    return F.linear(F.pad(x, (0, 0, 0, floor - len(x))), weight)[: len(x)]
