"""Attention on a CPU over rows in which documents share prefixes at several depths."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_rows import row_of, tensors_of, through
from forge.errors import ModelError
from forge.kernels import cpu_attention_backward
from forge.kernels.cpu_attention_backward import SharedLayout, differentiate
from forge.kernels.paged import shared_places
from forge.models.attention import DocumentAttention

LENGTHS = (40, 37, 45, 30, 26, 20, 7, 31, 300, 290)
PREFIXES = (0, 25, 33, 28, 10, 18, 0, 7, 31, 280)
"""A tree of six documents, up to four deep, and a chain that starts with a document which is all prefix."""
SHAPES = [(4, 2, 16), (3, 3, 24), (6, 1, 64)]

pytestmark = pytest.mark.usefixtures("one_thread")


def in_whole_documents(given: list[Tensor]) -> list[Tensor]:
    """The same in float64, computed by torch over documents that share nothing: an independent reference."""
    places, own = shared_places(LENGTHS, PREFIXES)
    leaves = [tensor[0].double().detach().requires_grad_() for tensor in given[:3]]
    copies = [leaf.index_select(0, places).unsqueeze(0) for leaf in leaves]
    layer = DocumentAttention(DocumentAttention.Config())
    key = layer.row_registry.enter(row_of(LENGTHS, (0,) * len(LENGTHS)))
    out = layer(*copies, attention_masks=key)[0].index_select(0, own)
    gradients = torch.autograd.grad(out, leaves, given[3][0].double())
    return [out.detach().unsqueeze(0), *(each.unsqueeze(0) for each in gradients)]


def test_places_by_hand() -> None:
    places, own = shared_places((5, 6, 4, 3), (0, 3, 3, 0))
    assert places.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 0, 1, 2, 8, 9, 10, 11]
    assert own.tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 14, 15, 16, 17]
    deep, _ = shared_places((3, 5, 6), (0, 2, 4))  # the third takes two tokens of the first and two of the second
    assert deep.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 0, 1, 3, 4, 6, 7]


@pytest.mark.parametrize("path", ["kernel", "torch", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_trees(shape: tuple[int, int, int], path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "torch":
        monkeypatch.setattr(cpu_attention_backward, "library", lambda: None)
    given = tensors_of(sum(LENGTHS) - sum(PREFIXES), shape)
    dtype, close = (torch.float64, 1e-12) if path == "float64" else (torch.float32, 1e-5)
    found = through(row_of(LENGTHS, PREFIXES), given, dtype=dtype)
    for ours, known in zip(found, in_whole_documents(given), strict=True):
        torch.testing.assert_close(ours.double(), known, rtol=close, atol=close)


def test_outputs_are_those_of_whole_documents_to_the_last_bit() -> None:
    given = tensors_of(sum(LENGTHS) - sum(PREFIXES), (4, 2, 24))
    places, own = shared_places(LENGTHS, PREFIXES)
    whole = through(row_of(LENGTHS, (0,) * len(LENGTHS)), [tensor.index_select(1, places) for tensor in given])[0]
    assert torch.equal(through(row_of(LENGTHS, PREFIXES), given)[0], whole.index_select(1, own))


def test_a_tree_has_the_bits_that_it_has_alone() -> None:
    shape = (6, 2, 24)
    trees = [((40, 37, 45), (0, 25, 33)), ((90,), (0,)), ((31, 300, 290), (0, 31, 280)), ((7, 7), (0, 6))]
    sizes = [sum(lengths) - sum(prefixes) for lengths, prefixes in trees]
    parts = [tensors_of(size, shape, seed=seed) for seed, size in enumerate(sizes)]
    alone = [through(row_of(*tree), given) for tree, given in zip(trees, parts, strict=True)]
    for seed in range(3):
        order = list(range(len(trees)))
        random.Random(seed).shuffle(order)
        lengths, prefixes = (sum((trees[index][part] for index in order), ()) for part in (0, 1))
        given = [torch.cat([parts[index][place] for index in order], dim=1) for place in range(4)]
        for place, tensor in enumerate(through(row_of(lengths, prefixes), given)):
            for index, part in zip(order, tensor.split([sizes[index] for index in order], dim=1), strict=True):
                assert torch.equal(part, alone[index][place]), (order, index, place)


def test_threads_do_not_change_the_bits() -> None:
    layout = SharedLayout.of((200, 150, 150, 190, 60), (0, 100, 120, 120, 0))
    assert layout.roots.tolist() == [0, 0, 0, 0, 4]
    q, k, v, grad = (tensor[0] for tensor in tensors_of(layout.num_places, (4, 2, 64)))
    out, lse = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)), torch.full(q.shape[:2], 9.0)
    first, *others = (
        differentiate(grad, (q, k, v), (out, lse), layout=layout, scale=0.1, num_threads=count)
        for count in (1, 2, 3, 2)
    )
    for other in others:
        assert all(map(torch.equal, other, first))


@pytest.mark.parametrize("place", [(9, 3), (5, 11), (13, -1), (15, 2)])
def test_sources_that_are_not_those_of_the_document_before(place: tuple[int, int]) -> None:
    """Nothing is read or written where the layout's parts contradict each other."""
    layout = SharedLayout.of((5, 6, 5), (0, 3, 4))
    assert layout.sources is not None
    sources = layout.sources.clone()
    sources[place[0]] = place[1]
    q, k, v, grad = (tensor[0] for tensor in tensors_of(layout.num_places, (2, 2, 8)))
    with pytest.raises(ModelError) as caught:
        differentiate(grad, (q, k, v), (q, q[..., 0].contiguous()), layout=replace(layout, sources=sources), scale=1.0)
    assert caught.value.path == "layout"
