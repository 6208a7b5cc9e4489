"""Make TorchTitan importable wherever torch is.

TorchTitan asks torch which accelerator there is when it is imported, and takes CUDA for granted where there is none;
one of its kernels imports Triton unconditionally; and one of its classes calls `torch.compile` where it is defined,
which imports the whole compiler. All of that is fixed here, before its first import. Every module of ours that imports
TorchTitan imports this one first.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

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
    _import_attention()
    # The router asks for float32 by autocast, which a CPU does not need; torch warns at every call.
    warnings.filterwarnings("ignore", message="In CPU autocast", category=UserWarning)


def _name_its_logger() -> None:
    """Give TorchTitan a logger of its own: it logs as the root logger."""
    import torchtitan.tools.logging as titan_logging

    titan_logging.logger = logging.getLogger("torchtitan")
    titan_logging.logger.setLevel(logging.WARNING)


def _import_attention() -> None:
    """Import TorchTitan's attention without the compiler, which takes every rank half a second.

    Its FlexAttention, which we do not use, has a compiled function as an attribute of the class.
    """
    compile_now = torch.compile
    torch.compile = functools.partial(_compile_later, compile_now)
    try:
        import torchtitan.models.common.attention  # noqa: F401
    finally:
        torch.compile = compile_now


def _compile_later(compile_now: Callable[..., Any], function: Any = None, **options: Any) -> Any:
    """Return a function that is compiled when it is first called."""
    if not isinstance(function, types.FunctionType):
        return compile_now(function, **options)
    compiled = functools.cache(lambda: compile_now(function, **options))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


prepare()
