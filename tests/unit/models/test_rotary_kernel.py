"""The kernel of rotary embeddings gives the bits of the operations that training uses."""

from __future__ import annotations

import pytest
import torch

from forge.errors import ModelError
from forge.kernels import cpu_layers
from forge.models.layers import Rotary

pytestmark = pytest.mark.skipif(cpu_layers.library() is None, reason="no compiler for the CPU kernels")


def rotary(width: int, max_seq_len: int = 64, **stretch: object) -> Rotary:
    made = Rotary.Config(dim=width, max_seq_len=max_seq_len, theta=10_000.0, **stretch).build()
    made.cache = made._precompute_cache()
    return made


@pytest.mark.parametrize("width", [8, 24, 64, 130])
def test_with_and_without_gradients_the_bits_are_the_same(width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    query, key = torch.randn(1, 19, 6, width, generator=draw), torch.randn(1, 19, 2, width, generator=draw)
    positions = torch.randint(0, 64, (1, 19), generator=draw)
    made = rotary(width)
    with_gradients = made(query.requires_grad_(), key.requires_grad_(), positions)
    with torch.no_grad():
        without = made(query, key, positions)
    for one, other in zip(with_gradients, without, strict=True):
        assert one.requires_grad
        assert torch.equal(one.detach(), other)


def test_heads_may_lie_apart() -> None:
    draw = torch.Generator().manual_seed(1)
    wide = torch.randn(9, 5, 40, generator=draw)
    part = wide[:, 1:4, 4:20]
    table, positions = rotary(16).cache, torch.arange(9)
    found = cpu_layers.rotated(part, table, positions)
    assert torch.equal(found, cpu_layers.rotated(part.contiguous(), table, positions))


@pytest.mark.parametrize("place", [-1, 64])
def test_a_position_beyond_the_table_is_refused(place: int) -> None:
    with pytest.raises(ModelError, match="below 64"):
        cpu_layers.rotated(torch.zeros(2, 1, 8), rotary(8).cache, torch.tensor([0, place]))


def test_a_head_that_cannot_be_halved_or_has_gaps_is_left_to_torch() -> None:
    assert not cpu_layers.rotates(torch.zeros(1, 1, 7))
    assert not cpu_layers.rotates(torch.zeros(1, 1, 16)[..., ::2])
