"""The program that a GPU runs for `device_kernel`. Imported only where there is one: it needs Triton."""

# mypy: ignore-errors
# ruff: noqa: SIM108 - what is compiled away must not be evaluated
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
    FULL: tl.constexpr,
    CAST: tl.constexpr,
    PER: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy and digest a group of blocks; see `device_kernel.COLUMNS` for what describes one.

    FULL blocks have all their words: without a mask four of them are loaded at once, which makes the difference between
    0.66 and 0.97 of the speed of a plain copy. CAST reads two float32 for each word of two bfloat16, rounded to the
    nearest even, with one quiet NaN for all.
    """
    entry = blocks + tl.program_id(0).to(tl.int64) * (PER * 7)
    slot = tl.load(entry + 5)
    lanes = tl.arange(0, WORDS)
    total = tl.zeros((WORDS,), dtype=tl.int64)
    if FULL and DIGEST:
        weight = tl.load(weights + lanes).to(tl.uint32, bitcast=True).to(tl.int64)
    for _ in tl.static_range(PER):
        src = (tl.load(sources + tl.load(entry)) + tl.load(entry + 1)).to(tl.pointer_type(tl.int32))
        if ALIGNED:
            src = tl.multiple_of(src, 16)
        if not FULL:
            size = tl.load(entry + 4)
            mask = lanes < (size & 0xFFFFFFFF).to(tl.int32)
        if CAST:
            halves = tl.arange(0, 2)[None, :]
            places = src + (lanes[:, None] * 2 + halves)
            if FULL:
                wide = tl.load(places)
            else:
                wide = tl.load(places, mask=mask[:, None], other=0)
            bits = wide.to(tl.uint32, bitcast=True)
            is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
            narrow = tl.where(is_nan, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint32)
            value = tl.sum(narrow << (16 * halves).to(tl.uint32), axis=1).to(tl.int32, bitcast=True)
        elif FULL:
            value = tl.load(src + lanes)
        else:
            value = tl.load(src + lanes, mask=mask, other=0)
        if COPY:
            dst = (tl.load(targets + tl.load(entry + 2)) + tl.load(entry + 3)).to(tl.pointer_type(tl.int32))
            if ALIGNED:
                dst = tl.multiple_of(dst, 16)
            if FULL:
                tl.store(dst + lanes, value)
            else:
                tl.store(dst + lanes, value, mask=mask)
        if DIGEST:
            if not FULL:
                place = weights + (size >> 32).to(tl.int32)
                weight = tl.load(place + lanes, mask=mask, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
            total += value.to(tl.uint32, bitcast=True).to(tl.int64) * (weight * tl.load(entry + 6))
        entry += 7
    if DIGEST:
        tl.atomic_add(sums + slot, tl.sum(total, axis=0), sem="relaxed")
