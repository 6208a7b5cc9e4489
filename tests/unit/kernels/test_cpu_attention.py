"""Paged attention on a CPU: right against torch in float64, and the same bits whatever is computed beside a row."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.errors import ModelError
from forge.kernels import cpu_attention
from forge.kernels.cpu_attention import attend, attend_pages, new_cache, write_kv
from forge.kernels.paged import PAGE_TOKENS, PagedLayout, num_pages_of
from forge.models.attention import DocumentAttention
from forge.models.rows import Documents, RowRegistry, RowTask

SHAPES = [(8, 4, 64), (4, 4, 8), (6, 2, 24), (32, 1, 128), (3, 3, 256), (5, 5, 40)]
"""Heads, heads of keys and values, width: groups of 1, 2, 3 and 32, and widths that are no whole vectors."""

pytestmark = pytest.mark.usefixtures("one_thread")


class Cache:
    """Sequences in a cache whose pages lie anywhere, and hold NaN, infinities and large numbers where unwritten."""

    def __init__(self, num_pages: int, kv_heads: int, width: int, *, seed: int = 0) -> None:
        self.maker = random.Random(seed)
        self.free = list(range(num_pages))
        self.maker.shuffle(self.free)
        self.k, self.v = new_cache(num_pages, num_kv_heads=kv_heads, width=width)
        for cache in (self.k, self.v):
            flat = cache.view(-1)
            flat[0::3], flat[1::3], flat[2::3] = torch.nan, torch.inf, -3e38
        self.pages: dict[Any, list[int]] = {}
        self.length: dict[Any, int] = {}

    def step(
        self, parts: list[tuple[Any, Tensor, Tensor, Tensor]], *, num_threads: int = 1, lse: Tensor | None = None
    ) -> list[Tensor]:
        """New tokens (queries, keys and values) of some sequences: what their queries get."""
        starts, slots = [0], []
        for name, query, _, _ in parts:
            pages, before = self.pages.setdefault(name, []), self.length.get(name, 0)
            self.length[name] = before + len(query)
            while len(pages) * PAGE_TOKENS < self.length[name]:
                pages.append(self.free.pop())
            slots += [pages[t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS for t in range(before, self.length[name])]
            starts.append(starts[-1] + len(query))
        widest = max(len(self.pages[name]) for name, *_ in parts) + 1
        table = [self.pages[name] + [-1] * (widest - len(self.pages[name])) for name, *_ in parts]
        layout = PagedLayout(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([self.length[name] for name, *_ in parts], dtype=torch.int32),
            torch.tensor(table, dtype=torch.int32),
            torch.tensor(slots),
        )
        query, key, value = (torch.cat([part[place] for part in parts]) for place in (1, 2, 3))
        write_kv(key, value, layout.slots, self.k, self.v)
        scale = query.shape[-1] ** -0.5
        out = attend(query, self.k, self.v, layout=layout, scale=scale, lse=lse, num_threads=num_threads)
        return list(out.split([len(part[1]) for part in parts]))


def tokens(length: int, shape: tuple[int, int, int], *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    maker = torch.Generator().manual_seed(seed)
    heads, kv_heads, width = shape
    return (
        torch.randn(length, heads, width, generator=maker),
        torch.randn(length, kv_heads, width, generator=maker),
        torch.randn(length, kv_heads, width, generator=maker),
    )


def in_float64(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and logsumexp, [L, H, D] and [L, H]."""
    group = query.shape[1] // key.shape[1]
    q, k, v = (tensor.double().transpose(0, 1) for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(group, dim=0) for tensor in (k, v))
    scores = q @ k.transpose(1, 2) * query.shape[-1] ** -0.5
    scores.masked_fill_(torch.ones(scores.shape[1:]).tril() == 0, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).T


def the_same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_right(shape: tuple[int, int, int]) -> None:
    lengths = (5, 40, 16, 1, 150)
    parts = [(index, *tokens(length, shape, seed=index)) for index, length in enumerate(lengths)]
    lse = torch.empty(shape[0], sum(lengths)).T  # strides are the caller's
    found = Cache(20, *shape[1:]).step(parts, lse=lse)
    for (_, *tensors), out, of_part in zip(parts, found, lse.split(lengths), strict=True):
        expected, expected_lse = in_float64(*tensors)
        torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=4e-6)
        torch.testing.assert_close(of_part.double(), expected_lse, rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("flags", [("-O2",), ("-O2", "-mavx2", "-mfma")], ids=" ".join)
def test_other_processors(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain C and AVX2 are right and independent of the batch too."""
    if "-mavx2" in flags and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    built = cpu_attention.build(((*flags, "-ffp-contract=off"),))
    monkeypatch.setattr(cpu_attention, "library", lambda: built)
    check_independence((6, 2, 24), seed=3)
    query, key, value = tokens(70, (6, 2, 24), seed=1)
    [out] = Cache(20, 2, 24).step([("a", query, key, value)])
    torch.testing.assert_close(out.double(), in_float64(query, key, value)[0], rtol=2e-6, atol=4e-6)


def check_independence(shape: tuple[int, int, int], *, seed: int) -> None:
    """Sequences that arrive in pieces, in steps together with others, get what they get alone in one pass."""
    maker = random.Random(seed)
    lengths = [maker.choice([1, 2, 15, 16, 17, 33, 70, 131, 150]) for _ in range(4)]
    whole = [tokens(length, shape, seed=100 * seed + index) for index, length in enumerate(lengths)]
    alone = [Cache(10, *shape[1:], seed=seed).step([("", *tensors)])[0] for tensors in whole]
    cache, done = Cache(60, *shape[1:], seed=seed + 1), [0] * len(whole)
    found: list[list[Tensor]] = [[] for _ in whole]
    while any(map(int.__lt__, done, lengths)):
        chosen = [index for index in range(len(whole)) if done[index] < lengths[index] and maker.random() < 0.8]
        maker.shuffle(chosen)
        parts = []
        for index in chosen:
            count = min(maker.choice([1, 1, 5, 24, 64, 200]), lengths[index] - done[index])
            parts.append((index, *(tensor[done[index] : done[index] + count] for tensor in whole[index])))
            done[index] += count
        if parts:
            for index, out in zip(chosen, cache.step(parts, num_threads=maker.choice([1, 2, 3])), strict=True):
                found[index].append(out)
    for index, parts_of_one in enumerate(found):
        assert the_same(torch.cat(parts_of_one), alone[index]), (seed, index, lengths)


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_the_batch(shape: tuple[int, int, int]) -> None:
    for seed in range(4):
        check_independence(shape, seed=seed)


def test_decoding_token_by_token_is_one_pass() -> None:
    query, key, value = tokens(50, (8, 4, 64), seed=0)
    [whole] = Cache(8, 4, 64).step([("a", query, key, value)])
    cache = Cache(8, 4, 64, seed=9)
    steps = [cache.step([("a", query[t : t + 1], key[t : t + 1], value[t : t + 1])])[0] for t in range(50)]
    assert the_same(torch.cat(steps), whole)


def test_two_sequences_may_share_pages() -> None:
    query, key, value = tokens(40, (4, 2, 16), seed=0)
    cache = Cache(8, 2, 16)
    [first] = cache.step([("a", query, key, value)])
    cache.pages["b"], cache.length["b"] = cache.pages["a"][:2], 32
    [shared] = cache.step([("b", query[32:], key[32:], value[32:])])
    assert the_same(shared, first[32:])


def test_threads_do_not_change_the_bits() -> None:
    parts = [(index, *tokens(length, (8, 4, 64), seed=index)) for index, length in enumerate((300, 1, 90))]
    one, two = (Cache(40, 4, 64).step(parts, num_threads=count) for count in (1, 2))
    assert all(map(the_same, one, two))
    library = cpu_attention.library()
    assert library is not None
    assert library.forge_has_threads() == 1, "torch's threads were not found: the kernel would use one"


def test_what_a_row_does_not_see_does_not_matter() -> None:
    """NaN in a later token leaves earlier rows alone, bit for bit."""
    query, key, value = tokens(30, (4, 4, 16), seed=0)
    [clean] = Cache(4, 4, 16).step([("a", query, key, value)])
    key[20:], value[20:] = torch.nan, torch.inf
    [spoilt] = Cache(4, 4, 16).step([("a", query, key, value)])
    assert the_same(spoilt[:20], clean[:20])
    assert spoilt[20:].isnan().all(), "but a NaN that is seen is not hidden"


def test_scores_of_every_size() -> None:
    """One key that outweighs all others by far; and sums of exponentials below what float32 holds."""
    query, key, value = tokens(40, (2, 2, 8), seed=0)
    for factor in (0.0, 1e-20, 30.0, 1e4):
        [out] = Cache(4, 2, 8).step([("a", query * factor, key, value)])
        expected, _ = in_float64(query * factor, key, value)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4 if factor > 1 else 1e-6)


def test_tensors_with_gaps() -> None:
    query, key, value = tokens(20, (4, 2, 16), seed=0)
    [expected] = Cache(2, 2, 16).step([("a", query, key, value)])
    wide = torch.zeros(20, 12, 16)
    wide[:, :4], wide[:, 5:7], wide[:, 9:11] = query, key, value
    layout, (k_cache, v_cache) = PagedLayout.of_documents((20,)), new_cache(2, num_kv_heads=2, width=16)
    write_kv(wide[:, 5:7], wide[:, 9:11], layout.slots, k_cache, v_cache)
    out = torch.zeros(4, 20, 16).transpose(0, 1)
    assert attend(wide[:, :4], k_cache, v_cache, layout=layout, scale=0.25, out=out) is out
    assert the_same(out, expected)


def test_a_sequence_without_rows_and_a_slot_that_is_skipped() -> None:
    query, key, value = tokens(3, (2, 2, 8), seed=0)
    k_cache, v_cache = (torch.zeros_like(cache) for cache in new_cache(2, num_kv_heads=2, width=8))
    write_kv(key, value, torch.tensor([16, -1, 17]), k_cache, v_cache)
    assert k_cache[0].count_nonzero() == v_cache[0].count_nonzero() == 0
    torch.testing.assert_close(k_cache[1, :, :, :2], key[[0, 2]].permute(1, 2, 0), rtol=0, atol=0)
    torch.testing.assert_close(v_cache[1, :, :2], value[[0, 2]].transpose(0, 1), rtol=0, atol=0)
    layout = PagedLayout(
        torch.tensor([0, 0, 2], dtype=torch.int32),
        torch.tensor([99, 2], dtype=torch.int32),
        torch.tensor([[-1] * 7, [1] * 7], dtype=torch.int32),
        torch.tensor([16, 17]),
    )
    out = attend(query[[0, 2]], k_cache, v_cache, layout=layout, scale=8**-0.5)
    torch.testing.assert_close(out, in_float64(query[[0, 2]], key[[0, 2]], value[[0, 2]])[0].float())
    empty = PagedLayout.of_documents(())
    assert attend(query[:0], k_cache, v_cache, layout=empty, scale=1.0).shape == (0, 2, 8)


def test_documents_lie_one_after_the_other() -> None:
    layout = PagedLayout.of_documents((17, 1, 16))
    assert layout.query_starts.tolist() == [0, 17, 18, 34]
    assert layout.table[:, 0].tolist() == [0, 2, 3]
    assert layout.slots.tolist() == [*range(17), 32, *range(48, 64)]
    assert num_pages_of((17, 1, 16)) == 4


def refusals() -> Iterator[tuple[str, dict[str, Any], str, object]]:
    def number(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    yield "dtype", {"q": torch.zeros(4, 2, 8).half()}, "q_THD", "torch.float16 on cpu"
    yield "width", {"q": torch.zeros(4, 2, 16)}, "q_THD", (4, 2, 16)
    yield "heads", {"q": torch.zeros(4, 3, 8)}, "q_THD", 3
    yield "gaps", {"q": torch.zeros(4, 2, 16)[..., ::2]}, "q_THD", (32, 16, 2)
    yield "out", {"out": torch.zeros(4, 8)}, "out", (4, 8)
    yield "lse", {"lse": torch.zeros(2, 4)}, "lse", (2, 4)
    yield "page size", {"k_cache": torch.zeros(2, 2, 8, 8)}, "k_cache", (2, 2, 8, 8)
    yield "odd width", {"k_cache": torch.zeros(2, 2, 12, 16)}, "k_cache", 12
    yield "too wide", {"k_cache": torch.zeros(2, 2, 264, 16)}, "k_cache", 264
    yield "values", {"v_cache": torch.zeros(2, 2, 8, 16)}, "v_cache", (2, 2, 8, 16)
    yield "starts dtype", {"query_starts": torch.tensor([0, 4])}, "layout.query_starts", "torch.int64 on cpu"
    yield "starts", {"query_starts": number(0, 3)}, "layout.query_starts", [0, 3]
    yield "context", {"context_lens": number(3)}, "layout.context_lens[0]", 3
    yield "no room", {"context_lens": number(33)}, "layout.context_lens[0]", 33
    yield "page", {"table": number(0, 2)[None], "context_lens": number(20)}, "layout.table[0, 1]", 2
    yield "negative page", {"table": number(-1, 0)[None]}, "layout.table[0, 0]", -1
    falling = {"query_starts": number(0, 5, 4), "context_lens": number(9, 9), "table": number(0, 1, 0, 1).view(2, 2)}
    yield "falling", falling, "layout.query_starts[2]", 4


@pytest.mark.parametrize("native", [True, False], ids=["kernel", "stand-in"])
@pytest.mark.parametrize(("change", "path", "value"), [case[1:] for case in refusals()], ids=[c[0] for c in refusals()])
def test_refusals(
    change: dict[str, Any], path: str, value: object, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(cpu_attention, "library", lambda: None)
    layout = PagedLayout(
        torch.tensor([0, 4], dtype=torch.int32),
        torch.tensor([4], dtype=torch.int32),
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.arange(4),
    )
    names = {field.name for field in dataclasses.fields(PagedLayout)}
    layout = dataclasses.replace(layout, **{name: tensor for name, tensor in change.items() if name in names})
    given = {"q": torch.zeros(4, 2, 8), "k_cache": torch.zeros(2, 2, 8, 16), "v_cache": torch.zeros(2, 2, 16, 8)}
    given |= {name: tensor for name, tensor in change.items() if name not in names}
    with pytest.raises(ModelError) as caught:
        attend(given.pop("q"), given.pop("k_cache"), given.pop("v_cache"), layout=layout, scale=1.0, **given)
    assert (caught.value.path, caught.value.value) == (path, value)
    assert caught.value.rule
    assert caught.value.repair


@pytest.mark.parametrize("native", [True, False], ids=["kernel", "stand-in"])
def test_a_slot_beyond_the_cache_writes_nothing(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(cpu_attention, "library", lambda: None)
    k_cache, v_cache = (torch.zeros_like(cache) for cache in new_cache(2, num_kv_heads=2, width=8))
    with pytest.raises(ModelError) as caught:
        write_kv(torch.ones(2, 2, 8), torch.ones(2, 2, 8), torch.tensor([0, 32]), k_cache, v_cache)
    assert (caught.value.path, caught.value.value) == ("slots_T[1]", 32)
    assert k_cache.count_nonzero() == v_cache.count_nonzero() == 0


def test_the_stand_in_is_right_and_independent_of_the_others() -> None:
    shape, lengths = (6, 2, 24), (5, 40, 16)
    parts = [(index, *tokens(length, shape, seed=index)) for index, length in enumerate(lengths)]
    layout, caches = PagedLayout.of_documents(lengths), new_cache(num_pages_of(lengths), num_kv_heads=2, width=24)
    for cache in caches:
        cache.fill_(torch.nan)
    query, key, value = (torch.cat([part[place] for part in parts]) for place in (1, 2, 3))
    write_kv(key, value, layout.slots, *caches)
    out, lse = torch.empty(query.shape), torch.empty(query.shape[:2])
    attend_pages(query, *caches, layout=layout, scale=24**-0.5, out=out, lse=lse)
    for (_, *tensors), found, found_lse in zip(parts, out.split(lengths), lse.split(lengths), strict=True):
        expected, expected_lse = in_float64(*tensors)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found_lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{"FORGE_NATIVE": "0"}, {"CC": "no-such-compiler"}], ids=["switch", "no compiler"])
def test_without_the_kernel_it_is_said_once(
    changes: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name, value in {**changes, "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    cpu_attention.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="forge.kernels"):
            query, key, value = tokens(20, (4, 2, 16), seed=0)
            [out] = Cache(2, 2, 16).step([("a", query, key, value)])
    finally:
        cpu_attention.library.cache_clear()
    torch.testing.assert_close(out.double(), in_float64(query, key, value)[0], rtol=1e-5, atol=1e-5)
    assert len(caplog.records) == 1
    assert next(iter(changes)) in caplog.text


@pytest.mark.parametrize("shape", [(4, 2, 16), (3, 3, 8)])
def test_gradients_of_documents(shape: tuple[int, int, int]) -> None:
    """The trainer's layer: documents and padding, against torch in float64."""
    lengths, num_padding = (37, 5, 1, 64), 3
    book = RowRegistry()
    nothing = torch.zeros(0, dtype=torch.int64)
    key = book.enter(RowTask(Documents.of(lengths, num_padding=num_padding), nothing[None], nothing, nothing))
    layer = DocumentAttention(DocumentAttention.Config())
    layer.row_registry = book
    given = tokens(sum(lengths) + num_padding, shape, seed=4)
    gradient = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(5))
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [tensor[None].to(dtype).requires_grad_() for tensor in given]
        out = layer(*leaves, attention_masks=key)
        found.append([out, *torch.autograd.grad(out, leaves, gradient[None].to(dtype))])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=3e-6)
    assert found[0][1][0, -num_padding:].count_nonzero() == 0


def test_the_trainer_gives_the_generators_bits() -> None:
    query, key, value = tokens(60, (4, 2, 16), seed=0)
    book, nothing = RowRegistry(), torch.zeros(0, dtype=torch.int64)
    layer = DocumentAttention(DocumentAttention.Config())
    layer.row_registry = book
    documents = book.enter(RowTask(Documents.of((20, 40)), nothing[None], nothing, nothing))
    row = layer(query[None], key[None], value[None], attention_masks=documents)[0]
    cache = Cache(8, 2, 16)
    parts = [cache.step([("a", query[a:b], key[a:b], value[a:b])])[0] for a, b in itertools.pairwise((20, 33, 34, 60))]
    assert the_same(torch.cat(parts), row[20:])
