"""Attention of a trainer over rows that hold a beginning once which several documents have in common, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge.kernels.paged import shared_places
from forge.models.attention import DocumentAttention, expand_shared, sum_shared
from forge.models.flash_attention import Situation, choose_kernel, load_kernel
from forge.models.rows import Documents, RowTask, Sharing

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here"),
]

LENGTHS = (700, 300, 650, 513, 520, 1, 90, 128, 200)
PREFIXES = (0, 256, 256, 400, 499, 0, 0, 0, 77)
"""Among them a tree: the fourth document takes tokens of the first and third, the fifth of these and the fourth."""
NUM_PADDING = 3
HEADS, KV_HEADS, WIDTH = 4, 2, 128
BOUND = 2e-2
"""Of values of size 1 in bfloat16, and of a gradient against the largest of its kind."""


def row(*, num_padding: int = NUM_PADDING) -> RowTask:
    documents = Documents.of(LENGTHS, num_padding=num_padding, device="cuda")
    places, own = shared_places(LENGTHS, PREFIXES)
    padding = torch.arange(num_padding)
    places, own = torch.cat([places, padding + len(own)]).cuda(), torch.cat([own, padding + len(places)]).cuda()
    nothing = torch.zeros(0, dtype=torch.int64, device="cuda")
    sharing = Sharing.of(documents, PREFIXES, places=places, own=own)
    return RowTask(documents, nothing[None], nothing, nothing, sharing=sharing)


def kernels() -> list[str]:
    """Those that can run here."""
    if not torch.cuda.is_available():
        return ["torch"]
    best = choose_kernel("auto", Situation.of(torch.device("cuda"), saves_selectively=False))
    return sorted({"torch", best})


def outcome(task: RowTask, tensors: tuple[Tensor, ...], dtype: torch.dtype, *, kernel: str = "torch") -> list[Tensor]:
    """What attention gives, and the gradients of queries, keys and values."""
    *inputs, gradient = (tensor.to(dtype) for tensor in tensors)
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    attention = DocumentAttention(DocumentAttention.Config())
    attention.kernel = load_kernel(kernel)  # type: ignore[arg-type]
    out = attention(*inputs, attention_masks=attention.row_registry.enter(task))
    out.backward(gradient)
    return [out.detach(), *(tensor.grad for tensor in inputs)]


@pytest.mark.parametrize("kernel", kernels())
def test_one_kernel_over_shared_rows_is_whole_documents(kernel: str) -> None:
    task = row()
    num_places = len(task.sharing.own)  # type: ignore[union-attr]
    maker = torch.Generator("cuda").manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    tensors = tuple(torch.randn(1, num_places, each, WIDTH, generator=maker, device="cuda") for each in heads)
    half = outcome(task, tensors, torch.bfloat16, kernel=kernel)
    wide = outcome(task, tensors, torch.float32)  # each document by itself, whole
    for found, wanted in zip(half, wide, strict=True):
        assert found.shape == wanted.shape
        assert (found.float() - wanted).abs().max() < BOUND * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_copies_are_exact_and_the_same_every_time(dtype: torch.dtype) -> None:
    sharing = row().sharing
    assert sharing is not None
    values = torch.randn(len(sharing.places), KV_HEADS, 80, device="cuda", dtype=dtype)
    first = sum_shared(values, sharing)
    wanted = torch.zeros(len(sharing.own), KV_HEADS, 80, device="cuda", dtype=torch.float64)
    wanted.index_add_(0, sharing.places, values.double())
    assert (first.double() - wanted).abs().max() < (4e-2 if dtype == torch.bfloat16 else 1e-5)
    for _ in range(5):
        assert torch.equal(sum_shared(values, sharing), first)


def test_a_copy_is_what_was_copied() -> None:
    sharing = row().sharing
    assert sharing is not None
    values = torch.randn(len(sharing.own), KV_HEADS, WIDTH, device="cuda")
    assert torch.equal(expand_shared(values, sharing), values[sharing.places])
