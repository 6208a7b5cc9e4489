"""Copies of tokens that documents have in common: their values, and the sum of their gradients."""

from __future__ import annotations

import pytest
import torch

from forge.models.attention import expand_shared
from forge.models.rows import Documents, Sharing

LENGTHS, PREFIXES = (5, 4, 6, 2), (0, 3, 3, 0)
PLACES = [0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 2, 6, 7, 8, 9, 10, 11]
OWN = [0, 1, 2, 3, 4, 8, 12, 13, 14, 15, 16, 17]


def sharing(*, num_padding: int = 1) -> Sharing:
    documents = Documents.of(LENGTHS, num_padding=num_padding)
    return Sharing.of(documents, PREFIXES, places=torch.tensor(PLACES), own=torch.tensor(OWN))


def test_queries_are_the_row_cut_into_documents() -> None:
    queries = sharing().queries
    assert queries.lengths == (5, 1, 3, 2)
    assert queries.offsets.tolist() == [0, 5, 6, 9, 11, 12]


def test_copies_by_place() -> None:
    tokens, starts = sharing().copies
    assert starts.tolist() == [0, 3, 6, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert tokens.tolist()[:10] == [0, 5, 9, 1, 6, 10, 2, 7, 11, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_of_a_place_is_the_sum_over_its_copies(dtype: torch.dtype) -> None:
    values = torch.randn(len(OWN), 2, 3, dtype=dtype, requires_grad=True)
    found = expand_shared(values, sharing())
    assert torch.equal(found, values[PLACES])
    gradient = torch.randn(found.shape, dtype=torch.float64).to(dtype)
    found.backward(gradient)
    wanted = torch.zeros(values.shape, dtype=torch.float64).index_add_(0, torch.tensor(PLACES), gradient.double())
    assert values.grad is not None
    assert values.grad.dtype == dtype
    assert torch.allclose(
        values.grad.double(), wanted.to(dtype).double(), rtol=1e-6, atol=0 if dtype == torch.bfloat16 else 1e-6
    )


def test_sums_in_half_precision_are_rounded_once() -> None:
    """256 + 1 + 1 is 258, which added in bfloat16 step by step would stay 256."""
    values = torch.zeros(len(OWN), 1, 1, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.ones(len(PLACES), 1, 1, dtype=torch.bfloat16)
    gradient[0] = 256
    expand_shared(values, sharing()).backward(gradient)
    assert values.grad is not None
    assert values.grad[0].item() == 258
