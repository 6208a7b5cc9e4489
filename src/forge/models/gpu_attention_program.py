"""The programs that a GPU runs for `gpu_attention`. Imported only where there is one: they need Triton."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def write_kv(
    k,
    v,
    slots,
    k_cache,
    v_cache,
    k_token,
    k_head,
    v_token,
    v_head,
    cache_page,
    cache_head,
    cache_row,
    num_heads,
    head_dim,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One token: all its heads, keys and values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads = tl.arange(0, HEADS)[:, None].to(tl.int64)
    dims = tl.arange(0, DIMS)[None, :]
    inside = (heads < num_heads) & (dims < head_dim)
    place = (slot // PAGE) * cache_page + (slot % PAGE) * cache_row + heads * cache_head + dims
    key = tl.load(k + token * k_token + heads * k_head + dims, mask=inside)
    value = tl.load(v + token * v_token + heads * v_head + dims, mask=inside)
    tl.store(k_cache + place, key.to(k_cache.dtype.element_ty), mask=inside)
    tl.store(v_cache + place, value.to(v_cache.dtype.element_ty), mask=inside)


@triton.jit
def gather_kv(
    k_cache,
    v_cache,
    table,
    context_lens,
    starts,
    k_out,
    v_out,
    cache_page,
    cache_head,
    cache_row,
    table_row,
    out_token,
    head_dim,
    PAGE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One page of one sequence, one head: its rows that are in the context, laid where the sequence's keys begin."""
    index = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    length = tl.load(context_lens + sequence)
    if index * PAGE >= length:
        return
    page = tl.load(table + sequence * table_row + index).to(tl.int64)
    first = tl.load(starts + sequence).to(tl.int64) + index * PAGE
    rows = tl.arange(0, PAGE)[:, None]
    dims = tl.arange(0, DIMS)[None, :]
    inside = (index * PAGE + rows < length) & (dims < head_dim)
    place = page * cache_page + head * cache_head + rows * cache_row + dims
    target = (first + rows) * out_token + head * head_dim + dims
    key = tl.load(k_cache + place, mask=inside)
    value = tl.load(v_cache + place, mask=inside)
    tl.store(k_out + target, key.to(k_out.dtype.element_ty), mask=inside)
    tl.store(v_out + target, value.to(v_out.dtype.element_ty), mask=inside)


@triton.jit
def _merge(top, total, acc, next_top, next_total, next_acc):
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
def _widened(values):
    """8-bit numbers in float16, which holds them exactly.

    The conversion is an instruction written out, with a side effect as far as the compiler knows: it would move a plain
    one behind the loads of a product's operands, which for values are then single bytes of shared memory.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r",
        [values.to(tl.uint8, bitcast=True)],
        dtype=tl.float16,
        is_pure=False,
        pack=4,
    )


@triton.jit
def _attend_chunk(
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
    PACKED: tl.constexpr,
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
            value = _widened(value) if PACKED else value.to(query.dtype)
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
def _num_shared(shares, sequence, length, num_chunks_max, CHUNK: tl.constexpr):
    """How many of a sequence's first chunks `attend_shared` computes; of those only that the sequence has in full."""
    told = tl.load(shares + (1 + sequence) * 4 + 3)
    return tl.minimum(tl.minimum(told, num_chunks_max), length // CHUNK)


@triton.jit
def attend_shared(
    q,
    k_cache,
    v_cache,
    table,
    context_lens,
    shares,
    parts,
    part_tops,
    part_totals,
    scale,
    q_row,
    q_head,
    cache_page,
    cache_head,
    cache_row,
    table_row,
    num_kv_heads,
    num_chunks_max,
    head_dim,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    NARROW: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Chunks that neighbouring sequences have in common, one key head at a time, each read once for all of them.

    The rows are the GROUP query heads of every member, one member after the other. The parts go where `attend_decode`
    or `combine` takes them up. How much work there is only the GPU's memory says: the programs go through it together.
    """
    num_chunks = tl.minimum(tl.load(shares + 1), num_chunks_max)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    for work in range(tl.program_id(0), tl.load(shares) * num_kv_heads * num_chunks, tl.num_programs(0)):
        chunk = work % num_chunks
        pair = work // num_chunks
        kv_head = pair % num_kv_heads
        item = shares + (1 + pair // num_kv_heads) * 4
        first = tl.load(item).to(tl.int64)
        num_rows = tl.load(item + 1) * GROUP
        is_shared = chunk < tl.load(item + 2)
        sequences = first + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        kept = rows < tl.where(is_shared, num_rows, 0)
        inside = kept[:, None] & (dims[None, :] < head_dim)
        place = sequences[:, None] * q_row + heads[:, None] * q_head + dims[None, :]
        query = tl.load(q + place, mask=inside, other=0.0)
        if NARROW:
            query = query.to(tl.float16)
        begin = chunk * CHUNK
        end = tl.where(is_shared, tl.minimum(begin + CHUNK, tl.load(context_lens + first)), begin)
        top, total, part = _attend_chunk(
            query,
            k_cache + kv_head.to(tl.int64) * cache_head,
            v_cache + kv_head.to(tl.int64) * cache_head,
            table + first * table_row,
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
            PACKED,
        )
        target = (sequences * (num_kv_heads * GROUP) + heads) * num_chunks_max + chunk
        tl.store(part_tops + target, top, mask=kept)
        tl.store(part_totals + target, total, mask=kept)
        tl.store(parts + target[:, None] * head_dim + dims[None, :], part, mask=inside)


@triton.jit
def attend_decode(
    q,
    k_cache,
    v_cache,
    table,
    context_lens,
    shares,
    out,
    parts,
    part_tops,
    part_totals,
    scale,
    q_row,
    q_head,
    cache_page,
    cache_head,
    cache_row,
    table_row,
    out_row,
    out_head,
    num_kv_heads,
    num_chunks_max,
    num_splits,
    head_dim,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SOLO: tl.constexpr,
    SHARED: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    NARROW: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One sequence, one key head with its GROUP query heads, and every num_splits-th chunk of the context.

    SOLO: this program has all chunks and merges them itself. Otherwise each chunk's part is left for `combine`, which
    merges them in the same order; only a sequence of one chunk is finished here. SHARED: the first chunks may have been
    computed by `attend_shared`.
    """
    pair = tl.program_id(0)
    split = tl.program_id(1)
    sequence = (pair // num_kv_heads).to(tl.int64)
    kv_head = pair % num_kv_heads
    length = tl.load(context_lens + sequence)
    num_chunks = (length + CHUNK - 1) // CHUNK
    num_shared = 0
    if SHARED:
        num_shared = _num_shared(shares, sequence, length, num_chunks_max, CHUNK)
    if split >= tl.maximum(num_chunks - num_shared, 1):
        return
    is_left = (num_chunks > 1) | (num_shared > 0)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    heads = kv_head * GROUP + rows
    inside = (rows[:, None] < GROUP) & (dims[None, :] < head_dim)
    query = tl.load(q + sequence * q_row + heads[:, None] * q_head + dims[None, :], mask=inside, other=0.0)
    if NARROW:
        query = query.to(tl.float16)
    k_head = k_cache + kv_head.to(tl.int64) * cache_head
    v_head = v_cache + kv_head.to(tl.int64) * cache_head
    pages = table + sequence * table_row
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    places = (sequence * (num_kv_heads * GROUP) + heads) * num_chunks_max
    if SOLO and SHARED:
        mine = rows < GROUP
        for chunk in tl.range(0, num_shared, num_stages=STAGES):
            place = places + chunk
            part_top = tl.load(part_tops + place, mask=mine, other=0.0)
            part_total = tl.load(part_totals + place, mask=mine, other=0.0)
            part = tl.load(parts + place[:, None] * head_dim + dims[None, :], mask=inside, other=0.0)
            top, total, acc = _merge(top, total, acc, part_top, part_total, part)
    for chunk in range(num_shared + split, num_chunks, num_splits):
        begin = chunk * CHUNK
        end = tl.minimum(begin + CHUNK, length)
        part_top, part_total, part = _attend_chunk(
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
            PACKED,
        )
        top, total, acc = _merge(top, total, acc, part_top, part_total, part)
        if not SOLO:
            place = places + chunk
            kept = rows < tl.where(is_left, GROUP, 0)
            tl.store(part_tops + place, part_top, mask=kept)
            tl.store(part_totals + place, part_total, mask=kept)
            tl.store(parts + place[:, None] * head_dim + dims[None, :], part, mask=kept[:, None] & inside)
    if not SOLO:
        inside = (rows < tl.where(is_left, 0, GROUP))[:, None] & inside
    result = acc * tl.div_rn(1.0, tl.where(total > 0, total, 1.0))[:, None]
    where = out + sequence * out_row + heads[:, None] * out_head + dims[None, :]
    tl.store(where, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine(
    context_lens,
    shares,
    parts,
    part_tops,
    part_totals,
    out,
    out_row,
    out_head,
    num_heads,
    num_chunks_max,
    head_dim,
    DIMS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One query head of one sequence that has several chunks, or a shared one: the parts, merged from first to last."""
    pair = tl.program_id(0)
    sequence = (pair // num_heads).to(tl.int64)
    head = pair % num_heads
    length = tl.load(context_lens + sequence)
    num_chunks = (length + CHUNK - 1) // CHUNK
    num_shared = 0
    if SHARED:
        num_shared = _num_shared(shares, sequence, length, num_chunks_max, CHUNK)
    if (num_chunks <= 1) & (num_shared == 0):
        return
    dims = tl.arange(0, DIMS)
    one = tl.arange(0, 1)
    inside = dims[None, :] < head_dim
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, DIMS), tl.float32)
    first = pair.to(tl.int64) * num_chunks_max
    for chunk in tl.range(0, num_chunks, num_stages=STAGES):
        place = first + chunk + one
        part = tl.load(parts + place[:, None] * head_dim + dims[None, :], mask=inside, other=0.0)
        part_top = tl.load(part_tops + place)
        part_total = tl.load(part_totals + place)
        top, total, acc = _merge(top, total, acc, part_top, part_total, part)
    result = acc * tl.div_rn(1.0, total)[:, None]
    where = out + sequence * out_row + head * out_head + dims[None, :]
    tl.store(where, result.to(out.dtype.element_ty), mask=inside)
