"""Let what the backward pass needs wait in the host's memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

SMALLEST_BYTES = 2**20
"""Smaller tensors stay where they are: moving them costs more than they take."""

_Kept: TypeAlias = Any
"""A tensor that stayed, or the device that it came from with its copy."""


def keep_activations_on_host() -> AbstractContextManager[Any]:
    """While this holds, large tensors that autograd saves are kept in host memory; weights stay where they are."""
    return cast(AbstractContextManager[Any], torch.autograd.graph.saved_tensors_hooks(_to_host, _back))


def _to_host(tensor: Tensor) -> _Kept:
    is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    if is_weight or tensor.nbytes < SMALLEST_BYTES or type(tensor) is not Tensor:
        return tensor
    kept = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor.device, kept.copy_(tensor, non_blocking=True)


def _back(kept: _Kept) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, tensor = kept
    return tensor.to(device, non_blocking=True) if device.type == "cuda" else tensor
