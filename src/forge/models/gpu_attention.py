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
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forge.errors import ModelError
from forge.kernels.paged import PAGE_TOKENS, PagedLayout, find_shares
from forge.models.flash_attention import torch_kernel
from forge.models.rows import Documents

_LOG2_E: Final = log2(e)
_HALF: Final = (torch.bfloat16, torch.float16)
NARROW: Final = (torch.float8_e4m3fn,)
"""Precisions of a cache that is narrower than queries. What is read from it is computed with in float16."""
_COMBINE_STAGES: Final = 4
_CHUNK: Final = 256
_ROWS: Final = 16


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
        merge_stages: how many parts of shared chunks are on their way at once when a sequence takes them up.
        part_bytes: the most that parts may take on their way from one program to another. What finds no room is not
            shared out, nor shared.
    """

    block: int = 32
    chunk: int = _CHUNK
    num_warps: int = 2
    num_stages: int = 3
    programs: int = 1024
    merge_stages: int = 2
    part_bytes: int = 128 << 20


_TUNING: Final = Tuning()
_TUNING_NARROW: Final = Tuning(num_warps=1)
_TUNING_FLOAT32: Final = Tuning(num_warps=4, num_stages=2)


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
        """Make it from the lengths. The copy to the GPU does not wait for it."""
        starts = torch.tensor([0, *accumulate(context_lens)], dtype=torch.int32)
        if torch.device(device).type == "cuda":
            starts = starts.pin_memory()
        return cls(tuple(query_lens), tuple(context_lens), starts.to(device, non_blocking=True))

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
    from forge.models.gpu_attention_program import write_kv as program

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
    shares: Tensor | None = None,
) -> Tensor:
    """Attend with one query row per sequence to the first `context_lens_S` (int32) keys of its pages: [S, H, D].

    The table (int32) has room for every sequence's keys; what it holds beyond them is not read. A sequence without keys
    (padding of a CUDA graph) gets zeros. The bits of a sequence do not depend on what else is in the batch, on the
    table's width, on where its pages lie or on `shares`. Where there are few sequences, several programs share the
    chunks of one. Parts of results take up to 128 MiB while it runs, and no more than about 4 * S * H * D * (keys that
    the table has room for) / 256 bytes.

    `shares` is what `decode_shares` found in the same table and lengths, on the GPU: keys that neighbours have in
    common are then read once for all of them. Rows that belong to sequences without keys may hold anything, so a CUDA
    graph may read a buffer of which only the beginning is overwritten.
    """
    tuning = _TUNING_NARROW if k_cache.dtype in NARROW else _TUNING
    tuning = _TUNING_FLOAT32 if k_cache.dtype == torch.float32 else tuning
    _check(q_SHD, k_cache, v_cache, name="q_SHD")
    if table_SP.shape[1] > 1 and table_SP.stride(1) != 1:
        raise _refusal("table_SP", table_SP, "contiguous in the last dimension", "call contiguous() on it, once")
    if shares is not None:
        _check_shares(shares, num_sequences=len(q_SHD))
    out = torch.empty_like(q_SHD, memory_format=torch.contiguous_format) if out is None else out
    if len(q_SHD):
        pages = (context_lens_S, table_SP, shares)
        attend_tuned(q_SHD, k_cache, v_cache, out, pages=pages, scale=scale, tuning=tuning)
    return out


def decode_shares(table_SP: np.ndarray, context_lens_S: np.ndarray, *, num_heads: int, num_kv_heads: int) -> np.ndarray:
    """Call `find_shares` with the chunks of `decode_attend` and the most members that it takes at once: [S + 1, 4].

    It is computed on the host, of the same rows and lengths that the step gets, and is the same for all its layers.
    """
    group = num_heads // num_kv_heads
    return find_shares(table_SP, context_lens_S, chunk=_CHUNK, max_members=_rows_of(group) // group)


def attend_tuned(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    *,
    pages: tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None],
    scale: float,
    tuning: Tuning,
) -> None:
    """Run `decode_attend` with another tuning, to measure. `pages` is (context_lens_S, table_SP, shares or nothing)."""
    from forge.models.gpu_attention_program import attend_decode, attend_shared

    context_lens, table, shares = (*pages, None)[:3]
    num_sequences, num_kv_heads, head_dim = len(q), k_cache.shape[1], q.shape[2]
    num_chunks = max(1, -(-table.shape[1] * PAGE_TOKENS // tuning.chunk))
    num_pairs = num_sequences * num_kv_heads
    num_splits, num_chunks = share_out(num_pairs, num_chunks, chunk_bytes=4 * q.numel(), tuning=tuning)
    is_solo, is_shared = num_splits == 1, shares is not None and num_sequences > 1
    parts = (out, out, out) if is_solo and not is_shared else _scratch(q, num_chunks)
    seen = (context_lens, shares if is_shared else context_lens)
    strides: tuple[int, ...] = (*q.stride()[:2], *k_cache.stride()[:3], table.stride(0))
    options = _options(q, k_cache, tuning)
    with device_of(q):
        if is_shared:
            most = num_sequences // 2 * num_kv_heads * num_chunks
            sizes = (*strides, num_kv_heads, num_chunks, head_dim)
            attend_shared[(min(most, tuning.programs),)](
                q, k_cache, v_cache, table, *seen, *parts, scale * _LOG2_E, *sizes, **options
            )
        options |= {"SOLO": is_solo, "SHARED": is_shared, "STAGES": tuning.merge_stages}
        sizes = (*strides, *out.stride()[:2], num_kv_heads, num_chunks, num_splits, head_dim)
        attend_decode[(num_pairs, num_splits)](
            q, k_cache, v_cache, table, *seen, out, *parts, scale * _LOG2_E, *sizes, **options
        )
        if not is_solo:
            _combine(seen, parts, out, chunk=tuning.chunk, is_shared=is_shared)


def share_out(num_pairs: int, num_chunks: int, *, chunk_bytes: int, tuning: Tuning) -> tuple[int, int]:
    """Return how many programs compute the chunks of a pair, and of how many of its chunks the parts have room.

    There are several programs only if all parts have room: nothing else puts them together.
    """
    num_splits = min(num_chunks, max(1, -(-tuning.programs // num_pairs)))
    room = max(1, tuning.part_bytes // chunk_bytes)
    return (num_splits if room >= num_chunks else 1), min(room, num_chunks)


def _options(q: Tensor, k_cache: Tensor, tuning: Tuning) -> dict[str, Any]:
    """Return the options of both programs: if they differed, a shared chunk might have other bits."""
    head_dim = q.shape[2]
    group, dims = q.shape[1] // k_cache.shape[1], max(16, power_of_two(head_dim))
    return {
        "GROUP": group,
        "ROWS": _rows_of(group),
        "DIMS": dims,
        "PAGE": PAGE_TOKENS,
        "BLOCK": tuning.block,
        "CHUNK": tuning.chunk,
        "WHOLE": dims == head_dim,
        "NARROW": k_cache.dtype in NARROW,
        "PACKED": q.is_cuda,  # Triton's interpreter knows no instructions
        "num_warps": tuning.num_warps,
        "num_stages": tuning.num_stages,
        "enable_fp_fusion": False,
    }


def _rows_of(group: int) -> int:
    """Return the rows of a product: always as many, since their number decides the order of a row's sums."""
    return max(_ROWS, power_of_two(group))


def _scratch(q: Tensor, num_chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    num_sequences, num_heads, head_dim = q.shape
    shape = (num_sequences, num_heads, num_chunks)
    parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    tops, totals = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    return parts, tops, totals


def _combine(
    seen: tuple[Tensor, Tensor],
    scratch: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    *,
    chunk: int,
    is_shared: bool,
) -> None:
    from forge.models.gpu_attention_program import combine

    num_sequences, num_heads, num_chunks, head_dim = scratch[0].shape
    combine[(num_sequences * num_heads,)](
        *seen,
        *scratch,
        out,
        *out.stride()[:2],
        num_heads,
        num_chunks,
        head_dim,
        DIMS=power_of_two(head_dim),
        CHUNK=chunk,
        SHARED=is_shared,
        STAGES=_COMBINE_STAGES,
        num_warps=1,
        enable_fp_fusion=False,
    )


def prefill_attend(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, *, layout: PagedLayout, extents: Extents, scale: float
) -> Tensor:
    """Attend with any number of query rows per sequence, as `PagedLayout` has them: [T, H, D].

    The keys and values must be in the cache already. They are laid end to end, and one kernel takes the whole line; in
    float32 each sequence is attended to by itself. Rows past those of the last sequence are undefined.
    """
    _check(q_THD, k_cache, v_cache, name="q_THD")
    if not extents.num_keys:
        return torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    k, v = gather_kv(k_cache, v_cache, layout=layout, extents=extents, dtype=q_THD.dtype)
    if not q_THD.is_cuda or q_THD.dtype not in _HALF:
        return _by_sequence(q_THD, k, v, extents, scale)
    queries = Documents(extents.query_lens, 0, layout.query_starts)
    keys = Documents(extents.context_lens, 0, extents.context_starts)
    return torch_kernel(q_THD, k, v, queries, keys, scale)


def gather_kv(
    k_cache: Tensor, v_cache: Tensor, *, layout: PagedLayout, extents: Extents, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all sequences, end to end: two of [sum of context_lens, Hkv, D]."""
    from forge.models.gpu_attention_program import gather_kv as program

    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    shape = (extents.num_keys, num_kv_heads, head_dim)
    k, v = (cache.new_empty(shape, dtype=dtype) for cache in (k_cache, v_cache))
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
    if rows.dtype != k_cache.dtype and not (k_cache.dtype in NARROW and rows.dtype in _HALF):
        raise _refusal(name, rows, f"of the cache's dtype, {k_cache.dtype}", "convert one to the other's dtype")


def _check_shares(shares: Tensor, *, num_sequences: int) -> None:
    if shares.dtype != torch.int32 or shares.shape != (num_sequences + 1, 4) or not shares.is_contiguous():
        rule = f"int32 [{num_sequences + 1}, 4], contiguous: a row more than sequences"
        raise _refusal("shares", shares, rule, "give what decode_shares finds in the table and lengths of this step")


def _refusal(name: str, tensor: Tensor, rule: str, repair: str) -> ModelError:
    return ModelError(
        f"{name} does not fit the paged cache",
        path=name,
        value=f"{tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}",
        rule=rule,
        repair=repair,
    )


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current, where Triton launches; its interpreter takes tensors of the CPU."""
    context: AbstractContextManager[object] = torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
    return context


def power_of_two(number: int) -> int:
    """Return the smallest that is not less."""
    return 1 << (number - 1).bit_length()
