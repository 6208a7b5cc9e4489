"""Attention to what a cache of pages holds: the generator's in place of the trainer's, in the same model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
from torch import Tensor
from torchtitan.protocols.module import Module

from forge.kernels import cpu_attention
from forge.kernels.paged import PagedLayout
from forge.models import gpu_attention
from forge.models.gpu_attention import Extents
from forge.models.rows import RowBook


@dataclass(frozen=True, slots=True, eq=False)
class PagedRow:
    """One step of a generator, as the layers of the model see it. T tokens of S sequences lie in one row.

    Attributes:
        positions: int64 [1, T]: the place of each token in its sequence.
        index: int64 [R]: the tokens whose hidden states are asked for.
        layout: whose tokens they are, and where keys and values lie.
        is_decode: whether every sequence has exactly one token.
        extents: the lengths on the host, for steps on a GPU that are not decodes.
    """

    positions: Tensor
    index: Tensor
    layout: PagedLayout
    is_decode: bool = False
    extents: Extents | None = None


class PagedAttention(Module):  # type: ignore[misc]
    """Writes the keys and values of new tokens into the layer's pages and attends to all that its sequences have.

    `k_cache` and `v_cache` are given by whoever owns the memory; on a CPU in the layout of `cpu_attention`, on a GPU in
    that of `gpu_attention`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.book = RowBook()
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None

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
        """Attend to the cache. `attention_masks`, TorchTitan's name, holds the key of the row."""
        row: PagedRow = self.book.find(attention_masks)
        k_cache, v_cache = self.k_cache, self.v_cache
        assert k_cache is not None, "the cache has not been allocated"
        assert v_cache is not None
        q, k, v = q_BLNH[0], k_BLNH[0], v_BLNH[0]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        attend = _on_gpu if q.is_cuda else _on_cpu
        return attend(q, k, v, (k_cache, v_cache), row, scale).unsqueeze(0)


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], row: PagedRow, scale: float) -> Tensor:
    wide = torch.float32
    cpu_attention.write_kv(k.to(wide), v.to(wide), row.layout.slots, *caches)
    return cpu_attention.attend(q.to(wide), *caches, layout=row.layout, scale=scale).to(q.dtype)


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], row: PagedRow, scale: float) -> Tensor:
    layout = row.layout
    gpu_attention.write_kv(k, v, layout.slots, *caches)
    if row.is_decode:
        return gpu_attention.decode_attend(
            q,
            *caches,
            context_lens_S=layout.context_lens,
            table_SP=layout.table,
            scale=scale,
            shares=layout.shares,
        )
    assert row.extents is not None
    return gpu_attention.prefill_attend(q, *caches, layout=layout, extents=row.extents, scale=scale)
