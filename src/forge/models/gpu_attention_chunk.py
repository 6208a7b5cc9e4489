"""Attention over one chunk of a paged cache, for the programs of `gpu_attention_program`."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def merge(top, total, acc, next_top, next_total, next_acc):
    """Two parts of a softmax as one. What is fused is written out, so that every caller rounds alike.

    Merged into an empty part (-inf, 0, 0) a part keeps its bits.
    """
    higher = tl.maximum(top, next_top)
    keep = tl.exp2(top - higher)
    add = tl.exp2(next_top - higher)
    total = tl.fma(total, keep, next_total * add)
    acc = tl.fma(acc, keep[:, None], next_acc * add[:, None])
    return higher, total, acc


@triton.jit
def _unpack(pairs):
    """The first and the second number of pairs of 8-bit numbers (e4m3), as float16, each divided by 256.

    Their bits are put where float16 has sign, exponent and mantissa; the exponents' biases differ by 8.
    """
    first = ((pairs << 8) & -32768) | ((pairs << 7) & 0x3F80)
    second = (pairs & -32768) | ((pairs >> 1) & 0x3F80)
    return first.to(tl.float16, bitcast=True), second.to(tl.float16, bitcast=True)


@triton.jit
def _attend_pairs(
    query,
    k_head,
    v_head,
    pages,
    begin,
    end,
    scale,
    cache_page,
    cache_row,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `_attend_numbers`, over a cache of 8-bit numbers that is read as pairs of them.

    Matrix units take operands of 16 bits from shared memory in either order, operands of 8 bits byte by byte. So a pair
    stays one number until it is in registers; even and odd dimensions are computed apart.
    """
    dims = tl.arange(0, DIMS // 2)
    lanes = tl.arange(0, BLOCK)
    q_even, q_odd = tl.split(tl.reshape(query, (ROWS, DIMS // 2, 2)))
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    even = tl.zeros((ROWS, DIMS // 2), tl.float32)
    odd = tl.zeros((ROWS, DIMS // 2), tl.float32)
    scale = scale * 256.0
    coming = tl.load(pages + (begin + lanes) // PAGE, mask=begin + lanes < end, other=0)
    for start in range(begin, end, BLOCK):
        keys = start + lanes
        seen = keys < end
        page = coming.to(tl.int64)
        coming = tl.load(pages + (keys + BLOCK) // PAGE, mask=keys + BLOCK < end, other=0)
        place = (page * cache_page + (keys % PAGE) * cache_row)[:, None] + dims[None, :]
        k_even, k_odd = _unpack(tl.load(k_head + place, mask=seen[:, None], other=0))
        v_even, v_odd = _unpack(tl.load(v_head + place, mask=seen[:, None], other=0))
        score = tl.dot(q_even, tl.trans(k_even))
        score = tl.dot(q_odd, tl.trans(k_odd), score) * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        keep = tl.exp2(top - higher)
        p = tl.exp2(score - higher[:, None])
        total = tl.fma(total, keep, tl.sum(p, 1))
        p = p.to(tl.float16)
        even = tl.dot(p, v_even, even * keep[:, None])
        odd = tl.dot(p, v_odd, odd * keep[:, None])
        top = higher
    return top, total, tl.reshape(tl.join(even, odd), (ROWS, DIMS)) * 256.0


@triton.jit
def _attend_numbers(
    query,
    k_head,
    v_head,
    pages,
    begin,
    end,
    scale,
    cache_page,
    cache_row,
    head_dim,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The softmax of ROWS queries over the keys from begin to end, not yet divided by its sum.

    Every block has at least one key, so `top` is finite after the first. `scale` contains log2(e). Keys and values
    past the end are never read, whatever the memory holds. The numbers of the next block's pages are loaded one turn
    ahead: loaded in the same turn they would take half of the pipeline's stages.
    """
    dims = tl.arange(0, DIMS)
    lanes = tl.arange(0, BLOCK)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    coming = tl.load(pages + (begin + lanes) // PAGE, mask=begin + lanes < end, other=0)
    for start in range(begin, end, BLOCK):
        keys = start + lanes
        seen = keys < end
        page = coming.to(tl.int64)
        coming = tl.load(pages + (keys + BLOCK) // PAGE, mask=keys + BLOCK < end, other=0)
        place = (page * cache_page + (keys % PAGE) * cache_row)[:, None] + dims[None, :]
        inside = seen[:, None]
        if not WHOLE:
            inside = inside & (dims[None, :] < head_dim)
        key = tl.load(k_head + place, mask=inside, other=0.0)
        value = tl.load(v_head + place, mask=inside, other=0.0)
        if key.dtype != query.dtype:  # 8-bit keys and values, which a query's precision holds exactly
            key = key.to(query.dtype)
            value = value.to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        keep = tl.exp2(top - higher)
        p = tl.exp2(score - higher[:, None])
        total = tl.fma(total, keep, tl.sum(p, 1))
        acc = tl.dot(p.to(value.dtype), value, acc * keep[:, None], input_precision="ieee")
        top = higher
    return top, total, acc


@triton.jit
def attend_chunk(
    query,
    k_head,
    v_head,
    pages,
    begin,
    end,
    scale,
    cache_page,
    cache_row,
    head_dim,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The softmax of ROWS queries over the keys from begin to end, not yet divided by its sum."""
    if PAIRS:
        top, total, acc = _attend_pairs(
            query, k_head, v_head, pages, begin, end, scale, cache_page, cache_row, ROWS, DIMS, PAGE, BLOCK
        )
    else:
        top, total, acc = _attend_numbers(
            query,
            k_head,
            v_head,
            pages,
            begin,
            end,
            scale,
            cache_page,
            cache_row,
            head_dim,
            ROWS,
            DIMS,
            PAGE,
            BLOCK,
            WHOLE,
        )
    return top, total, acc
