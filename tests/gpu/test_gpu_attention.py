"""The generator's attention on a GPU, against softmax(q k) v written out in float64.

Where there is no GPU but Triton is installed, `TRITON_INTERPRET=1` runs these in Triton's interpreter, on the CPU. It
multiplies no bfloat16, so float16 stands for it there.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from forge.kernels.paged import PagedLayout, find_shares
from forge.models import gpu_attention
from forge.models.gpu_attention import (
    Extents,
    Tuning,
    decode_attend,
    decode_shares,
    gather_kv,
    prefill_attend,
    write_kv,
)

ON_GPU = torch.cuda.is_available()
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if ON_GPU and not IN_INTERPRETER else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not (ON_GPU or IN_INTERPRETER), reason="no NVIDIA GPU is visible here"),
]
only_on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="only a real GPU has this")

LENGTHS = (0, 1, 15, 16, 17, 511, 512, 513, 1023, 1024, 1025, 2500)
SCALE = 0.13
CHUNK = Tuning().chunk
BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # on values of size 1


class Cache:
    """Sequences of given lengths in shuffled pages. All memory that belongs to no key is NaN.

    `taken` says how many of its first pages each sequence has from the one before it.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        *,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        width: int = 0,
        seed: int = 0,
        taken: tuple[int, ...] = (),
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        counts = [-(-length // 16) for length in lengths]
        width = max(width, *counts, 1)
        order = torch.randperm(sum(counts) + 3, generator=self.random)
        self.table = torch.full((len(lengths), width), 2**30, dtype=torch.int32)
        self.k = torch.full((len(order), num_kv_heads, 16, head_dim), float("nan"), dtype=dtype)
        self.v = self.k.clone()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        used = 0
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            num_taken = taken[row] if taken else 0
            pages = torch.cat([self.table[row - 1, :num_taken].long(), order[used : used + count - num_taken]])
            used += count - num_taken
            self.table[row, :count] = pages.int()
            places = torch.arange(length)
            for cache, store in ((self.k, self.keys), (self.v, self.values)):
                rows = torch.randn(length, num_kv_heads, head_dim, generator=self.random).to(dtype)
                if num_taken:
                    rows[: num_taken * 16] = store[-1][: num_taken * 16]
                cache[pages[places // 16], :, places % 16] = rows
                store.append(rows)
        self.k, self.v, self.table = self.k.to(DEVICE), self.v.to(DEVICE), self.table.to(DEVICE)
        self.context_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def queries(self, num_rows: int, group: int) -> Tensor:
        shape = (num_rows, self.k.shape[1] * group, self.k.shape[3])
        return torch.randn(shape, generator=self.random).to(self.k.dtype).to(DEVICE)

    def decode(self, q: Tensor, rows: slice = slice(None), *, out: Tensor | None = None) -> Tensor:
        return decode_attend(
            q[rows],
            self.k,
            self.v,
            context_lens_S=self.context_lens[rows],
            table_SP=self.table[rows],
            scale=SCALE,
            out=out,
        )

    def decode_tuned(self, q: Tensor, tuning: Tuning, shares: Tensor | None = None) -> Tensor:
        out, pages = torch.empty_like(q), (self.context_lens, self.table, shares)
        gpu_attention.attend_tuned(q, self.k, self.v, out, pages=pages, scale=SCALE, tuning=tuning)
        return out

    def shares(self, *, chunk: int, max_members: int) -> Tensor:
        arrays = self.table.cpu().numpy(), self.context_lens.cpu().numpy()
        return torch.from_numpy(find_shares(*arrays, chunk=chunk, max_members=max_members)).to(DEVICE)

    def lose_the_taken_pages_of(self, shares: Tensor, *, chunk: int) -> None:
        """From here on only the first sequence of an item says where the shared keys are: the others would read NaN."""
        for first, num_members, num_chunks in shares[1 : 1 + int(shares[0, 0]), :3].tolist():
            self.table[first + 1 : first + num_members, : num_chunks * chunk // 16] = self.nan_page()

    def nan_page(self) -> int:
        """A page that nobody has."""
        return int(self.k.isnan().flatten(1).all(1).nonzero()[0])


def attend_plainly(q: Tensor, keys: Tensor, values: Tensor, num_seen: int) -> Tensor:
    """One row [H, D] over the first keys [L, Hkv, D], in float64."""
    group = q.shape[0] // keys.shape[1]
    k, v = (rows[:num_seen].double().repeat_interleave(group, 1) for rows in (keys, values))
    weights = torch.softmax(torch.einsum("hd,lhd->hl", q.double().cpu(), k) * SCALE, 1)
    return torch.einsum("hl,lhd->hd", weights, v)


def expected_decode(cache: Cache, q: Tensor) -> Tensor:
    rows = [attend_plainly(q[s], cache.keys[s], cache.values[s], length) for s, length in enumerate(cache.lengths)]
    return torch.stack(rows)


def check(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.double().cpu(), expected, rtol=0, atol=BOUND[result.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_is_a_softmax_at_every_length(head_dim: int, dtype: torch.dtype) -> None:
    cache = Cache(LENGTHS, head_dim=head_dim, dtype=dtype)
    q = cache.queries(len(LENGTHS), 2)
    result = cache.decode(q)
    assert result.shape == q.shape
    assert result.dtype == dtype
    assert not result[0].any()
    check(result, expected_decode(cache, q))


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 80), (8, 128), (17, 64)])
def test_all_query_heads_of_a_key_head(group: int, head_dim: int) -> None:
    cache = Cache((5, 40, 530), num_kv_heads=2, head_dim=head_dim)
    q = cache.queries(3, group)
    check(cache.decode(q), expected_decode(cache, q))


def test_queries_and_results_may_have_strides() -> None:
    cache = Cache((5, 600, 20), num_kv_heads=2)
    wide = cache.queries(6, 4)
    q = wide[::2, ::2]
    room = torch.full((3, 4, 2, 64), 7.0, device=DEVICE)
    result = cache.decode(q, out=room[:, :, 1])
    assert result.data_ptr() == room[:, :, 1].data_ptr()
    check(result, expected_decode(cache, q))
    assert (room[:, :, 0] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_under_any_table(dtype: torch.dtype) -> None:
    lengths = (0, 3, CHUNK, CHUNK + 1, 4 * CHUNK + 76)
    cache = Cache(lengths, dtype=dtype)
    q = cache.queries(len(lengths), 2)
    together = cache.decode(q)
    wide = Cache(lengths, dtype=dtype, width=200)
    for name in ("k", "v"):
        getattr(wide, name).copy_(getattr(cache, name))
    wide.table[:, : cache.table.shape[1]] = cache.table
    assert torch.equal(wide.decode(q), together)
    for row, length in enumerate(lengths):
        alone = slice(row, row + 1)
        assert torch.equal(cache.decode(q, alone), together[alone])
        narrow = cache.table[alone, : max(1, -(-length // 16))]
        lens = cache.context_lens[alone]
        result = decode_attend(q[alone], cache.k, cache.v, context_lens_S=lens, table_SP=narrow, scale=SCALE)
        assert torch.equal(result, together[alone])


def narrowed(cache: Cache) -> None:
    """Make the cache one of 8 bits. What it is expected to hold is what 8 bits can."""
    for name in ("k", "v"):
        setattr(cache, name, getattr(cache, name).to(torch.float8_e4m3fn))
    for rows in (cache.keys, cache.values):
        rows[:] = [each.to(torch.float8_e4m3fn).to(each.dtype) for each in rows]


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_decode_and_prefill_read_keys_and_values_of_eight_bits(head_dim: int) -> None:
    lengths = (1, 17, 511, 1025)
    cache = Cache(lengths, head_dim=head_dim, dtype=HALF, taken=(0, 0, 1, 16))
    q = cache.queries(len(lengths), 2)
    narrowed(cache)
    expected = expected_decode(cache, q)
    check(cache.decode(q), expected)
    shares = cache.shares(chunk=64, max_members=4)
    assert int(shares[0, 0]) == 1
    shared = cache.decode_tuned(q, Tuning(block=32, chunk=64), shares)
    assert torch.equal(shared, cache.decode_tuned(q, Tuning(block=32, chunk=64)))
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    nowhere = torch.full((len(lengths),), -1, device=DEVICE)
    layout = PagedLayout(starts, cache.context_lens, cache.table, nowhere)
    extents = Extents.of((1,) * len(lengths), lengths, device=DEVICE)
    check(prefill_attend(q, cache.k, cache.v, layout=layout, extents=extents, scale=SCALE), expected)


@only_on_gpu
def test_keys_and_values_are_rounded_to_eight_bits_when_they_are_written() -> None:
    k, v = (torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(n)).to(DEVICE, HALF) for n in (0, 1))
    k[0, 0, 0], v[4, 1, 63] = 1000.0, -1000.0  # beyond what 8 bits hold
    caches = [torch.zeros(2, 2, 16, 64, device=DEVICE, dtype=torch.float8_e4m3fn) for _ in range(2)]
    slots = torch.tensor([3, 17, -1, 16, 0], device=DEVICE)
    write_kv(k, v, slots, *caches)
    for rows, cache in zip((k, v), caches, strict=True):
        wanted = rows.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert torch.equal(cache[slot // 16, :, slot % 16].float(), wanted[token])


@pytest.mark.parametrize("programs", [1, 5, 12, 1000])
def test_bits_do_not_depend_on_who_computes_a_chunk(programs: int) -> None:
    cache = Cache((130, 400, 64), dtype=HALF)
    q = cache.queries(3, 2)
    results = [cache.decode_tuned(q, Tuning(block=32, chunk=64, programs=number)) for number in (1, programs)]
    assert torch.equal(*results)
    check(results[0], expected_decode(cache, q))


# Groups of 2 to 9 with one, two and three chunks of 64 in common, some with pages beyond; between them sequences
# without a neighbour to share with, and one without keys. The first of most groups ends with a shared chunk.
GROUPS = ((2, 4), (3, 8), (4, 5), (5, 12), (6, 4), (7, 9), (8, 8), (9, 4))
GROUP_LENGTHS = (40, 0, *(16 * pages + (7 * row) % 50 for size, pages in GROUPS for row in range(size)), 200)
GROUP_TAKEN = (0, 0, *(pages * (row > 0) for size, pages in GROUPS for row in range(size)), 0)


@pytest.mark.parametrize("programs", [1, 1000])
@pytest.mark.parametrize(("dtype", "group", "head_dim"), [(torch.float32, 2, 64), (HALF, 2, 128), (HALF, 3, 80)])
def test_keys_read_once_for_a_group_give_the_same_bits(
    dtype: torch.dtype, group: int, head_dim: int, programs: int
) -> None:
    cache = Cache(GROUP_LENGTHS, taken=GROUP_TAKEN, num_kv_heads=1, dtype=dtype, head_dim=head_dim)
    q = cache.queries(len(GROUP_LENGTHS), group)
    tuning = Tuning(block=32, chunk=64, programs=programs)
    apart = cache.decode_tuned(q, tuning)
    check(apart, expected_decode(cache, q))
    shares = cache.shares(chunk=64, max_members=16 // group)
    assert (shares[0, :2].tolist(), int((shares[1:, 3] > 0).sum())) == ([9 if group == 2 else 12, 3], 44)
    cache.lose_the_taken_pages_of(shares, chunk=64)
    assert torch.equal(cache.decode_tuned(q, tuning, shares), apart)


def test_shared_chunks_that_find_no_room_are_read_by_each() -> None:
    cache = Cache((250, 230), taken=(0, 12), num_kv_heads=1)
    q = cache.queries(2, 2)
    shares = cache.shares(chunk=64, max_members=8)
    assert shares[:, 3].tolist() == [0, 3, 3]
    tuning = Tuning(chunk=64, programs=1, part_bytes=2 * 4 * q.numel())
    apart = cache.decode_tuned(q, tuning)
    cache.table[1, :8] = cache.nan_page()
    assert torch.equal(cache.decode_tuned(q, tuning, shares), apart)
    cache.table[1, 8] = cache.nan_page()
    assert cache.decode_tuned(q, tuning, shares)[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_sequences_that_the_host_finds_alike_share(dtype: torch.dtype) -> None:
    both = 2 * CHUNK
    cache = Cache((both + 88, both + 2, both, 100), taken=(0, both // 16, both // 16, 0), dtype=dtype)
    q = cache.queries(4, 4)
    arrays = cache.table.cpu().numpy(), cache.context_lens.cpu().numpy()
    shares = torch.from_numpy(decode_shares(*arrays, num_heads=8, num_kv_heads=2)).to(DEVICE)
    assert shares[:2].tolist() == [[1, 2, 0, 0], [0, 3, 2, 2]]
    apart = cache.decode(q)
    cache.lose_the_taken_pages_of(shares, chunk=CHUNK)
    out = torch.empty_like(q)
    lens, table = cache.context_lens, cache.table
    decode_attend(q, cache.k, cache.v, context_lens_S=lens, table_SP=table, scale=SCALE, out=out, shares=shares)
    assert torch.equal(out, apart)


def test_scores_far_apart_do_not_overflow() -> None:
    cache = Cache((700, 1100))
    q = cache.queries(2, 1) * 300
    # Scores near 1000 have an ulp of 1e-4, and so have the logarithms of the weights.
    torch.testing.assert_close(cache.decode(q).double().cpu(), expected_decode(cache, q), rtol=0, atol=2e-3)


def test_caches_may_be_views_of_one_memory() -> None:
    cache = Cache((70, 33), dtype=HALF)
    q = cache.queries(2, 2)
    together = torch.stack([cache.k, cache.v], dim=1)
    lens, table = cache.context_lens, cache.table
    result = decode_attend(q, together[:, 0], together[:, 1], context_lens_S=lens, table_SP=table, scale=SCALE)
    assert torch.equal(result, cache.decode(q))


def test_no_sequences_is_no_work() -> None:
    cache = Cache((5,))
    assert cache.decode(cache.queries(1, 2), slice(0, 0)).shape == (0, 4, 64)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_keys_and_values_are_at_their_slots_and_nowhere_else(dtype: torch.dtype, head_dim: int) -> None:
    cache = Cache((40,), num_kv_heads=3, head_dim=head_dim, dtype=dtype)
    expected_k, expected_v = cache.k.clone(), cache.v.clone()
    mixed = torch.randn(4, 5, 3, head_dim, generator=cache.random).to(dtype).to(DEVICE)
    k, v = mixed[1].transpose(0, 1).contiguous().transpose(0, 1), mixed[2]
    slots = torch.tensor([37, -1, 0, 63, -16], device=DEVICE)
    write_kv(k, v, slots, cache.k[2:], cache.v[2:])  # what went to a negative slot would be seen in pages 0 and 1
    for token, slot in ((0, 37), (2, 0), (3, 63)):
        expected_k[2 + slot // 16, :, slot % 16] = k[token]
        expected_v[2 + slot // 16, :, slot % 16] = v[token]
    assert torch.equal(cache.k.view(torch.uint8), expected_k.view(torch.uint8))
    assert torch.equal(cache.v.view(torch.uint8), expected_v.view(torch.uint8))
    write_kv(k[:0], v[:0], slots[:0], cache.k, cache.v)


def layout_of(cache: Cache, query_lens: tuple[int, ...]) -> tuple[PagedLayout, Extents]:
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32, device=DEVICE)
    slots = torch.empty(sum(query_lens), dtype=torch.int64, device=DEVICE)
    layout = PagedLayout(starts, cache.context_lens, cache.table, slots)
    return layout, Extents.of(query_lens, cache.lengths, device=DEVICE)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_gathered_pages_are_the_contexts_end_to_end(head_dim: int) -> None:
    cache = Cache((17, 0, 1, 100, 16), num_kv_heads=3, head_dim=head_dim, dtype=HALF)
    layout, extents = layout_of(cache, (1, 0, 1, 1, 1))
    k, v = gather_kv(cache.k, cache.v, layout=layout, extents=extents, dtype=HALF)
    assert torch.equal(k.cpu(), torch.cat(cache.keys))
    assert torch.equal(v.cpu(), torch.cat(cache.values))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("group", [1, 4])
def test_prefill_sees_the_context_and_what_came_before(group: int, dtype: torch.dtype) -> None:
    query_lens, lengths = (33, 1, 7, 0, 20), (33, 50, 300, 20, 37)
    cache = Cache(lengths, dtype=dtype)
    q = cache.queries(sum(query_lens), group)
    layout, extents = layout_of(cache, query_lens)
    result = prefill_attend(q, cache.k, cache.v, layout=layout, extents=extents, scale=SCALE)
    expected, row = [], 0
    for sequence, (num_rows, length) in enumerate(zip(query_lens, lengths, strict=True)):
        for seen in range(length - num_rows + 1, length + 1):
            expected.append(attend_plainly(q[row], cache.keys[sequence], cache.values[sequence], seen))
            row += 1
    check(result, torch.stack(expected))


def test_prefill_of_nothing() -> None:
    cache = Cache((0, 0))
    layout, extents = layout_of(cache, (0, 0))
    q = cache.queries(0, 2)
    assert prefill_attend(q, cache.k, cache.v, layout=layout, extents=extents, scale=SCALE).shape == (0, 4, 64)


@only_on_gpu
@pytest.mark.parametrize("width", [16, 128])
def test_a_graph_replays_with_other_lengths_and_padding(width: int) -> None:
    lengths = (3, 100, 256, 40)
    cache = Cache(lengths, dtype=HALF, width=width)
    q = cache.queries(4, 2)
    new_k, new_v = (torch.randn(4, 2, 64, device=DEVICE).to(HALF) for _ in range(2))
    slots = torch.full((4,), -1, device=DEVICE)

    def step() -> Tensor:
        write_kv(new_k, new_v, slots, cache.k, cache.v)
        return cache.decode(q)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    graph.replay()
    check(result, expected_decode(cache, q))
    cache.context_lens.copy_(torch.tensor([0, 17, 255, 0], dtype=torch.int32))
    slots[1] = int(cache.table[1, 1]) * 16
    graph.replay()
    assert not result[0].any()
    assert not result[3].any()
    cache.keys[1][16], cache.values[1][16] = new_k[1].cpu(), new_v[1].cpu()
    check(result[1], attend_plainly(q[1], cache.keys[1], cache.values[1], 17))
    check(result[2], attend_plainly(q[2], cache.keys[2], cache.values[2], 255))
    assert torch.equal(cache.decode(q), result)


@only_on_gpu
@pytest.mark.parametrize("num_kv_heads", [2, 256])  # with chunks split up, and with a program for each sequence
def test_a_graph_replays_with_other_groups(num_kv_heads: int) -> None:
    both = 2 * CHUNK
    lengths, taken = (both + 188, both + 88, both + 18, both + 8, 900), (0, both // 16, both // 16, 4, 0)
    cache = Cache(lengths, taken=taken, dtype=HALF, num_kv_heads=num_kv_heads)
    q = cache.queries(5, 2)
    apart = cache.decode(q)
    shares = torch.zeros(6, 4, dtype=torch.int32, device=DEVICE)

    def step() -> Tensor:
        lens, table = cache.context_lens, cache.table
        return decode_attend(q, cache.k, cache.v, context_lens_S=lens, table_SP=table, scale=SCALE, shares=shares)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    graph.replay()
    assert torch.equal(result, apart)
    shares.copy_(cache.shares(chunk=CHUNK, max_members=8))
    assert shares[:3].tolist() == [[1, 2, 0, 0], [0, 3, 2, 2], [0, 0, 0, 2]]
    table = cache.table.clone()
    cache.lose_the_taken_pages_of(shares, chunk=CHUNK)
    graph.replay()
    assert torch.equal(result, apart)
    cache.table.copy_(table)
    cache.context_lens[1:] = 0  # padding: what the last step said of these sequences is still in the buffer
    shares[0] = 0
    shares[1, 3] = 0
    graph.replay()
    assert torch.equal(result[0], apart[0])
    assert not result[1:].any()


@only_on_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_contexts(head_dim: int) -> None:
    cache = Cache((32768, 9000), num_kv_heads=1, dtype=HALF, head_dim=head_dim)
    q = cache.queries(2, 8)
    result = cache.decode(q)
    check(result, expected_decode(cache, q))
    assert torch.equal(cache.decode(q, slice(1, 2)), result[1:])


@only_on_gpu
def test_pages_more_than_two_to_the_31_elements_away() -> None:
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    small = Cache((100,), num_kv_heads=8, head_dim=128, dtype=HALF)
    num_pages = 2**31 // (8 * 16 * 128) + 7
    k_cache, v_cache = (torch.empty(num_pages, 8, 16, 128, dtype=HALF, device=DEVICE) for _ in range(2))
    table = torch.arange(num_pages - 7, num_pages, dtype=torch.int32, device=DEVICE)[None]
    slots = torch.arange(100, device=DEVICE) + (num_pages - 7) * 16
    write_kv(small.keys[0].to(DEVICE), small.values[0].to(DEVICE), slots, k_cache, v_cache)
    q = small.queries(1, 2)
    lens = small.context_lens
    result = decode_attend(q, k_cache, v_cache, context_lens_S=lens, table_SP=table, scale=SCALE)
    check(result, expected_decode(small, q))
    layout = PagedLayout(torch.tensor([0, 1], dtype=torch.int32, device=DEVICE), lens, table, slots[-1:])
    k, v = gather_kv(k_cache, v_cache, layout=layout, extents=Extents.of([1], [100], device=DEVICE), dtype=HALF)
    assert torch.equal(k.cpu(), small.keys[0])
    assert torch.equal(v.cpu(), small.values[0])
