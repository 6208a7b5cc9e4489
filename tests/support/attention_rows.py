"""Rows for the attention of a CPU, random tensors for them, and their way through the layer and back."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.kernels.paged import shared_places
from forge.models.attention import DocumentAttention
from forge.models.rows import Documents, RowTask, Sharing


def row_of(lengths: tuple[int, ...], prefixes: tuple[int, ...] = (), *, num_padding: int = 0) -> RowTask:
    """Make a row; its `Sharing` has the places in the form that kernels for whole documents take."""
    documents, nothing = Documents.of(lengths, num_padding=num_padding), torch.zeros(0, dtype=torch.int64)
    if not any(prefixes):
        return RowTask(documents, nothing[None], nothing, nothing)
    places, own = shared_places(lengths, prefixes)
    padding = torch.arange(num_padding)
    sharing = Sharing.of(
        documents,
        prefixes,
        places=torch.cat([places, padding + len(own)]),
        own=torch.cat([own, padding + len(places)]),
    )
    return RowTask(documents, nothing[None], nothing, nothing, sharing=sharing)


def tensors_of(num_places: int, shape: tuple[int, int, int], *, seed: int = 0) -> list[Tensor]:
    """Make queries, keys, values and a gradient of the outputs, all [1, L, heads, width]."""
    maker = torch.Generator().manual_seed(seed)
    heads, kv_heads, width = shape
    return [torch.randn(1, num_places, n, width, generator=maker) for n in (heads, kv_heads, kv_heads, heads)]


def through(row: RowTask, given: list[Tensor], *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the output, and the gradients of queries, keys and values."""
    layer = DocumentAttention(DocumentAttention.Config())
    leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in given[:3]]
    out = layer(*leaves, attention_masks=layer.row_registry.enter(row))
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3].to(dtype))]
