"""Attention over paged keys and values on a CPU, in float32, whose results do not depend on the batch.

Trainer and generator share it, and that is what makes their logprobs equal bit for bit: what a query row gets depends
on the row, its keys and its values alone. It does not depend on how many rows or sequences are computed at once, on
how a sequence was cut into prefill chunks and decode steps, on where its pages lie, or on the number of threads.

Caches are made of pages of 16 tokens: keys [pages, Hkv, D, 16], so that the keys of a page are one vector for each
dimension, and values [pages, Hkv, 16, D]. A cache need not be cleared: what was not written is not looked at. The work
is done in C that is compiled at first use. Without a compiler, or with `FORGE_NATIVE=0`, torch does it
(`attend_pages`); results then do not depend on the batch either, but may differ in the last bits
between a prefill and a decode step.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from forge.errors import ModelError
from forge.kernels import native_build
from forge.kernels.paged import PAGE_TOKENS, PagedLayout

MAX_WIDTH: Final = 256
WIDTH_MULTIPLE: Final = 8
KERNEL: Final = native_build.Kernel(
    Path(__file__).with_name("cpu_attention.c"),
    without="attention on a CPU is slower, and logprobs of trainer and generator differ in the last bits",
    libraries=("-lm",),
)


class Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k_cache", "v_cache", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("query_starts", "context_lens", "table")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "out_token", "out_head", "lse_token", "lse_head")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_sequences", "table_width", "num_pages")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "width")),
        ("scale", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class Writing(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v", "k_cache", "v_cache", "slots")),
        *((name, ctypes.c_int64) for name in ("k_token", "k_head", "v_token", "v_head")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_slots", "kv_heads", "width")),
        ("sources", ctypes.c_void_p),
        ("num_sources", ctypes.c_int64),
    )


def build(flag_sets: tuple[tuple[str, ...], ...] = native_build.EXACT_FLAG_SETS) -> ctypes.CDLL | None:
    """Load the kernel as these flags compile it; None where it cannot be built."""
    return native_build.load(KERNEL, ["forge_attend", "forge_write"], flag_sets=flag_sets)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernel of this process, compiled if it is not in the cache; None where torch computes."""
    return build()


def takes(width: int) -> bool:
    """Return whether heads of this width can be attended to here."""
    return 0 < width <= MAX_WIDTH and width % WIDTH_MULTIPLE == 0


def new_cache(num_pages: int, *, num_kv_heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Return a cache of keys and one of values. Their memory is not cleared."""
    keys = torch.empty(num_pages, num_kv_heads, width, PAGE_TOKENS, dtype=torch.float32)
    return keys, torch.empty(num_pages, num_kv_heads, PAGE_TOKENS, width, dtype=torch.float32)


def write_kv(
    k_RHD: Tensor, v_RHD: Tensor, slots_T: Tensor, k_cache: Tensor, v_cache: Tensor, *, sources_T: Tensor | None = None
) -> None:
    """Put each token's key and value [Hkv, D] into the cache, where its slot says; a negative slot is skipped.

    `sources_T`, int64, says which row of `k_RHD` and `v_RHD` each token has; without it there is a row for each token.
    Two tokens with one slot leave the later one's there. If a slot lies beyond the cache, or a source is no row,
    nothing is written.
    """
    _check_caches(k_cache, v_cache)
    num_pages, kv_heads, width, _ = k_cache.shape
    num_tokens, num_rows = slots_T.shape[0], slots_T.shape[0] if sources_T is None else k_RHD.shape[0]
    shape = (num_rows, kv_heads, width)
    k_RHD, v_RHD = _heads("k_RHD", k_RHD, shape), _heads("v_RHD", v_RHD, shape)
    _check("slots_T", slots_T, (num_tokens,), torch.int64)
    if sources_T is not None:
        _check("sources_T", sources_T, (num_tokens,), torch.int64)
    native = library()
    if native is None:
        _write_by_torch((k_RHD, v_RHD), slots_T, (k_cache, v_cache), sources_T)
        return
    job = Writing(
        *(tensor.data_ptr() for tensor in (k_RHD, v_RHD, k_cache, v_cache, slots_T)),
        *k_RHD.stride()[:2],
        *v_RHD.stride()[:2],
        *(num_tokens, num_pages * PAGE_TOKENS, kv_heads, width),
        None if sources_T is None else sources_T.data_ptr(),
        num_rows,
    )
    status = native.forge_write(ctypes.addressof(job))
    if status == 2 and sources_T is not None:
        raise _bad_source(sources_T, num_rows)
    if status:
        raise _bad_slot(slots_T, num_pages)


def _write_by_torch(
    kv: tuple[Tensor, Tensor], slots_T: Tensor, caches: tuple[Tensor, Tensor], sources_T: Tensor | None
) -> None:
    num_pages, num_rows = caches[0].shape[0], kv[0].shape[0]
    if slots_T.numel() and int(slots_T.max()) >= num_pages * PAGE_TOKENS:
        raise _bad_slot(slots_T, num_pages)
    if sources_T is not None:
        if bool(((sources_T < 0) | (sources_T >= num_rows)).any()):
            raise _bad_source(sources_T, num_rows)
        kv = kv[0].index_select(0, sources_T), kv[1].index_select(0, sources_T)
    _write_pages(*kv, slots_T, *caches)


def attend(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    layout: PagedLayout,
    scale: float,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """Compute causal attention of each query row to what its sequence has in the cache; returns [T, H, D].

    Args:
        q_THD: float32; H is a multiple of the cache's heads, and consecutive query heads share one of those. D is a
            multiple of 8, up to 256. Any strides, if the last is 1.
        layout: which rows and pages belong together. Its `slots` are not looked at: call `write_kv` before.
        scale: what scores are multiplied by.
        out: where the result goes, [T, H, D], of any strides if the last is 1.
        lse: if given, [T, H] of any strides: gets the logarithm of each row's sum of exp(scaled score).
        num_threads: at most so many threads of torch's own pool; None for torch.get_num_threads().
    """
    _check_caches(k_cache, v_cache)
    num_tokens, heads = q_THD.shape[0], q_THD.shape[1]
    num_pages, kv_heads, width, _ = k_cache.shape
    q_THD = _heads("q_THD", q_THD, (num_tokens, heads, width))
    if heads % kv_heads:
        raise _refusal("q_THD", heads, f"a multiple of the cache's {kv_heads} heads")
    out = torch.empty(num_tokens, heads, width) if out is None else out
    _check("out", out, (num_tokens, heads, width), torch.float32, strides=True)
    if lse is not None:
        _check("lse", lse, (num_tokens, heads), torch.float32, strides=True)
    _check_layout(layout)
    native = library()
    if native is None:
        return _attend_by_torch(q_THD, (k_cache, v_cache), layout, scale, out, lse)
    job = Attention(
        *(tensor.data_ptr() for tensor in (q_THD, k_cache, v_cache, out)),
        None if lse is None else lse.data_ptr(),
        *(tensor.data_ptr() for tensor in (layout.query_starts, layout.context_lens, layout.table)),
        *q_THD.stride()[:2],
        *out.stride()[:2],
        *((0, 0) if lse is None else lse.stride()),
        *(num_tokens, layout.num_sequences, layout.table.shape[1], num_pages),
        *(heads, kv_heads, width),
        scale,
        torch.get_num_threads() if num_threads is None else num_threads,
    )
    status = native.forge_attend(ctypes.addressof(job))
    if status == 1:
        raise _bad_layout(layout, num_tokens, num_pages)
    if status == 2:
        raise MemoryError("there is no memory for the scores of one block of attention")
    return out


def _attend_by_torch(
    q: Tensor, caches: tuple[Tensor, Tensor], layout: PagedLayout, scale: float, out: Tensor, lse: Tensor | None
) -> Tensor:
    problem = _find_problem(layout, q.shape[0], caches[0].shape[0])
    if problem is not None:
        raise _refusal(*problem)
    lse = torch.empty(q.shape[:2]) if lse is None else lse
    attend_pages(q, *caches, layout=layout, scale=scale, out=out, lse=lse)
    return out


def _write_pages(k_THD: Tensor, v_THD: Tensor, slots_T: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Put each token's key and value where its slot says."""
    kept = slots_T >= 0
    slots = slots_T[kept]
    pages, places = slots // PAGE_TOKENS, slots % PAGE_TOKENS
    k_cache[pages, :, :, places] = k_THD[kept]
    v_cache[pages, :, places] = v_THD[kept]


def attend_pages(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, *, layout: PagedLayout, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Fill `out` [T, H, D] and `lse` [T, H] without the kernel: slower, and right to about 1e-6.

    Each sequence is attended to by itself, so what a sequence gets does not depend on the others; but a token may get
    other last bits in a prefill than in a decode step.
    """
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


def _heads(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    _check(name, tensor, shape, torch.float32, strides=True)
    return tensor.detach()


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, strides: bool = False) -> None:
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        raise _refusal(name, f"{tensor.dtype} on {tensor.device}", f"{dtype} on the CPU")
    if tensor.shape != shape:
        raise _refusal(name, tuple(tensor.shape), f"the shape {list(shape)}")
    is_dense = tensor.is_contiguous() or (strides and (len(shape) < 3 or tensor.stride(-1) == 1))
    if not is_dense:
        raise _refusal(name, tensor.stride(), "a last dimension without gaps" if strides else "contiguous")


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.dim() != 4 or k_cache.shape[3] != PAGE_TOKENS:
        raise _refusal("k_cache", tuple(k_cache.shape), f"[pages, kv heads, width, {PAGE_TOKENS}]")
    num_pages, kv_heads, width, _ = k_cache.shape
    if not takes(width):
        raise _refusal("k_cache", width, f"a width of heads that is a multiple of {WIDTH_MULTIPLE}, up to {MAX_WIDTH}")
    _check("k_cache", k_cache, tuple(k_cache.shape), torch.float32)
    _check("v_cache", v_cache, (num_pages, kv_heads, PAGE_TOKENS, width), torch.float32)


def _check_layout(layout: PagedLayout) -> None:
    count = layout.num_sequences
    _check("layout.query_starts", layout.query_starts, (count + 1,), torch.int32)
    _check("layout.context_lens", layout.context_lens, (count,), torch.int32)
    _check("layout.table", layout.table, (count, layout.table.shape[-1]), torch.int32)


def _refusal(path: str, value: object, rule: str) -> ModelError:
    return ModelError(
        "the tensors do not fit the attention kernel",
        path=path,
        value=value,
        rule=rule,
        repair="build the tensors as forge.kernels.paged and forge.kernels.cpu_attention describe them",
    )


def _bad_slot(slots: Tensor, num_pages: int) -> ModelError:
    place = int((slots >= num_pages * PAGE_TOKENS).nonzero()[0])
    return _refusal(f"slots_T[{place}]", int(slots[place]), f"below {num_pages * PAGE_TOKENS}, the places of the cache")


def _bad_source(sources: Tensor, num_rows: int) -> ModelError:
    place = int(((sources < 0) | (sources >= num_rows)).nonzero()[0])
    return _refusal(f"sources_T[{place}]", int(sources[place]), f"a row of the keys and values, below {num_rows}")


def _bad_layout(layout: PagedLayout, num_tokens: int, num_pages: int) -> ModelError:
    problem = _find_problem(layout, num_tokens, num_pages)
    assert problem is not None, "the kernel refused a layout in which nothing is wrong"
    return _refusal(*problem)


def _find_problem(layout: PagedLayout, num_tokens: int, num_pages: int) -> tuple[str, object, str] | None:
    """Return the first thing that is wrong with a layout: path, value and rule."""
    starts, contexts = layout.query_starts.tolist(), layout.context_lens.tolist()
    if starts[0] != 0 or starts[-1] != num_tokens:
        return "layout.query_starts", [starts[0], starts[-1]], f"from 0 to {num_tokens}, the number of query rows"
    room = layout.table.shape[1] * PAGE_TOKENS
    for index, context in enumerate(contexts):
        rows = starts[index + 1] - starts[index]
        if rows < 0:
            return f"layout.query_starts[{index + 1}]", starts[index + 1], "not below the one before"
        if not rows <= context <= room:
            rule = f"at least the sequence's {rows} rows, and at most {room}, what its pages hold"
            return f"layout.context_lens[{index}]", context, rule
        pages = layout.table[index, : -(-context // PAGE_TOKENS)].tolist() if rows else []
        for place, page in enumerate(pages):
            if not 0 <= page < num_pages:
                return f"layout.table[{index}, {place}]", page, f"a page of the cache, below {num_pages}"
    return None
