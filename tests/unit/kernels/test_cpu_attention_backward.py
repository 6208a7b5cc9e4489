"""Gradients of attention on a CPU: right against float64, alone in a row or not, with beginnings held once or not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention_rows import row_of, tensors_of, through
from forge.errors import ModelError
from forge.kernels import cpu_attention, cpu_attention_backward
from forge.kernels.cpu_attention_backward import SharedLayout, differentiate
from forge.models import attention
from forge.models.attention import DocumentAttention
from forge.models.rows import RowTask

SHAPES = [(8, 4, 64), (4, 4, 8), (6, 2, 24), (50, 1, 16), (3, 3, 256), (5, 5, 40)]
"""Heads, heads of keys and values, width: groups of 1, 2, 3 and 50, and widths that are no whole vectors."""
LENGTHS = (40, 37, 26, 27, 1, 5, 90, 30)
PREFIXES = (0, 25, 25, 25, 0, 0, 0, 30)
"""Two groups, the second of which has a document that has nothing of its own, and two documents by themselves."""

pytestmark = pytest.mark.usefixtures("one_thread")


def the_same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def check(row: RowTask, given: list[Tensor]) -> None:
    expected = through(row, given, dtype=torch.float64)
    for ours, known in zip(through(row, given), expected, strict=True):
        torch.testing.assert_close(ours.double(), known, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_with_shared_beginnings(shape: tuple[int, int, int]) -> None:
    num_padding = 3
    num_places = sum(LENGTHS) - sum(PREFIXES) + num_padding
    check(row_of(LENGTHS, PREFIXES, num_padding=num_padding), tensors_of(num_places, shape))


@pytest.mark.parametrize("lengths", [(1,), (256,), (257,), (600, 2)])
def test_gradients_of_documents_as_they_are(lengths: tuple[int, ...]) -> None:
    check(row_of(lengths), tensors_of(sum(lengths), (4, 2, 16)))


def test_gradients_of_long_documents_with_shared_beginnings() -> None:
    """More keys than have their scores at the same time, before and after the place where documents part."""
    check(row_of((400, 300, 290), (0, 270, 270)), tensors_of(450, (2, 1, 8)))


@pytest.mark.parametrize("flags", [("-O2",), ("-O2", "-mavx2", "-mfma")], ids=" ".join)
def test_other_processors(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if "-mavx2" in flags and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    built = cpu_attention_backward.build(((*flags, "-ffp-contract=off"),))
    assert built is not None
    monkeypatch.setattr(cpu_attention_backward, "library", lambda: built)
    check(row_of(LENGTHS, PREFIXES), tensors_of(sum(LENGTHS) - sum(PREFIXES), (6, 2, 24)))


def test_sharing_does_not_change_what_comes_out() -> None:
    """Bit for bit, against rows that hold every document as a whole."""
    row = row_of(LENGTHS, PREFIXES)
    given = tensors_of(sum(LENGTHS) - sum(PREFIXES), (4, 2, 24))
    assert row.sharing is not None
    whole = through(row_of(LENGTHS), [tensor.index_select(1, row.sharing.places) for tensor in given])[0]
    assert the_same(through(row, given)[0], whole.index_select(1, row.sharing.own))


def test_nothing_depends_on_the_rest_of_the_row() -> None:
    """A document's gradients, and those of documents with one beginning, have the bits that they have alone."""
    shape, bundles = (6, 2, 24), [((40, 37, 26), (0, 25, 25)), ((90,), (0,)), ((31, 300), (0, 31)), ((7,), (0,))]
    sizes = [sum(lengths) - sum(prefixes) for lengths, prefixes in bundles]
    parts = [tensors_of(size, shape, seed=seed) for seed, size in enumerate(sizes)]
    alone = [through(row_of(*bundle), given) for bundle, given in zip(bundles, parts, strict=True)]
    for seed in range(3):
        order = list(range(len(bundles)))
        random.Random(seed).shuffle(order)
        lengths = sum((bundles[index][0] for index in order), ())
        prefixes = sum((bundles[index][1] for index in order), ())
        given = [torch.cat([parts[index][place] for index in order], dim=1) for place in range(4)]
        found = through(row_of(lengths, prefixes, num_padding=0), given)
        for place, tensor in enumerate(found):
            for index, part in zip(order, tensor.split([sizes[index] for index in order], dim=1), strict=True):
                assert the_same(part, alone[index][place]), (order, index, place)


def test_threads_do_not_change_the_bits() -> None:
    layout = SharedLayout.of((200, 150, 150, 90, 60), (0, 100, 100, 0, 0))
    q, k, v, grad = (tensor[0] for tensor in tensors_of(layout.num_places, (4, 2, 64)))
    out, lse = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)), torch.full(q.shape[:2], 9.0)
    found = [
        differentiate(grad, (q, k, v), (out, lse), layout=layout, scale=0.1, num_threads=count)
        for count in (1, 2, 3, 2)
    ]
    for other in found[1:]:
        assert all(map(the_same, other, found[0]))


def test_tensors_with_gaps() -> None:
    given = tensors_of(77, (4, 2, 16))
    wide = torch.randn(1, 77, 12, 16, generator=torch.Generator().manual_seed(3))
    gaps = [wide[:, :, :4], wide[:, :, 5:7], wide[:, :, 9:11], torch.zeros(1, 77, 16, 4).transpose(2, 3)]
    for gap, tensor in zip(gaps, given, strict=True):
        gap.copy_(tensor)
    row = row_of((40, 37))
    layer = DocumentAttention(DocumentAttention.Config())
    leaf = wide.detach().requires_grad_()
    out = layer(leaf[:, :, :4], leaf[:, :, 5:7], leaf[:, :, 9:11], attention_masks=layer.row_registry.enter(row))
    [found] = torch.autograd.grad(out, [leaf], gaps[3])
    _, *expected = through(row, given)
    assert all(map(the_same, (found[:, :, :4], found[:, :, 5:7], found[:, :, 9:11]), expected))


@pytest.mark.parametrize("factor", [0.0, 1e-20, 30.0, 300.0])
def test_scores_of_every_size(factor: float) -> None:
    given = tensors_of(40, (2, 2, 8))
    given[0] *= factor
    expected = through(row_of((40,)), given, dtype=torch.float64)
    for ours, known in zip(through(row_of((40,)), given), expected, strict=True):
        scale = float(known.abs().max()) + 1.0
        assert float((ours.double() - known).abs().max()) <= 3e-4 * scale


def test_a_row_of_padding_alone() -> None:
    given = tensors_of(3, (4, 2, 16))
    out, *grads = through(row_of((), num_padding=3), given)
    assert the_same(out, given[2].repeat_interleave(2, dim=2))
    assert grads[0].count_nonzero() == grads[1].count_nonzero() == 0
    torch.testing.assert_close(grads[2], given[3].unflatten(2, (2, 2)).sum(3))


def test_without_the_kernel_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    row, given = row_of(LENGTHS, PREFIXES), tensors_of(sum(LENGTHS) - sum(PREFIXES), (4, 2, 24))
    expected = through(row, given)
    monkeypatch.setattr(cpu_attention_backward, "library", lambda: None)
    assert not attention._goes_by_row(given[0])
    for ours, known in zip(through(row, given), expected, strict=True):
        torch.testing.assert_close(ours, known, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("prefixes", "path", "value"),
    [((3, 0, 0), "prefixes[0]", 3), ((0, 6, 0), "prefixes[1]", 6), ((0, 0, -1), "prefixes[2]", -1)],
)
def test_beginnings_that_nobody_has(prefixes: tuple[int, ...], path: str, value: int) -> None:
    with pytest.raises(ModelError) as caught:
        SharedLayout.of((5, 9, 4), prefixes)
    assert (caught.value.path, caught.value.value) == (path, value)
    assert caught.value.rule
    assert caught.value.repair


def test_a_layout_of_another_row() -> None:
    q, k, v, grad = (tensor[0] for tensor in tensors_of(9, (2, 2, 8)))
    with pytest.raises(ModelError) as caught:
        differentiate(grad, (q, k, v), (q, q[..., 0].contiguous()), layout=SharedLayout.of((5, 5)), scale=1.0)
    assert caught.value.path == "layout"
    assert caught.value.value == ([0, 5, 10], [5, 5], [0, 1])
    assert "9 places" in (caught.value.rule or "")
    assert caught.value.repair


@pytest.mark.parametrize("native", [True, False], ids=["kernel", "stand-in"])
@pytest.mark.parametrize("source", [-1, 2])
def test_a_source_that_is_no_row_writes_nothing(native: bool, source: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(cpu_attention, "library", lambda: None)
    caches = [torch.zeros_like(cache) for cache in cpu_attention.new_cache(1, num_kv_heads=2, width=8)]
    rows = torch.ones(2, 2, 8)
    with pytest.raises(ModelError) as caught:
        cpu_attention.write_kv(rows, rows, torch.arange(3), *caches, sources_T=torch.tensor([0, 1, source]))
    assert (caught.value.path, caught.value.value) == ("sources_T[2]", source)
    assert caught.value.rule
    assert caught.value.repair
    assert caches[0].count_nonzero() == caches[1].count_nonzero() == 0


@pytest.mark.parametrize("native", [True, False], ids=["kernel", "stand-in"])
def test_tokens_that_have_one_row(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(cpu_attention, "library", lambda: None)
    keys, values = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    sources, slots = torch.tensor([2, 0, 2, 1]), torch.tensor([0, 5, 16, -1])
    found, expected = (
        [torch.zeros_like(cache) for cache in cpu_attention.new_cache(2, num_kv_heads=2, width=8)] for _ in range(2)
    )
    cpu_attention.write_kv(keys, values, slots, *found, sources_T=sources)
    cpu_attention.write_kv(keys[sources], values[sources], slots, *expected)
    assert all(map(the_same, found, expected))
