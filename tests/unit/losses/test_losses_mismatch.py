"""How far sampler and trainer are apart: what is reported, and that it adds up over any split of a batch."""

from __future__ import annotations

import math

import pytest
import torch

from forge.losses import Correction, PolicyLoss, TokenView
from forge.trainer.row_building import Sums
from policy_views import doubles

RATIOS = [7.0, 1.0, 0.899, 0.901, 1.099, 1.101, 0.5]
WEIGHTS = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]


def view(ratios: list[float], weights: list[float], **fields: torch.Tensor) -> TokenView:
    old = doubles([-1.0] * len(ratios))
    given = {"advantages": doubles([1.0] * len(ratios)), "old_logprobs": old, **fields}
    return TokenView((old + doubles(ratios).log()).requires_grad_(), doubles(weights), (len(ratios),), None, given)


def mismatch(loss: PolicyLoss, tokens: TokenView) -> dict[str, float]:
    found = loss(tokens).metrics
    return {name: float(found[name]) for name in ("mismatch", "mismatch_max", "mismatch_outside")}


def test_what_is_reported_by_hand() -> None:
    expected = {
        "mismatch": sum(weight * abs(math.log(r)) for r, weight in zip(RATIOS, WEIGHTS, strict=True)),
        "mismatch_max": math.log(2),
        "mismatch_outside": 1.0 + 1.0 + 2.0,
    }
    assert mismatch(PolicyLoss(), view(RATIOS, WEIGHTS)) == pytest.approx(expected, abs=1e-12)


def test_it_is_of_tokens_even_where_samples_are_corrected() -> None:
    """At the level of samples `sampler_ratio` is a product over tokens; what each token differs by is another thing."""
    whole = PolicyLoss(correction=Correction(kind="mask", level="sequence", high=5.0))
    assert mismatch(whole, view(RATIOS, WEIGHTS)) == mismatch(PolicyLoss(), view(RATIOS, WEIGHTS))


def test_on_later_steps_it_is_that_of_the_first() -> None:
    """Against the logprobs that the trainer had when the batch came, and not those that it has now."""
    loss = PolicyLoss(proximal="trainer", iterations=2)
    before = doubles([-1.0, -0.9, -1.0])
    found = mismatch(loss, view([1.0, 9.0, 9.0], [0.0, 1.0, 1.0], proximal_logprobs=before))
    assert found == pytest.approx({"mismatch": 0.1, "mismatch_max": 0.1, "mismatch_outside": 1.0}, abs=1e-12)


def test_tokens_that_do_not_count_say_nothing() -> None:
    nothing = view([math.nan, 3.0], [0.0, 0.0])
    assert mismatch(PolicyLoss(), nothing) == {"mismatch": 0.0, "mismatch_max": 0.0, "mismatch_outside": 0.0}


@pytest.mark.parametrize("cut", range(1, len(RATIOS)))
def test_micro_batches_and_ranks_add_up(cut: int) -> None:
    whole = mismatch(PolicyLoss(), view(RATIOS, WEIGHTS))
    parts = [
        mismatch(PolicyLoss(), view(r, w)) for r, w in ((RATIOS[:cut], WEIGHTS[:cut]), (RATIOS[cut:], WEIGHTS[cut:]))
    ]
    assert (Sums(metrics=parts[0]) + Sums(metrics=parts[1])).metrics == pytest.approx(whole, abs=1e-12)
