"""The program that a GPU runs for the output layer (`chunks`). It needs Triton."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def target_logprobs(
    logits,
    stride,
    targets,
    logprobs,
    lses,
    gradients,
    gradient_stride,
    num_columns,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of logits: its logsumexp, the logprob of its target, and with GRADIENT p - 1[target], which may take the
    logits' place.

    The row is read twice, the second time mostly from cache, and written once; nothing else is as long as a row.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + lanes
        x = tl.load(base + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # Lanes that saw nothing yet hold -inf, and -inf - -inf is NaN.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - safe) + tl.exp(x - safe)
        top = higher
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    target = tl.load(targets + row)
    is_valid = (target >= 0) & (target < num_columns)
    picked = tl.load(base + target, mask=is_valid, other=float("nan")).to(tl.float32)
    tl.store(logprobs + row, picked - lse)
    tl.store(lses + row, lse)
    if GRADIENT:
        place = gradients + row * gradient_stride
        for start in range(0, num_columns, BLOCK):
            columns = start + lanes
            inside = columns < num_columns
            x = tl.load(base + columns, mask=inside, other=float("-inf")).to(tl.float32)
            p = tl.exp(x - lse)
            p = tl.where(columns == target, p - 1.0, p)
            tl.store(place + columns, p.to(gradients.dtype.element_ty), mask=inside)
