"""Attention within documents: packed rows without padding, and without a mask of [L, L]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torchtitan.protocols.module import Module

from forge.models.rows import Documents, RowBook


class DocumentAttention(Module):  # type: ignore[misc]
    """Causal attention in which a token sees its own document only.

    On CUDA in half precision one kernel takes the whole row. Elsewhere each document is attended to by itself, so that
    work grows with the squares of the documents' lengths and not with that of the row's.
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
        documents = self.book.find(attention_masks).documents
        if q_BLNH.is_cuda and q_BLNH.dtype in (torch.bfloat16, torch.float16):
            return _by_one_kernel(q_BLNH, k_BLNH, v_BLNH, documents, scale)
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
