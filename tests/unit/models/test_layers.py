"""Experts of any size, in any precision."""

from __future__ import annotations

import pytest
import torch

from forge.models.layers import Experts


@pytest.mark.parametrize(("dim", "hidden_dim"), [(16, 16), (16, 12), (12, 16), (10, 6)])
def test_bfloat16_experts_of_any_size(dim: int, hidden_dim: int) -> None:
    """The kernel for all experts at once takes sizes that are multiples of 8 only."""
    generator = torch.Generator().manual_seed(0)
    experts = Experts.Config(dim=dim, hidden_dim=hidden_dim, num_experts=3).build()
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    rows, counts = torch.randn(7, dim, generator=generator), torch.tensor([4, 0, 3])
    expected = experts(rows, counts)
    found = experts.bfloat16()(rows.bfloat16(), counts)
    found.square().sum().backward()
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
    assert all(weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in experts.parameters())
