"""Attention over paged keys and values without the compiled kernel: slower, and right to about 1e-6.

Each sequence is attended to by itself, so that what a sequence gets does not depend on the others; but a token may get
other last bits in a prefill than in a decode step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.models.paged import PAGE_TOKENS, PagedLayout


def write_pages(k_THD: Tensor, v_THD: Tensor, slots_T: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Put each token's key and value where its slot says."""
    kept = slots_T >= 0
    slots = slots_T[kept]
    pages, places = slots // PAGE_TOKENS, slots % PAGE_TOKENS
    k_cache[pages, :, :, places] = k_THD[kept]
    v_cache[pages, :, places] = v_THD[kept]


def attend_pages(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, *, layout: PagedLayout, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Fill `out` [T, H, D] and `lse` [T, H]."""
    starts, lengths = layout.query_starts.tolist(), layout.context_lens.tolist()
    group = q_THD.shape[1] // k_cache.shape[1]
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        if rows.start == rows.stop:
            continue
        pages = layout.table[sequence, : -(-length // PAGE_TOKENS)].long()
        k_HDC = k_cache[pages].permute(1, 2, 0, 3).flatten(2)[..., :length].repeat_interleave(group, dim=0)
        v_HCD = v_cache[pages].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, dim=0)
        num_rows = rows.stop - rows.start
        seen = torch.arange(length) <= torch.arange(length - num_rows, length)[:, None]
        scores = (q_THD[rows].transpose(0, 1) * scale) @ k_HDC
        scores = scores.masked_fill(~seen, -torch.inf)
        lse_HR = scores.logsumexp(-1)
        out[rows] = ((scores - lse_HR[..., None]).exp() @ v_HCD).transpose(0, 1)
        lse[rows] = lse_HR.T
