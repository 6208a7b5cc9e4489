"""Make TorchTitan importable wherever torch is.

TorchTitan asks torch which accelerator there is when it is imported, and takes CUDA for granted where there is none;
one of its kernels imports Triton unconditionally. Both are fixed here, before its first import. Every module of ours
that imports TorchTitan imports this one first.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
import warnings

import torch
import torch._utils

_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def _absent(name: str) -> None:
    """Answer for the replaced kernel module: None for a kernel, an error for what Python itself asks."""
    if name.startswith("__"):
        raise AttributeError(name)


def prepare() -> None:
    """Prepare the process for TorchTitan. Calling it again does nothing more."""
    if not torch.cuda.is_available():
        torch._utils._get_available_device_type = lambda: "cpu"
    if importlib.util.find_spec("triton") is None and _KERNELS not in sys.modules:
        kernels = types.ModuleType(_KERNELS)
        kernels.__getattr__ = _absent  # type: ignore[method-assign]
        sys.modules[_KERNELS] = kernels
    _name_its_logger()
    # The router asks for float32 by autocast, which a CPU does not need; torch warns at every call.
    warnings.filterwarnings("ignore", message="In CPU autocast", category=UserWarning)


def _name_its_logger() -> None:
    """Give TorchTitan a logger of its own: it logs as the root logger."""
    import torchtitan.tools.logging as titan_logging

    titan_logging.logger = logging.getLogger("torchtitan")
    titan_logging.logger.setLevel(logging.WARNING)


prepare()
