"""The critic's loss: against plain numbers, gradients, and any split of a batch."""

from __future__ import annotations

import math

import pytest
import torch

from forge.errors import DataError
from forge.losses import CriticLoss, ValueLoss, ValueView
from forge.types import Batch, Sample

VALUES = [0.5, 2.0, -1.0, 0.25, 3.0]
RETURNS = [1.0, 1.0, -2.0, 0.0, 9.0]
OLD = [0.4, 1.0, -0.9, 0.25, 9.0]
WEIGHTS = [1.0, 1.0, 1.0, 1.0, 0.0]


def view(values: torch.Tensor, part: slice = slice(None)) -> ValueView:
    fields = {"returns": torch.tensor(RETURNS).double()[part], "old_values": torch.tensor(OLD).double()[part]}
    weights = torch.tensor(WEIGHTS).double()[part]
    return ValueView(values, weights, (len(weights),), fields)


def by_hand(clip: float | None) -> float:
    """Half of the larger squared error of each value and its clipped twin, added up over the tokens that count."""
    total = 0.0
    for value, target, old, weight in zip(VALUES, RETURNS, OLD, WEIGHTS, strict=True):
        twin = value if clip is None else min(max(value, old - clip), old + clip)
        total += weight * max((value - target) ** 2, (twin - target) ** 2) / 2
    return total


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_sum_is_that_of_plain_numbers(clip: float | None) -> None:
    loss = CriticLoss(clip)
    assert isinstance(loss, ValueLoss)
    terms = loss(view(torch.tensor(VALUES).double()))
    assert float(terms.total) == pytest.approx(by_hand(clip), abs=1e-12)
    errors = [(value - target) ** 2 for value, target in zip(VALUES[:4], RETURNS[:4], strict=True)]
    assert float(terms.metrics["squared_error"]) == pytest.approx(math.fsum(errors))
    assert float(terms.metrics["clip_fraction"]) == (0 if clip is None else 1)  # only 2.0 is far from its old value


def test_gradients_are_those_of_differences() -> None:
    values = torch.tensor(VALUES, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda leaf: CriticLoss(0.2)(view(leaf)).total, (values,))
    CriticLoss(0.2)(view(values)).total.backward()
    assert values.grad is not None
    # The second moved away from its return and keeps its gradient; the last does not count.
    assert values.grad.tolist() == pytest.approx([-0.5, 1.0, 1.0, 0.25, 0.0])


def test_a_value_that_moved_far_enough_gets_no_gradient() -> None:
    values = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    fields = {"returns": torch.ones(1).double(), "old_values": torch.tensor([0.4]).double()}
    terms = CriticLoss(0.2)(ValueView(values, torch.ones(1).double(), (1,), fields))
    terms.total.backward()
    assert float(terms.total.detach()) == pytest.approx((0.6 - 1) ** 2 / 2)
    assert values.grad is not None
    assert values.grad.tolist() == [0.0]


def test_parts_of_a_batch_add_up() -> None:
    values = torch.tensor(VALUES).double()
    parts = [CriticLoss(0.2)(view(values[part], part)).total for part in (slice(0, 2), slice(2, 5))]
    assert float(sum(parts)) == pytest.approx(by_hand(0.2), abs=1e-12)


def test_what_does_not_count_may_be_anything() -> None:
    values = torch.tensor([*VALUES[:4], math.nan]).double().requires_grad_()
    total = CriticLoss(0.2)(view(values)).total
    total.backward()
    assert float(total.detach()) == pytest.approx(by_hand(0.2))
    assert values.grad is not None
    assert values.grad.isfinite().all()


def test_a_batch_without_its_fields_is_refused() -> None:
    weights = torch.tensor([0.0, 1.0])
    batch = Batch.of([Sample(torch.tensor([1, 2]), weights)])
    assert CriticLoss().normalizer(batch) == 1
    with pytest.raises(DataError) as caught:
        CriticLoss()(ValueView(torch.zeros(2), weights, (2,)))
    assert caught.value.path == "fields['returns']"
