"""The GPU programs of single layers: rotary embeddings, norms, gates, sums. Imported only with a GPU (Triton)."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _rotate_heads(x, out, x_head, num_heads, half, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr):
    """The heads of one token, first half against second."""
    heads = tl.arange(0, HEADS)[:, None].to(tl.int64)
    dims = tl.arange(0, HALF)[None, :]
    inside = (heads < num_heads) & (dims < half)
    first = tl.load(x + heads * x_head + dims, mask=inside).to(tl.float32)
    second = tl.load(x + heads * x_head + half + dims, mask=inside).to(tl.float32)
    place = out + heads * (2 * half) + dims
    dtype = out.dtype.element_ty
    tl.store(place, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(place + half, (second * cos + first * sin).to(dtype), mask=inside)


@triton.jit
def rotate(
    q,
    k,
    table,
    positions,
    q_out,
    k_out,
    q_token,
    q_head,
    k_token,
    k_head,
    position_step,
    num_positions,
    num_q_heads,
    num_k_heads,
    half,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One token: all its query and key heads, rotated to its position. A row of the table is cos, cos, sin, sin."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token * position_step)
    dims = tl.arange(0, HALF)[None, :]
    known = dims < tl.where((position < 0) | (position >= num_positions), 0, half)
    row = table + position * (4 * half)
    cos = tl.load(row + dims, mask=known, other=float("nan"))
    sin = tl.load(row + 2 * half + dims, mask=known, other=float("nan"))
    q_row, k_row = q_out + token * num_q_heads * (2 * half), k_out + token * num_k_heads * (2 * half)
    _rotate_heads(q + token * q_token, q_row, q_head, num_q_heads, half, cos, sin, Q_HEADS, HALF)
    _rotate_heads(k + token * k_token, k_row, k_head, num_k_heads, half, cos, sin, K_HEADS, HALF)


@triton.jit
def normalize(x, weight, out, num_rows, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """ROWS rows, each divided by the root of the mean of its squares and multiplied by the weight, in float32."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, WIDTH)[None, :]
    inside = (rows < num_rows) & (dims < width)
    place = rows * width + dims
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + dims, mask=dims < width, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(out + place, (value * scale[:, None] * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate(gates, ups, out, total, BLOCK: tl.constexpr):
    """BLOCK numbers: silu(gate), rounded to the dtype as torch's operation rounds it, times up."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    dtype = out.dtype.element_ty
    x = tl.load(gates + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + place, mask=inside, other=0.0).to(tl.float32)
    activated = (x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)
    tl.store(out + place, (activated * up).to(dtype), mask=inside)


@triton.jit
def add_into(sums, values, total, BLOCK: tl.constexpr):
    """BLOCK numbers of a sum in float32, and what is added to them in another precision."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    value = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + place, tl.load(sums + place, mask=inside, other=0.0) + value, mask=inside)


@triton.jit
def sum_shared(values, copies, starts, sums, width, WIDTH: tl.constexpr):
    """One place: its copies' rows of `width` values, added in order in float32."""
    place = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts + place)
    end = tl.load(starts + place + 1)
    dims = tl.arange(0, WIDTH)
    inside = dims < width
    total = tl.zeros((WIDTH,), tl.float32)
    for number in range(begin, end):
        row = tl.load(copies + number)
        total += tl.load(values + row * width + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + place * width + dims, total.to(sums.dtype.element_ty), mask=inside)
