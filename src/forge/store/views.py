"""Parts of memory as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from forge.store.layout import dtype_of


def piece_view(memory: Tensor, start: int, shape: Sequence[int], dtype: str) -> Tensor:
    """A piece of a segment as a tensor."""
    kind = dtype_of(dtype)
    return memory[start : start + math.prod(shape) * kind.itemsize].view(kind).view(tuple(shape))


def part_of(tensor: Tensor, at: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A rectangle of a tensor."""
    for dim, (start, extent) in enumerate(zip(at, shape, strict=True)):
        tensor = tensor.narrow(dim, start, extent)
    return tensor
