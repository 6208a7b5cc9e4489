"""Attention over a paged cache on a GPU.

`k_cache` and `v_cache` are both [pages, Hkv, 16, D], of one dtype, with the same strides; `PagedLayout` says what slots
and tables are. T counts rows of a packed line, S sequences, P the columns of the table of pages.

Nothing here waits for the GPU or looks at what is in its memory, so all of it can be captured in a CUDA graph, after
one call outside of a capture with the same shapes (which compiles). Memory is taken from torch's allocator, which
within a capture is the graph's own pool: results stay where they are from one replay to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import e, log2
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.errors import ModelError
from forge.models.paged import PAGE_TOKENS, PagedLayout

_LOG2_E: Final = log2(e)
_HALF: Final = (torch.bfloat16, torch.float16)
_COMBINE_STAGES: Final = 4


@dataclass(frozen=True, slots=True)
class Tuning:
    """How `decode_attend` uses the GPU.

    A sequence's bits depend on `block`, `chunk` and `num_warps`, and on nothing that another sequence has a part in;
    `programs` says only who computes what.

    Attributes:
        block: keys that are loaded and multiplied at once, a power of two.
        chunk: keys whose softmax is summed up before it is merged with that of the keys before; a multiple of block.
        num_warps, num_stages: what Triton means by them.
        programs: as many as fill the GPU. A launch with fewer pairs of sequence and key head shares out their chunks.
    """

    block: int = 32
    chunk: int = 1024
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 1024


_TUNING: Final = Tuning()
_TUNING_FLOAT32: Final = Tuning(num_stages=2)


@dataclass(frozen=True)
class Extents:
    """The lengths that `prefill_attend` must know on the host, so that it need not ask the GPU.

    Attributes:
        query_lens: rows of each sequence in the packed line.
        context_lens: keys of each sequence, those rows included.
        context_starts: int32 [S+1] on the GPU, where each sequence's keys begin when all are laid end to end.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    context_starts: Tensor

    @classmethod
    def of(cls, query_lens: Sequence[int], context_lens: Sequence[int], *, device: torch.device | str) -> Extents:
        """From the lengths. The copy to the GPU does not wait for it."""
        starts = torch.tensor([0, *accumulate(context_lens)], dtype=torch.int32)
        if torch.device(device).type == "cuda":
            starts = starts.pin_memory()
        return cls(tuple(query_lens), tuple(context_lens), starts.to(device, non_blocking=True))

    @cached_property
    def max_query(self) -> int:
        return max(self.query_lens, default=0)

    @cached_property
    def max_context(self) -> int:
        return max(self.context_lens, default=0)

    @cached_property
    def num_keys(self) -> int:
        return sum(self.context_lens)


def write_kv(k_THD: Tensor, v_THD: Tensor, slots_T: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Put each token's keys and values into its slot (int64). A negative slot is skipped: padding of a CUDA graph."""
    _check(k_THD, k_cache, v_cache, name="k_THD")
    _check(v_THD, k_cache, v_cache, name="v_THD")
    num_tokens, num_heads, head_dim = k_THD.shape
    for name, tensor in (("v_THD", v_THD), ("slots_T", slots_T)):
        if len(tensor) != num_tokens:
            raise _refusal(name, tensor, f"{num_tokens} rows, as k_THD has", "give each token its key, value and slot")
    if not num_tokens:
        return
    from forge.models.gpu_program import write_kv as program

    with device_of(k_THD):
        program[(num_tokens,)](
            k_THD,
            v_THD,
            slots_T,
            k_cache,
            v_cache,
            *k_THD.stride()[:2],
            *v_THD.stride()[:2],
            *k_cache.stride()[:3],
            num_heads,
            head_dim,
            PAGE=PAGE_TOKENS,
            HEADS=power_of_two(num_heads),
            DIMS=power_of_two(head_dim),
            num_warps=4,
        )


def decode_attend(
    q_SHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    context_lens_S: Tensor,
    table_SP: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """One query row for each sequence, which sees the first `context_lens_S` (int32) keys of its pages: [S, H, D].

    The table (int32) has room for every sequence's keys; what it holds beyond them is not read. A sequence without keys
    (padding of a CUDA graph) gets zeros. The bits of a sequence do not depend on what else is in the batch, on the
    table's width or on where its pages lie. Where there are few sequences, several programs share the chunks of one;
    the parts take about 4 * S * H * D * (keys that the table has room for) / 1024 bytes while it runs.
    """
    tuning = _TUNING_FLOAT32 if k_cache.dtype == torch.float32 else _TUNING
    _check(q_SHD, k_cache, v_cache, name="q_SHD")
    if table_SP.shape[1] > 1 and table_SP.stride(1) != 1:
        raise _refusal("table_SP", table_SP, "contiguous in the last dimension", "call contiguous() on it, once")
    out = torch.empty_like(q_SHD, memory_format=torch.contiguous_format) if out is None else out
    if len(q_SHD):
        attend_tuned(q_SHD, k_cache, v_cache, out, pages=(context_lens_S, table_SP), scale=scale, tuning=tuning)
    return out


def attend_tuned(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    *,
    pages: tuple[Tensor, Tensor],
    scale: float,
    tuning: Tuning,
) -> None:
    """`decode_attend` with another tuning, for measuring. `pages` is (context_lens_S, table_SP)."""
    from forge.models.gpu_program import attend_decode

    context_lens, table = pages
    num_sequences, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    num_chunks = max(1, -(-table.shape[1] * PAGE_TOKENS // tuning.chunk))
    num_pairs = num_sequences * num_kv_heads
    num_splits = min(num_chunks, max(1, -(-tuning.programs // num_pairs)))
    is_solo = num_splits == 1
    parts, tops, totals = (out, out, out) if is_solo else _scratch(q, num_chunks)
    dims = max(16, power_of_two(head_dim))
    with device_of(q):
        attend_decode[(num_pairs, num_splits)](
            q,
            k_cache,
            v_cache,
            table,
            context_lens,
            out,
            parts,
            tops,
            totals,
            scale * _LOG2_E,
            *q.stride()[:2],
            *k_cache.stride()[:3],
            table.stride(0),
            *out.stride()[:2],
            num_kv_heads,
            num_chunks,
            num_splits,
            head_dim,
            GROUP=group,
            ROWS=max(16, power_of_two(group)),
            DIMS=dims,
            PAGE=PAGE_TOKENS,
            BLOCK=tuning.block,
            CHUNK=tuning.chunk,
            SOLO=is_solo,
            WHOLE=dims == head_dim,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            enable_fp_fusion=False,
        )
        if not is_solo:
            _combine(context_lens, (parts, tops, totals), out, chunk=tuning.chunk)


def _scratch(q: Tensor, num_chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    num_sequences, num_heads, head_dim = q.shape
    shape = (num_sequences, num_heads, num_chunks)
    parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    tops, totals = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    return parts, tops, totals


def _combine(context_lens: Tensor, scratch: tuple[Tensor, Tensor, Tensor], out: Tensor, *, chunk: int) -> None:
    from forge.models.gpu_program import combine

    num_sequences, num_heads, num_chunks, head_dim = scratch[0].shape
    combine[(num_sequences * num_heads,)](
        context_lens,
        *scratch,
        out,
        *out.stride()[:2],
        num_heads,
        num_chunks,
        head_dim,
        DIMS=power_of_two(head_dim),
        CHUNK=chunk,
        STAGES=_COMBINE_STAGES,
        num_warps=1,
        enable_fp_fusion=False,
    )


def prefill_attend(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, *, layout: PagedLayout, extents: Extents, scale: float
) -> Tensor:
    """Any number of query rows for each sequence, as `PagedLayout` has them: [T, H, D].

    The keys and values must be in the cache already. They are laid end to end, and one kernel takes the whole line; in
    float32 each sequence is attended to by itself. Rows past those of the last sequence are undefined.
    """
    _check(q_THD, k_cache, v_cache, name="q_THD")
    if not extents.num_keys:
        return torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    k, v = gather_kv(k_cache, v_cache, layout=layout, extents=extents)
    if not q_THD.is_cuda or q_THD.dtype not in _HALF:
        return _by_sequence(q_THD, k, v, extents, scale)
    from torch.nn.attention.varlen import varlen_attn

    result: Tensor = varlen_attn(
        q_THD,
        k,
        v,
        layout.query_starts,
        extents.context_starts,
        extents.max_query,
        extents.max_context,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=q_THD.shape[1] != k.shape[1],
    )
    return result


def gather_kv(k_cache: Tensor, v_cache: Tensor, *, layout: PagedLayout, extents: Extents) -> tuple[Tensor, Tensor]:
    """The keys and values of all sequences, end to end: two of [sum of context_lens, Hkv, D]."""
    from forge.models.gpu_program import gather_kv as program

    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    k, v = (cache.new_empty(extents.num_keys, num_kv_heads, head_dim) for cache in (k_cache, v_cache))
    if not extents.num_keys:
        return k, v
    num_pages = -(-extents.max_context // PAGE_TOKENS)
    with device_of(k_cache):
        program[(num_pages, num_kv_heads, len(extents.context_lens))](
            k_cache,
            v_cache,
            layout.table,
            layout.context_lens,
            extents.context_starts,
            k,
            v,
            *k_cache.stride()[:3],
            layout.table.stride(0),
            k.stride(0),
            head_dim,
            PAGE=PAGE_TOKENS,
            DIMS=power_of_two(head_dim),
            num_warps=4,
        )
    return k, v


def _by_sequence(q: Tensor, k: Tensor, v: Tensor, extents: Extents, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    row = start = 0
    for num_rows, length in zip(extents.query_lens, extents.context_lens, strict=True):
        query = q[row : row + num_rows].transpose(0, 1)
        key, value = (t[start : start + length].repeat_interleave(groups, dim=1).transpose(0, 1) for t in (k, v))
        mask = torch.ones(num_rows, length, dtype=torch.bool, device=q.device).tril(length - num_rows)
        part = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, scale=scale)
        out[row : row + num_rows] = part[0].transpose(0, 1)
        row, start = row + num_rows, start + length
    return out


def _check(rows: Tensor, k_cache: Tensor, v_cache: Tensor, *, name: str) -> None:
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride() or k_cache.dtype != v_cache.dtype:
        raise _refusal("v_cache", v_cache, "shape, strides and dtype of k_cache", "make both caches alike")
    if k_cache.dim() != 4 or k_cache.shape[2] != PAGE_TOKENS or k_cache.stride(3) != 1:
        rule = f"[pages, Hkv, {PAGE_TOKENS}, D], contiguous in D"
        raise _refusal("k_cache", k_cache, rule, f"make pages of {PAGE_TOKENS} tokens")
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    if rows.dim() != 3 or rows.shape[2] != head_dim or rows.stride(2) != 1:
        rule = f"[rows, heads, {head_dim}], contiguous in the last dimension"
        raise _refusal(name, rows, rule, "reshape it to rows, heads and the head's dimension")
    is_query = name in ("q_SHD", "q_THD")
    if rows.shape[1] % num_kv_heads or (rows.shape[1] != num_kv_heads and not is_query):
        rule = f"{num_kv_heads} heads, as the cache has" + (", or a multiple" if is_query else "")
        raise _refusal(name, rows, rule, "make the cache for this model's key heads")
    if rows.dtype != k_cache.dtype:
        raise _refusal(name, rows, f"of the cache's dtype, {k_cache.dtype}", "convert one to the other's dtype")


def _refusal(name: str, tensor: Tensor, rule: str, repair: str) -> ModelError:
    return ModelError(
        f"{name} does not fit the paged cache",
        path=name,
        value=f"{tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}",
        rule=rule,
        repair=repair,
    )


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, whichever the tensors are on; its interpreter takes tensors of the CPU."""
    context: AbstractContextManager[object] = torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
    return context


def power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()
