"""The program that a GPU runs for `device_kernel`. Imported only where there is one: it needs Triton."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def work(
    blocks,
    sources,
    targets,
    weights,
    sums,
    COPY: tl.constexpr,
    DIGEST: tl.constexpr,
    ALIGNED: tl.constexpr,
    PER: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy and digest a group of blocks; see `device_kernel.COLUMNS` for what describes one."""
    entry = blocks + tl.program_id(0).to(tl.int64) * (PER * 7)
    slot = tl.load(entry + 5)
    lanes = tl.arange(0, WORDS)
    total = tl.zeros((), dtype=tl.int64)
    for _ in range(PER):
        source = tl.load(sources + tl.load(entry)) + tl.load(entry + 1)
        size = tl.load(entry + 4)
        mask = lanes < (size & 0xFFFFFFFF).to(tl.int32)
        src = source.to(tl.pointer_type(tl.int32))
        if ALIGNED:
            src = tl.multiple_of(src, 16)
        value = tl.load(src + lanes, mask=mask, other=0)
        if COPY:
            target = tl.load(targets + tl.load(entry + 2)) + tl.load(entry + 3)
            dst = target.to(tl.pointer_type(tl.int32))
            if ALIGNED:
                dst = tl.multiple_of(dst, 16)
            tl.store(dst + lanes, value, mask=mask)
        if DIGEST:
            weight = tl.load(weights + (size >> 32).to(tl.int32) + lanes, mask=mask, other=0)
            word = value.to(tl.uint32, bitcast=True).to(tl.int64)
            total += tl.sum(word * weight.to(tl.uint32, bitcast=True).to(tl.int64), axis=0) * tl.load(entry + 6)
        entry += 7
    if DIGEST:
        tl.atomic_add(sums + slot, total, sem="relaxed")
