"""Marks: by which a tensor that comes again is recognised, so that what was found out about it need not be again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Mark = tuple[Any, ...]
"""The address first, then what else must be the same. An address of None: look again every time."""

_PLAIN = (Tensor, torch.nn.Parameter)


def mark_of(tensor: Tensor) -> Mark:
    """Equal as long as a tensor is the same memory, looked at in the same way."""
    if type(tensor) in _PLAIN:
        if not _is_memory(tensor):
            return None, object()
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    inner: Any = getattr(tensor, "_local_tensor", None)
    if type(inner) in _PLAIN and _is_memory(inner):
        return inner.data_ptr(), inner.dtype, inner.shape, inner.stride(), id(tensor._spec)
    return None, object()


def _is_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements are what lies at its address. Looking at one of which they are not says so."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and not tensor.is_conj() and not tensor.is_neg()


def kept_for(tensor: Tensor) -> Any:
    """What must stay alive for a mark to mean the same."""
    return getattr(tensor, "_spec", None) if type(tensor) not in _PLAIN else None


def addresses(marks: Sequence[Mark]) -> list[int] | None:
    """Where the tensors are; None if one has to be looked at."""
    found = [mark[0] for mark in marks]
    return None if None in found else found
