"""Sample tokens on a CPU by one call: two dozen operations on small tensors take far longer than what they compute.

`forge.generator.native.sampler.pick` says what is sampled, and uses this. The arithmetic is the same operation by
operation, in the order in which torch adds on x86; where torch adds in another, a token can be another one if its
uniform number lies within a rounding error of the boundary to the next.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from forge.kernels import native_build

KERNEL: Final = native_build.Kernel(
    Path(__file__).with_name("cpu_sampling.c"), without="sampling tokens on a CPU is slower"
)
BLOCK: Final = 128


class _Sampling(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("probs", "uniforms", "sums", "tokens")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernel of this process, compiled if it is not in the cache; None where torch computes."""
    return native_build.load(KERNEL, ["forge_sample", "forge_use_threads"], level=logging.INFO)


def sample_tokens(probs_SW: Tensor, uniforms_S: Tensor) -> Tensor | None:
    """Return for each row the token at which the running sum first exceeds its share, int64 [S].

    Returns None without the kernel.

    Args:
        probs_SW: float32 without gaps on a CPU, W a multiple of 128. Rows that are not distributions get token 0.
        uniforms_S: float64, from 0 to below 1.
    """
    native = library()
    if native is None or not probs_SW.is_contiguous() or not uniforms_S.is_contiguous():
        return None
    rows, width = probs_SW.shape
    tokens, sums = torch.empty(rows, dtype=torch.int64), torch.empty(width // BLOCK, dtype=torch.int64)
    job = _Sampling(*(tensor.data_ptr() for tensor in (probs_SW, uniforms_S, sums, tokens)), rows, width)
    native.forge_sample(ctypes.addressof(job))
    return tokens


@contextmanager
def single_thread() -> Iterator[None]:
    """Keep torch's operations on this thread from waking other threads; nothing changes without the kernel.

    `torch.set_num_threads` would change the library of products for the whole process, and with it the bits of a
    trainer that computes on another thread. This is a number of this thread's own.
    """
    native, before = library(), torch.get_num_threads()
    if native is None or before == 1:
        yield
        return
    one, all_of_them = ctypes.c_int32(1), ctypes.c_int32(before)
    native.forge_use_threads(ctypes.addressof(one))
    try:
        yield
    finally:
        native.forge_use_threads(ctypes.addressof(all_of_them))
