"""The GPU programs of a fused decode step. Imported only with a GPU (Triton)."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def add_and_normalize(x, update, weight, out, width, eps, WIDTH: tl.constexpr):
    """One row: the update added to x in place, rounded to its dtype; that sum, normalized, goes to out."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    inside = dims < width
    place = row * width + dims
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(update + place, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(x.dtype.element_ty)
    tl.store(x + place, rounded, mask=inside)
    value = rounded.to(tl.float32)
    factor = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out + place, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotated_heads(
    x, x_head, weight, eps, num_heads, half, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr
):
    """The heads of one token, normalized if asked for and rotated: both halves [HEADS, HALF], in float32."""
    dtype = x.dtype.element_ty
    heads = tl.arange(0, HEADS)[:, None].to(tl.int64)
    dims = tl.arange(0, HALF)[None, :]
    inside = (heads < num_heads) & (dims < half)
    first = tl.load(x + heads * x_head + dims, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + heads * x_head + half + dims, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        of_first = tl.load(weight + dims, mask=dims < half, other=0.0).to(tl.float32)
        of_second = tl.load(weight + half + dims, mask=dims < half, other=0.0).to(tl.float32)
        first = (first * scale * of_first).to(dtype).to(tl.float32)
        second = (second * scale * of_second).to(dtype).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def place_heads(
    q,
    k,
    v,
    q_weight,
    k_weight,
    table,
    positions,
    slots,
    q_out,
    k_cache,
    v_cache,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    cache_page,
    cache_head,
    cache_row,
    num_positions,
    num_q_heads,
    num_k_heads,
    half,
    eps,
    PAGE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
):
    """One token: queries normalized and rotated to q_out; keys likewise, and values, to their slot of the cache.

    A row of the table is cos, cos, sin, sin. A negative slot is skipped: padding of a CUDA graph. A position that is
    not in the table makes NaN, which the sampler reports.
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    dims = tl.arange(0, HALF)[None, :]
    known = dims < tl.where((position < 0) | (position >= num_positions), 0, half)
    row = table + position * (4 * half)
    cos = tl.load(row + dims, mask=known, other=float("nan"))
    sin = tl.load(row + 2 * half + dims, mask=known, other=float("nan"))
    slot = tl.load(slots + token)

    heads = tl.arange(0, Q_HEADS)[:, None].to(tl.int64)
    inside = (heads < num_q_heads) & (dims < half)
    first, second = _rotated_heads(
        q + token * q_token, q_head, q_weight, eps, num_q_heads, half, cos, sin, Q_HEADS, HALF, NORMED
    )
    target = q_out + (token * num_q_heads + heads) * (2 * half) + dims
    tl.store(target, first, mask=inside)
    tl.store(target + half, second, mask=inside)
    if slot < 0:
        return
    heads = tl.arange(0, K_HEADS)[:, None].to(tl.int64)
    inside = (heads < num_k_heads) & (dims < half)
    place = (slot // PAGE) * cache_page + (slot % PAGE) * cache_row + heads * cache_head + dims
    dtype = k_cache.dtype.element_ty
    first, second = _rotated_heads(
        k + token * k_token, k_head, k_weight, eps, num_k_heads, half, cos, sin, K_HEADS, HALF, NORMED
    )
    tl.store(k_cache + place, first.to(dtype), mask=inside)
    tl.store(k_cache + place + half, second.to(dtype), mask=inside)
    source = v + token * v_token + heads * v_head + dims
    tl.store(v_cache + place, tl.load(source, mask=inside).to(dtype), mask=inside)
    tl.store(v_cache + place + half, tl.load(source + half, mask=inside).to(dtype), mask=inside)


@triton.jit
def gate_rows(gates, ups, out, width, gate_row, up_row, BLOCK: tl.constexpr):
    """BLOCK numbers of one row: silu(gate), rounded to the dtype as torch's operation rounds it, times up."""
    row = tl.program_id(1).to(tl.int64)
    dims = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < width
    dtype = out.dtype.element_ty
    x = tl.load(gates + row * gate_row + dims, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + row * up_row + dims, mask=inside, other=0.0).to(tl.float32)
    activated = (x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)
    tl.store(out + row * width + dims, (activated * up).to(dtype), mask=inside)
