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
from torchtitan.protocols.module import Module

from forge.kernels import cpu_attention, cpu_attention_backward
from forge.kernels.cpu_attention_backward import SharedLayout
from forge.kernels.cpu_linear import is_rowwise
from forge.models.flash_attention import Kernel, torch_kernel
from forge.models.gpu_attention import device_of, power_of_two
from forge.models.rows import Documents, RowRegistry, Sharing


class DocumentAttention(Module):  # type: ignore[misc]
    """Causal attention in which a token sees its own document only.

    On CUDA in half precision one kernel takes the whole row (`forge.models.flash_attention`; `kernel` says which). On a
    CPU in float32 one takes it too, and what a token gets has the same bits in any row and in a generator's steps
    (`forge.kernels.cpu_attention`). Elsewhere each document is attended to by itself. In all of them work grows with
    the squares of the documents' lengths and not with that of the row's.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.row_registry = RowRegistry()
        self.kernel: Kernel = torch_kernel

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
        """Attend within documents. `attention_masks`, TorchTitan's name, holds the key of the row."""
        row = self.row_registry.find(attention_masks)
        # Not x[0]: its gradient is a tensor of zeros into which the gradient is copied.
        q_LNH, k_LNH, v_LNH = (each.squeeze(0) for each in (q_BLNH, k_BLNH, v_BLNH))
        if _goes_by_row(q_LNH):
            factor = q_LNH.shape[-1] ** -0.5 if scale is None else scale
            layout = _layout(row.documents.lengths, _prefixes(row.sharing))
            out: Tensor = _ByRow.apply(q_LNH, k_LNH, v_LNH, layout, factor)
            return out.unsqueeze(0)
        documents = row.documents
        if row.sharing is None:
            if _has_kernel(q_LNH):
                return self.kernel(q_LNH, k_LNH, v_LNH, documents, documents, scale).unsqueeze(0)
            return _by_document(q_BLNH, k_BLNH, v_BLNH, documents, scale)
        k_ENH, v_ENH = (expand_shared(each, row.sharing) for each in (k_LNH, v_LNH))
        if _has_kernel(q_LNH):
            return self.kernel(q_LNH, k_ENH, v_ENH, row.sharing.queries, documents, scale).unsqueeze(0)
        q, k, v = (each.unsqueeze(0) for each in (expand_shared(q_LNH, row.sharing), k_ENH, v_ENH))
        return _by_document(q, k, v, documents, scale).index_select(1, row.sharing.own)


def _goes_by_row(q: Tensor) -> bool:
    return (
        is_rowwise(q)
        and cpu_attention.takes(q.shape[-1])
        and cpu_attention.library() is not None
        and cpu_attention_backward.library() is not None
    )


def _prefixes(sharing: Sharing | None) -> tuple[int, ...]:
    return () if sharing is None else sharing.prefixes


def _has_kernel(q: Tensor) -> bool:
    return bool(q.is_cuda and q.dtype in (torch.bfloat16, torch.float16))


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
    """Attend to padding: each token sees itself alone.

    The result is `v`, but queries and keys must get a gradient too, of 0: in a row without samples nothing else would
    give them one, and FSDP sums over ranks only what has a gradient, so that ranks would disagree about what they sum.
    """
    query, key, value = (tensor.transpose(0, 1).transpose(1, 2) for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(query, key, value, scale=scale)
    return out.transpose(1, 2).transpose(0, 1)


def expand_shared(values_LKD: Tensor, sharing: Sharing) -> Tensor:
    """Return the values of whole documents [E, K, D] from those of a row [L, K, D].

    The gradient of a place is the sum over its copies, added up in float32 in a fixed order: the same bits every time,
    which the gradient of `index_select` on a GPU has not.
    """
    found: Tensor = _Copied.apply(values_LKD, sharing)
    return found


class _Copied(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, values_LKD: Tensor, sharing: Sharing) -> Tensor:
        ctx.sharing = sharing
        return values_LKD.index_select(0, sharing.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_EKD: Tensor) -> tuple[Tensor, None]:
        return sum_shared(grad_EKD, ctx.sharing), None


def sum_shared(values_EKD: Tensor, sharing: Sharing) -> Tensor:
    """Return the sum of the values of each place's copies [L, K, D]."""
    values_EKD = values_EKD.contiguous()
    num_places, shape = sharing.own.shape[0], values_EKD.shape[1:]
    if values_EKD.is_cuda and values_EKD.dtype != torch.float64:
        from forge.models.gpu_layer_program import sum_shared as program

        tokens, starts = sharing.copies
        sums = values_EKD.new_empty(num_places, *shape)
        width = shape.numel()
        with device_of(values_EKD):
            program[(num_places,)](values_EKD, tokens, starts, sums, width, WIDTH=power_of_two(width), num_warps=4)
        return sums
    wide = torch.promote_types(values_EKD.dtype, torch.float32)
    total = torch.zeros(num_places, *shape, dtype=wide, device=values_EKD.device)
    return total.index_add_(0, sharing.places, values_EKD.to(wide)).to(values_EKD.dtype)


_layout = lru_cache(maxsize=32)(SharedLayout.of)  # every layer of a model asks for the same


class _ByRow(torch.autograd.Function):  # type: ignore[misc]
    """The kernel that generators use, over a row's keys and values in pages of their own, and its gradient.

    A token that several documents begin with is a query once, and a key and a value of each of them. Padding tokens see
    themselves alone, so they get their values; their queries and keys get a gradient of 0.
    """

    @staticmethod
    def forward(ctx: Any, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, layout: SharedLayout, scale: float) -> Tensor:
        end, group = layout.num_places, q_LHD.shape[1] // k_LKD.shape[1]
        q_LHD, k_LKD, v_LKD = (_dense(tensor) for tensor in (q_LHD, k_LKD, v_LKD))
        out, lse = torch.empty(q_LHD.shape), torch.empty(end, q_LHD.shape[1])
        if end > 0:
            caches = cpu_attention.new_cache(layout.num_pages, num_kv_heads=k_LKD.shape[1], width=k_LKD.shape[2])
            cpu_attention.write_kv(k_LKD[:end], v_LKD[:end], layout.paged.slots, *caches, sources_T=layout.sources)
            cpu_attention.attend(q_LHD[:end], *caches, layout=layout.paged, scale=scale, out=out[:end], lse=lse)
        if end < q_LHD.shape[0]:
            out[end:] = v_LKD[end:].repeat_interleave(group, dim=1)
        ctx.save_for_backward(q_LHD, k_LKD, v_LKD, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_LHD: Tensor) -> tuple[Tensor | None, ...]:
        q_LHD, k_LKD, v_LKD, out, lse = ctx.saved_tensors
        end, num_padding = ctx.layout.num_places, q_LHD.shape[0] - ctx.layout.num_places
        grads = cpu_attention_backward.differentiate(
            grad_LHD[:end],
            (q_LHD[:end], k_LKD[:end], v_LKD[:end]),
            (out[:end], lse),
            layout=ctx.layout,
            scale=ctx.scale,
        )
        if num_padding:
            of_values = grad_LHD[end:].unflatten(1, (k_LKD.shape[1], -1)).sum(2)
            zeros = (tensor.new_zeros(num_padding, *tensor.shape[1:]) for tensor in (q_LHD, k_LKD))
            padding = (*zeros, of_values)
            grads = tuple(torch.cat(both) for both in zip(grads, padding, strict=True))
        return (*grads, None, None)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
