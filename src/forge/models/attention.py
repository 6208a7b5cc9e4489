"""Attention within documents: packed rows without padding, and without a mask of [L, L]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from torchtitan.protocols.module import Module

from forge.models import cpu_attention
from forge.models.paged import PagedLayout, num_pages_of
from forge.models.rows import Documents, RowBook
from forge.runtime.row_floor import is_rowwise


class DocumentAttention(Module):  # type: ignore[misc]
    """Causal attention in which a token sees its own document only.

    On CUDA in half precision one kernel takes the whole row. On a CPU in float32 one takes it too, and what a token
    gets has the same bits in any row and in a generator's steps (`forge.models.cpu_attention`). Elsewhere each document
    is attended to by itself. In all of them work grows with the squares of the documents' lengths and not with that of
    the row's.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.book = RowBook()

    @torch.compiler.disable
    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        """`attention_masks` is TorchTitan's word for what is handed to the layers: here the key of the row."""
        row = self.book.find(attention_masks)
        if row.sharing is None:
            return _attend(q_BLNH, k_BLNH, v_BLNH, row.documents, scale)
        q_BENH, k_BENH, v_BENH = (each.index_select(1, row.sharing.places) for each in (q_BLNH, k_BLNH, v_BLNH))
        return _attend(q_BENH, k_BENH, v_BENH, row.documents, scale).index_select(1, row.sharing.own)


def _attend(q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, documents: Documents, scale: float | None) -> Tensor:
    """Of whole documents, by whatever suits device and precision."""
    if q_BLNH.is_cuda and q_BLNH.dtype in (torch.bfloat16, torch.float16):
        return _by_one_kernel(q_BLNH, k_BLNH, v_BLNH, documents, scale)
    if is_rowwise(q_BLNH) and cpu_attention.takes(q_BLNH.shape[-1]) and cpu_attention.library() is not None:
        factor = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        out: Tensor = _ByRow.apply(q_BLNH[0], k_BLNH[0], v_BLNH[0], documents, factor)
        return out.unsqueeze(0)
    return _by_document(q_BLNH, k_BLNH, v_BLNH, documents, scale)


def _by_one_kernel(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None) -> Tensor:
    out = varlen_attn(
        q[0],
        k[0],
        v[0],
        documents.offsets,
        documents.offsets,
        documents.longest,
        documents.longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.unsqueeze(0)


def _by_document(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = (tensor.repeat_interleave(groups, dim=2) for tensor in (k, v))
    sizes = (*documents.lengths, documents.num_padding) if documents.num_padding else documents.lengths
    parts: list[Tensor] = []
    for q_part, k_part, v_part in zip(*(tensor.split(sizes, dim=1) for tensor in (q, k, v)), strict=True):
        if len(parts) == len(documents.lengths):
            parts.append(_each_alone(q_part, k_part, v_part, scale))
            break
        query, key, value = (tensor.transpose(1, 2) for tensor in (q_part, k_part, v_part))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        parts.append(out.transpose(1, 2))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _each_alone(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Padding: each token sees itself alone.

    The result is `v`, but queries and keys must get a gradient too, of 0: in a row without samples nothing else would
    give them one, and FSDP sums over ranks only what has a gradient, so that ranks would disagree about what they sum.
    """
    query, key, value = (tensor.transpose(0, 1).transpose(1, 2) for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(query, key, value, scale=scale)
    return out.transpose(1, 2).transpose(0, 1)


_layout = lru_cache(maxsize=32)(PagedLayout.of_documents)  # every layer of a model asks for the same


class _ByRow(torch.autograd.Function):  # type: ignore[misc]
    """The kernel that generators use, over a row's keys and values in pages of their own; backward by document.

    Padding tokens see themselves alone, so they get their values; their queries and keys get a gradient of 0.
    """

    @staticmethod
    def forward(ctx: Any, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, documents: Documents, scale: float) -> Tensor:
        end, group = sum(documents.lengths), q_LHD.shape[1] // k_LKD.shape[1]
        q_LHD, k_LKD, v_LKD = (_dense(tensor) for tensor in (q_LHD, k_LKD, v_LKD))
        out, lse = torch.empty(q_LHD.shape), torch.empty(end, q_LHD.shape[1])
        if end > 0:
            layout = _layout(documents.lengths)
            num_pages = num_pages_of(documents.lengths)
            caches = cpu_attention.new_cache(num_pages, num_kv_heads=k_LKD.shape[1], width=k_LKD.shape[2])
            cpu_attention.write_kv(k_LKD[:end], v_LKD[:end], layout.slots, *caches)
            cpu_attention.attend(q_LHD[:end], *caches, layout=layout, scale=scale, out=out[:end], lse=lse)
        if documents.num_padding:
            out[end:] = v_LKD[end:].repeat_interleave(group, dim=1)
        ctx.save_for_backward(q_LHD, k_LKD, v_LKD, out, lse)
        ctx.documents, ctx.scale = documents, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_LHD: Tensor) -> tuple[Tensor | None, ...]:
        q_LHD, k_LKD, v_LKD, out, lse = ctx.saved_tensors
        kv_heads, start = k_LKD.shape[1], 0
        grads = tuple(torch.zeros_like(tensor) for tensor in (q_LHD, k_LKD, v_LKD))
        for length in ctx.documents.lengths:
            rows = slice(start, start + length)
            batch = (tensor[rows].transpose(0, 1)[None] for tensor in (grad_LHD, q_LHD, k_LKD, v_LKD, out))
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *batch, lse[rows].T[None], 0.0, True, scale=ctx.scale
            )
            for grad, part in zip(grads, found, strict=True):
                grad[rows] = part[0].transpose(0, 1)
            start += length
        if ctx.documents.num_padding:
            grads[2][start:] = grad_LHD[start:].unflatten(1, (kv_heads, -1)).sum(2)
        return (*grads, None, None)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
