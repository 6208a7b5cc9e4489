"""Attention over packed documents on a GPU in half precision: FlashAttention 4 where it is installed, else torch's.

Both kernels compute the same thing. FlashAttention 4 is compiled for the GPU's own matrix units when it is first called
and kept in the user's cache; torch 2.13 brings FlashAttention 2, which does not use all that a Hopper GPU has.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import torch
from torch import Tensor

from forge.errors import ConfigError
from forge.kernels.native_build import cache_directory
from forge.models.rows import Documents

Setting = Literal["auto", "torch", "flash_attn_4"]
Kernel = Callable[[Tensor, Tensor, Tensor, Documents, Documents, float | None], Tensor]
"""(q [L, H, D], k [E, K, D], v [E, K, D], query documents, key documents, scale) -> [L, H, D], causal by document.

The queries of a document are its last tokens: they see all of its keys before them.
"""

CAPABILITIES: Final = (9, 10)
"""The major compute capabilities that FlashAttention 4 has a backward pass for: Hopper and Blackwell."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What the choice of a kernel depends on.

    Attributes:
        capability: the GPU's major compute capability; None without a GPU.
        is_installed: whether FlashAttention 4 can be imported.
        saves_selectively: whether activation checkpointing picks what it keeps by the names of torch's operators, among
            which FlashAttention 4 is not.
    """

    capability: int | None
    is_installed: bool
    saves_selectively: bool = False

    @classmethod
    def of(cls, device: torch.device, *, saves_selectively: bool) -> Situation:
        """Look at the device and at what is installed."""
        capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None
        return cls(capability, is_installed(), saves_selectively)


@cache
def is_installed() -> bool:
    """Return whether FlashAttention 4 can be imported. It is not imported: that takes seconds."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    return all(importlib.util.find_spec(name) is not None for name in ("flash_attn.cute", "cutlass"))


def choose_kernel(setting: Setting, situation: Situation) -> Literal["torch", "flash_attn_4"]:
    """Return the kernel for a setting; raise `ConfigError` where the setting names one that cannot run."""
    obstacle = _obstacle(situation)
    if setting == "flash_attn_4" and obstacle is not None:
        problem, repair = obstacle
        raise ConfigError(
            f"FlashAttention 4 cannot be used: {problem}",
            path="training.attention",
            value=setting,
            rule="a Hopper or Blackwell GPU, the package flash-attn-4, and activation checkpointing none or full",
            repair=f"{repair}, or set training.attention=auto",
        )
    if setting == "torch" or obstacle is not None:
        return "torch"
    return "flash_attn_4"


def _obstacle(situation: Situation) -> tuple[str, str] | None:
    if situation.capability not in CAPABILITIES:
        found = (
            "there is no GPU" if situation.capability is None else f"the GPU is of generation {situation.capability}"
        )
        return found, "use a GPU of compute capability 9 or 10"
    if not situation.is_installed:
        return "the package flash-attn-4 is not installed", "pip install 'torchforge[flash-attn-4]'"
    if situation.saves_selectively:
        return "selective activation checkpointing cannot keep its results", "choose none or full"
    return None


def load_kernel(name: Literal["torch", "flash_attn_4"]) -> Kernel:
    """Import a kernel. FlashAttention 4 takes seconds to import, and once more to compile at its first call."""
    return torch_kernel if name == "torch" else _flash_attn_4()


def torch_kernel(q: Tensor, k: Tensor, v: Tensor, queries: Documents, keys: Documents, scale: float | None) -> Tensor:
    """Attend with torch's `varlen_attn`."""
    from torch.nn.attention.varlen import varlen_attn

    out: Tensor = varlen_attn(
        q,
        k,
        v,
        queries.offsets,
        keys.offsets,
        queries.longest,
        keys.longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out


def _import_flash_attn_4() -> Callable[..., Any]:
    """Import it, and undo what its compiler does to the module path.

    It appends its own folder, whose typing.py would hide Python's in every process that is started with this path.
    """
    before = list(sys.path)
    from flash_attn.cute import flash_attn_varlen_func

    sys.path[:] = [place for place in sys.path if place in before]
    found: Callable[..., Any] = flash_attn_varlen_func
    return found


@cache
def _flash_attn_4() -> Kernel:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_directory(os.environ) / "flash_attn_4"))
    flash_attn_varlen_func = _import_flash_attn_4()

    def attend(q: Tensor, k: Tensor, v: Tensor, queries: Documents, keys: Documents, scale: float | None) -> Tensor:
        found: Any = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=queries.offsets,
            cu_seqlens_k=keys.offsets,
            max_seqlen_q=queries.longest,
            max_seqlen_k=keys.longest,
            softmax_scale=scale,
            causal=True,
        )
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return attend
