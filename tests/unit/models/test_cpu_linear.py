"""The kernel of products gives the bits of torch's own, for any number of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from forge.models import cpu_linear
from forge.models.linear import rows_linear

pytestmark = pytest.mark.skipif(cpu_linear.library() is None, reason="no compiler for the CPU kernels")
SHAPES = ((8, 16), (64, 48), (100, 13), (192, 49), (257, 130), (512, 96), (1408, 64))


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _operands(rows: int, width: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows * 7919 + width)
    return torch.randn(rows, width, generator=draw), torch.randn(outputs, width, generator=draw)


@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_a_product_has_the_bits_of_torchs_own_among_many_rows(width: int, outputs: int, num_threads: int) -> None:
    x, weight = _operands(150, width, outputs)
    whole = F.linear(x, weight)
    for rows in (1, 2, 7, 8, 9, 16, 17, 24, 31, 33, 48, 50, 63, 64, 65, 129, 150):
        found = cpu_linear.product(x[:rows], weight)
        if found is None:
            pytest.skip("in which order this machine's library adds is not known; torch computes")
        assert torch.equal(found, whole[:rows])


def test_a_row_has_the_same_bits_at_any_place() -> None:
    x, weight = _operands(70, 320, 77)
    whole = cpu_linear.product(x, weight)
    assert whole is not None
    for place in (0, 5, 8, 33, 64, 69):
        alone = cpu_linear.product(x[place : place + 1], weight)
        assert alone is not None
        assert torch.equal(alone[0], whole[place])


def test_rows_may_lie_apart() -> None:
    x, weight = _operands(20, 96, 40)
    wide = torch.full((20, 200), float("nan"))
    wide[:, 10:106] = x
    assert torch.equal(cpu_linear.product(wide[:, 10:106], weight), cpu_linear.product(x, weight))


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, weight = _operands(12, 64, 32)
    whole = cpu_linear.product(x, weight)
    x[3] = float("nan")
    spoiled = cpu_linear.product(x, weight)
    assert whole is not None
    assert spoiled is not None
    assert spoiled[3].isnan().all()
    others = [row for row in range(12) if row != 3]
    assert torch.equal(spoiled[others], whole[others])


def test_a_weight_that_does_not_lie_in_one_piece_is_left_to_torch() -> None:
    x, weight = _operands(4, 64, 32)
    assert cpu_linear.product(x, weight.t().contiguous().t()) is None


def test_with_and_without_gradients_a_linear_layer_computes_the_same() -> None:
    x, weight = _operands(24, 512, 96)
    weight.requires_grad_(True)
    with_gradient = rows_linear(x, weight)
    assert with_gradient.requires_grad
    with torch.no_grad():
        assert torch.equal(rows_linear(x[None], weight)[0], with_gradient)
