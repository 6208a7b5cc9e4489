"""The Bradley–Terry loss and the calibration of reward models, against values worked out by hand and by other means."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from forge.losses import BradleyTerry, ValueView
from forge.losses.calibration import bin_sums, calibration, without_bins
from forge.losses.reward import pair_losses, summarize_pairs

MARGINS = [2.0, 0.1, -0.4, 3.0, -1.5, 0.9, 0.0, 1.2]


def view(values: list[float], *, margins: list[float] | None = None, dtype: torch.dtype = torch.float64) -> ValueView:
    """Pairs of samples of two tokens each, whose last tokens have these values: chosen, rejected, chosen, …"""
    num = len(values)
    leaf = torch.zeros(2 * num, dtype=dtype)
    leaf[1::2] = torch.tensor(values, dtype=dtype)
    weights = torch.tensor([0.0, 1.0] * num, dtype=dtype)
    fields = {"chosen": torch.tensor([1.0, 1.0, 0.0, 0.0] * (num // 2), dtype=dtype)}
    if margins is not None:
        fields["margin"] = torch.tensor([each for margin in margins for each in [margin] * 4], dtype=dtype)
    sequences = tuple(index // 2 for index in range(num))
    return ValueView(leaf.requires_grad_(), weights, (2,) * num, fields, sequences)


def test_the_loss_of_two_pairs_by_hand() -> None:
    terms = BradleyTerry(centering_coefficient=0.1, has_margins=True)(view([1.0, -1.0, 0.5, 2.0], margins=[0.5, 0.0]))
    first = math.log1p(math.exp(-(2.0 - 0.5))) + 0.1 * 0.0**2
    second = math.log1p(math.exp(1.5)) + 0.1 * 2.5**2
    assert float(terms.total.detach()) == pytest.approx(first + second, abs=1e-12)
    assert float(terms.metrics["accuracy"]) == 1.0
    assert float(terms.metrics["reward_margin"]) == pytest.approx(2.0 - 1.5)
    wrong = [1 - 1 / (1 + math.exp(-2.0)), 1 - 1 / (1 + math.exp(1.5))]
    assert float(terms.metrics["brier"]) == pytest.approx(sum(each**2 for each in wrong), abs=1e-12)


def test_the_gradient_is_that_of_finite_differences() -> None:
    chosen, rejected = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    margins = torch.rand(5, dtype=torch.float64)

    def loss(*rewards: Any) -> Any:
        return pair_losses(*rewards, margins, centering_coefficient=0.3)

    assert torch.autograd.gradcheck(loss, (chosen, rejected))


def test_a_margin_asks_for_more_and_centring_pulls_to_0() -> None:
    low, high = (float(pair_losses(torch.tensor(1.0), torch.tensor(0.0), margin)) for margin in (0.0, 1.0))
    assert high == pytest.approx(math.log(2))
    assert low < high
    shifted = [float(pair_losses(torch.tensor(1.0 + s), torch.tensor(s), centering_coefficient=c)) for s, c in
               ((0.0, 0.0), (5.0, 0.0), (-0.5, 0.1), (5.0, 0.1))]  # fmt: skip
    assert shifted[0] == shifted[1] == shifted[2] < shifted[3]


def expected_error(margins: list[float], num_bins: int) -> float:
    """The expected calibration error, pair by pair, with the edges of bins written out."""
    found = 0.0
    for low in [0.5 + 0.5 * number / num_bins for number in range(num_bins)]:
        inside = []
        for margin in margins:
            confidence = 1 / (1 + math.exp(-abs(margin)))
            if low <= confidence < low + 0.5 / num_bins:
                inside.append((confidence, margin > 0))
        if inside:
            accuracy = sum(right for _, right in inside) / len(inside)
            confidence = sum(each for each, _ in inside) / len(inside)
            found += len(inside) / len(margins) * abs(accuracy - confidence)
    return found


def means(margins: list[float], num_bins: int) -> dict[str, float]:
    tensor = torch.tensor(margins, dtype=torch.float64)
    sums = bin_sums(tensor, torch.ones_like(tensor), num_bins=num_bins)
    return {name: float(value) / len(margins) for name, value in sums.items()}


@pytest.mark.parametrize("num_bins", [1, 3, 10])
def test_the_calibration_error_is_that_of_the_definition(num_bins: int) -> None:
    found = calibration(means(MARGINS, num_bins))
    assert found["ece"] == pytest.approx(expected_error(MARGINS, num_bins), abs=1e-12)
    shares = [value for name, value in found.items() if name.endswith("_share")]
    assert sum(shares) == pytest.approx(1.0)


def test_bins_have_their_confidence_and_accuracy() -> None:
    found = calibration(means([math.log(3.0), math.log(3.0), -math.log(3.0), 0.0], 2))  # 3/4, 3/4, 3/4 and 1/2
    assert found == pytest.approx(
        {
            "ece": 0.25 * abs(0 - 0.5) + 0.75 * abs(2 / 3 - 0.75),
            "calibration/0.500_share": 0.25,
            "calibration/0.500_confidence": 0.5,
            "calibration/0.500_accuracy": 0.0,
            "calibration/0.750_share": 0.75,
            "calibration/0.750_confidence": 0.75,
            "calibration/0.750_accuracy": 2 / 3,
        }
    )
    assert calibration({"loss": 1.0}) == {"loss": 1.0}


def test_bins_add_up_over_micro_batches() -> None:
    values = [value for margin in MARGINS for value in (margin, 0.0)]
    loss = BradleyTerry(calibration_bins=5)
    whole = loss(view(values)).metrics
    parts = [loss(view(values[start : start + 4])).metrics for start in range(0, len(values), 4)]
    for name, value in whole.items():
        assert float(value) == pytest.approx(sum(float(part[name]) for part in parts), abs=1e-12), name
    assert set(without_bins(dict.fromkeys(whole, 0.0))) == {name for name in whole if "calibration" not in name}


def test_mean_and_standard_deviation_of_all_rewards() -> None:
    rewards = [1.0, -1.0, 0.5, 2.0, 3.0, -0.5]
    sums = BradleyTerry()(view(rewards)).metrics
    found = summarize_pairs({name: float(value) / 3 for name, value in sums.items()})
    assert found["reward_mean"] == pytest.approx(sum(rewards) / 6)
    assert found["reward_std"] == pytest.approx(float(torch.tensor(rewards).std(correction=0)))
    assert "reward_square" not in found
