"""The store's C kernel, compiled once per machine, with the digest's weights in it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from forge.kernels import native_build
from forge.kernels.native_build import FLAG_SETS, NoNativeKernel, cache_directory
from forge.store.weighing import WORD_WEIGHTS

__all__ = ["FLAG_SETS", "KERNEL", "NoNativeKernel", "build", "cache_directory"]

KERNEL: Final = native_build.Kernel(
    Path(__file__).with_name("kernel.c"), without="copies and digests are slower but the same"
)


def build(environ: Mapping[str, str], *, flag_sets: tuple[tuple[str, ...], ...] = FLAG_SETS) -> ctypes.CDLL:
    """The loaded kernel, from the cache if it is there. Prints nothing."""
    library = native_build.build(KERNEL, environ, flag_sets=flag_sets)
    address, number, flags = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.forge_set_weights.argtypes = [address]
    library.forge_run.argtypes = [address, address, number, number, address, address, address, flags]
    library.forge_sample.argtypes = [ctypes.c_uint64, *[address] * 4, number, ctypes.c_uint64, address]
    library.forge_check.argtypes = [address, address, number, *[address] * 4, ctypes.c_uint64, address, address]
    for function in ("forge_set_weights", "forge_run", "forge_sample", "forge_check"):
        getattr(library, function).restype = None
    weights = WORD_WEIGHTS.astype("<u4")
    library.forge_set_weights(weights.ctypes.data)
    return library
