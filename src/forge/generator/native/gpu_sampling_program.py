"""The program that a GPU runs for `gpu_sampling`. Imported only where there is one: it needs Triton."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _scaled_block(base, start, num_columns, scale, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    x = tl.load(base + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
    return tl.where(columns < num_columns, x * scale, float("-inf"))


@triton.jit
def _units(x, highest, UNITS: tl.constexpr):
    """Probabilities relative to the highest, as whole numbers: their sums are exact in any order."""
    p = tl.exp(x - highest)
    return (tl.where(p > 0, p, 0.0) * UNITS).to(tl.int64)  # NaN is not above 0


@triton.jit
def sample(
    logits,
    stride,
    scales,
    uniforms,
    token_ids,
    logprobs,
    num_columns,
    SCALED: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One row of logits: the token at which the running sum of probabilities exceeds a uniform number, its logprob.

    The row is read twice, the second time mostly from cache, and one block of it a third time.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    scale = 1.0
    if SCALED:
        scale = tl.load(scales + row)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_columns, BLOCK):
        x = _scaled_block(base, start, num_columns, scale, BLOCK)
        higher = tl.maximum(top, x)
        # Lanes that have seen nothing hold -inf, and -inf - -inf is not a number.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - safe) + tl.exp(x - safe)
        top = higher
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    places = tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.int64)
    for start in range(0, num_columns, BLOCK):
        units = _units(_scaled_block(base, start, num_columns, scale, BLOCK), highest, UNITS)
        sums = tl.where(places == start // BLOCK, tl.sum(units, 0), sums)
    whole = tl.sum(sums, 0)
    wanted = (tl.load(uniforms + row) * whole.to(tl.float64)).to(tl.int64)
    wanted = tl.maximum(tl.minimum(wanted, whole - 1), 0)
    block = tl.sum((tl.cumsum(sums, 0) <= wanted).to(tl.int32), 0)
    before = tl.sum(tl.where(places < block, sums, 0), 0)
    units = _units(_scaled_block(base, block * BLOCK, num_columns, scale, BLOCK), highest, UNITS)
    inside = tl.sum((tl.cumsum(units, 0) <= wanted - before).to(tl.int32), 0)
    token = tl.minimum(block * BLOCK + inside, num_columns - 1)
    picked = tl.load(base + token).to(tl.float32) * scale
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(logprobs + row, picked - lse)
