"""Policy and supervised losses: values worked by hand, gradients, and sums that do not depend on the split."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from forge.errors import ConfigError, DataError
from forge.losses import (
    Correction,
    CrossEntropy,
    KLPenalty,
    Loss,
    PolicyLoss,
    TokenView,
    clipped_surrogate,
    estimate_kl,
)
from forge.types import Batch, Sample
from policy_views import (
    ADVANTAGES,
    RATIOS,
    TOTAL,
    WEIGHTS,
    doubles,
    hand_batch,
    hand_view,
    joined,
    put_together,
    random_views,
)


def test_the_clipped_surrogate_by_hand() -> None:
    view = hand_view()
    terms = PolicyLoss()(view)
    assert float(terms.total.detach()) == pytest.approx(TOTAL, abs=1e-12)
    (gradient,) = torch.autograd.grad(terms.total, view.logprobs_T)
    assert gradient.tolist() == pytest.approx([0, 0, -0.5, 0, 2.2, 0], abs=1e-12)
    ratio = {"": 1.5 + 0.5 + 1.1 + 2 * 0.5, "_max": 1.5, "_min": 0.5}
    expected = {
        **{f"ratio{name}": value for name, value in ratio.items()},
        **{f"sampler_ratio{name}": value for name, value in ratio.items()},
        "sampler_ratio_square": 2.25 + 0.25 + 1.21 + 2 * 0.25,
        "mismatch": math.log(1.5) + math.log(2) + math.log(1.1) + 2 * math.log(2),
        "mismatch_max": math.log(2),
        "clip_low": 2.0,
        "clip_high": 1.0,
        "approx_kl": sum(weight * (r - 1 - math.log(r)) for r, weight in zip(RATIOS, WEIGHTS, strict=True)),
        "entropy": -float((doubles(WEIGHTS) * view.logprobs_T.detach()).sum()),
    }
    found = {name: float(value) for name, value in terms.metrics.items()}
    assert found.pop("mismatch_outside") in (4.0, 5.0)  # 1.1 lies on the bound
    assert found == pytest.approx(expected, abs=1e-12)
    assert not any(value.requires_grad for value in terms.metrics.values())


def test_uneven_clipping() -> None:
    """The ratio 1.5 of a positive advantage is cut at 1.28, the ratio 0.5 of a negative one not at all."""
    terms = PolicyLoss(clip_low=1.0, clip_high=0.28)(hand_view())
    assert float(terms.total.detach()) == pytest.approx(-1.28 - 0.5 + 2.2 + 2 * 0.5, abs=1e-12)
    assert float(terms.metrics["clip_low"]) == 0
    open_above = PolicyLoss(clip_high=math.inf)(hand_view())
    assert float(open_above.total.detach()) == pytest.approx(TOTAL - 0.3, abs=1e-12)


@pytest.mark.parametrize(
    ("policy", "loss"),
    [
        (PolicyLoss(average="token_mean"), TOTAL / 5),
        (PolicyLoss(average="sequence_mean"), ((-1.2 - 0.5) / 2 + (2.2 + 1.6) / 3) / 2),
        (PolicyLoss(average="constant", length=4), TOTAL / 8),
    ],
)
def test_averages_by_hand(policy: PolicyLoss, loss: float) -> None:
    total = policy(hand_view()).total.detach()
    assert float(total) / policy.normalizer(hand_batch()) == pytest.approx(loss, abs=1e-12)


def test_a_sample_of_which_nothing_counts_does_not_change_a_mean_over_samples() -> None:
    policy = PolicyLoss(average="sequence_mean")
    extra = Batch.of([*hand_batch().samples(), Sample(torch.arange(2), torch.zeros(2))])
    assert policy.normalizer(extra) == policy.normalizer(hand_batch()) == 2
    assert PolicyLoss(average="constant", length=4).normalizer(extra) == 12
    view = hand_view(weights_T=doubles([0, 1, 1, 0, 0, 0]))
    total = policy(view).total
    assert float(total.detach()) == pytest.approx(-0.85, abs=1e-12)
    assert torch.isfinite(torch.autograd.grad(total, view.logprobs_T)[0]).all()


@pytest.mark.parametrize(
    ("estimator", "each"),
    [("k1", lambda r: -math.log(r)), ("k2", lambda r: math.log(r) ** 2 / 2), ("k3", lambda r: r - 1 - math.log(r))],
)
def test_the_penalty_for_leaving_the_reference(estimator: Any, each: Any) -> None:
    view = hand_view()
    reference = view.logprobs_T.detach() + doubles([5, 2, 0.5, 5, 1, 4]).log()
    view = hand_view(fields={**view.fields, "ref_logprobs": reference})
    policy = PolicyLoss(kl=KLPenalty(0.1, estimator))
    assert policy.fields == ("advantages", "old_logprobs", "ref_logprobs")
    terms = policy(view)
    divergence = each(2) + each(0.5) + each(1) + 2 * each(4)
    assert float(terms.metrics["kl"]) == pytest.approx(divergence, abs=1e-12)
    assert float(terms.total.detach()) == pytest.approx(TOTAL + 0.1 * divergence, abs=1e-12)


def test_estimates_have_the_divergence_as_their_mean() -> None:
    policy, reference = doubles([0.5, 0.3, 0.2]), doubles([0.4, 0.4, 0.2])
    exact = float((policy * (policy / reference).log()).sum())
    for estimator in ("k1", "k3"):
        mean = float((policy * estimate_kl(policy.log(), reference.log(), estimator)).sum())
        assert mean == pytest.approx(exact, abs=1e-12)


def test_the_entropy_bonus() -> None:
    entropy = doubles([math.nan, 1, 2, math.inf, 3, 4]).requires_grad_()
    bonus = PolicyLoss(entropy_coefficient=0.1)
    assert bonus.needs_entropy
    assert not PolicyLoss().needs_entropy
    terms = bonus(hand_view(entropy_T=entropy))
    assert float(terms.total.detach()) == pytest.approx(TOTAL - 0.1 * (1 + 2 + 3 + 8), abs=1e-12)
    assert float(terms.metrics["entropy"]) == 14
    (gradient,) = torch.autograd.grad(terms.total, entropy)
    assert gradient.tolist() == pytest.approx([0, -0.1, -0.1, 0, -0.1, -0.2])
    reported = PolicyLoss()(hand_view(entropy_T=entropy))
    assert float(reported.metrics["entropy"]) == 14
    assert float(reported.total.detach()) == pytest.approx(TOTAL, abs=1e-12)


def test_cross_entropy_by_hand() -> None:
    view = TokenView(doubles([-9.0, -1.0, -0.5]).requires_grad_(), doubles([0, 1, 0.5]), (3,))
    loss = CrossEntropy()
    terms = loss(view)
    assert float(terms.total.detach()) == float(terms.metrics["nll"]) == 1.25
    assert torch.autograd.grad(terms.total, view.logprobs_T)[0].tolist() == [0, -1, -0.5]
    assert (loss.is_nll, loss.fields, loss.needs_entropy) == (True, (), False)
    assert loss.normalizer(Batch.of([Sample(torch.arange(3), torch.tensor([0, 1, 0.5]))])) == 1.5


SMOOTH: list[Loss] = [
    CrossEntropy(),
    PolicyLoss(entropy_coefficient=0.03, kl=KLPenalty(0.05)),
    PolicyLoss(average="sequence_mean", kl=KLPenalty(0.05, "k2"), clip_high=0.28),
    PolicyLoss(average="constant", length=64, kl=KLPenalty(0.05, "k1"), entropy_coefficient=0.1),
    PolicyLoss(dual_clip=1.1, correction=Correction(kind="mask", low=0.8, high=1.3)),
    PolicyLoss(kind="gspo", average="sequence_mean", clip_low=0.05, clip_high=0.05, kl=KLPenalty(0.1, weighted=True)),
    PolicyLoss(kind="reinforce", proximal="trainer", iterations=3),
    PolicyLoss(proximal="trainer", iterations=2, correction=Correction(kind="truncate", level="sequence", high=1.05)),
    PolicyLoss(average="sequence_mean", count_masked=True, kl=KLPenalty(0.5, "k2", clamp=0.01)),
]
"""Losses whose gradient is the derivative of their value."""

WEIGHED: list[Loss] = [
    PolicyLoss(kind="cispo", clip_low=1.0, clip_high=0.1),
    PolicyLoss(kind="reinforce", correction=Correction(kind="truncate", high=1.1)),
    PolicyLoss(kind="gspo", proximal="trainer", correction=Correction(kind="mask", level="sequence", high=1.2)),
    PolicyLoss(proximal="trainer", average="sequence_mean", correction=Correction(kind="mask", low=0.9, high=1.1)),
    PolicyLoss(proximal="trainer", correction=Correction(kind="truncate", low=0.9, high=math.inf)),
    PolicyLoss(kl=KLPenalty(0.5, "k3", clamp=0.02, score_gradient=True)),
]
"""Losses with weights that depend on the logprobs and have no gradient."""

EVERY_LOSS = [*SMOOTH, *WEIGHED]


@pytest.mark.parametrize("loss", EVERY_LOSS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_tokens_of_weight_0_never_count(loss: Loss, poison: float) -> None:
    clean, spoiled = random_views(poison=None), random_views(poison=poison)
    for one, other in zip(clean, spoiled, strict=True):
        expected, found = loss(one), loss(other)
        assert torch.equal(found.total, expected.total)
        assert {name: float(value) for name, value in found.metrics.items()} == {
            name: float(value) for name, value in expected.metrics.items()
        }
        assert torch.isfinite(found.total)
        gradient, wanted = (
            torch.autograd.grad(terms.total, view.logprobs_T)[0] for terms, view in ((found, other), (expected, one))
        )
        assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_sums_do_not_depend_on_split_or_order(loss: Loss) -> None:
    views = random_views(poison=None)
    whole = loss(joined(views))
    gradient = torch.autograd.grad(whole.total, [view.logprobs_T for view in views])
    order = random.Random(5)
    for num_parts in (1, 2, 3, 4, 5, len(views)):
        shuffled = order.sample(range(len(views)), len(views))
        parts = [shuffled[start::num_parts] for start in range(num_parts)]
        terms = [loss(joined([views[index] for index in part])) for part in parts]
        total = torch.stack([term.total for term in terms]).sum()
        torch.testing.assert_close(total, whole.total, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(put_together(terms), dict(whole.metrics), rtol=1e-12, atol=1e-12)
        again = torch.autograd.grad(total, [view.logprobs_T for view in views])
        torch.testing.assert_close(again, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", SMOOTH)
def test_gradcheck_of_losses(loss: Loss) -> None:
    view = joined(random_views(poison=None))

    def total(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return loss(TokenView(logprobs, view.weights_T, view.lengths, entropy, view.fields)).total

    assert view.entropy_T is not None
    leaves = (view.logprobs_T.detach().requires_grad_(), view.entropy_T.detach().requires_grad_(loss.needs_entropy))
    assert torch.autograd.gradcheck(total, leaves)


def test_a_micro_batch_in_which_nothing_counts() -> None:
    view = hand_view(weights_T=torch.zeros(6, dtype=torch.float64))
    for average in ("token_mean", "sequence_mean"):
        terms = PolicyLoss(average=average)(view)  # type: ignore[arg-type]
        assert float(terms.total.detach()) == 0
        assert float(terms.metrics["ratio_max"]) == -math.inf
        assert float(terms.metrics["ratio_min"]) == math.inf
    empty = TokenView(doubles([]), doubles([]), (), fields={"advantages": doubles([]), "old_logprobs": doubles([])})
    assert float(PolicyLoss()(empty).total) == 0


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: PolicyLoss(clip_low=1.5), "clip_low"),
        (lambda: PolicyLoss(clip_low=math.nan), "clip_low"),
        (lambda: PolicyLoss(clip_high=-0.1), "clip_high"),
        (lambda: PolicyLoss(average="mean"), "average"),  # type: ignore[arg-type]
        (lambda: PolicyLoss(average="constant"), "length"),
        (lambda: PolicyLoss(average="constant", length=0), "length"),
        (lambda: PolicyLoss(length=5), "length"),
        (lambda: PolicyLoss(entropy_coefficient=-1), "entropy_coefficient"),
        (lambda: PolicyLoss(kind="ppo"), "kind"),  # type: ignore[arg-type]
        (lambda: PolicyLoss(proximal="reference"), "proximal"),  # type: ignore[arg-type]
        (lambda: PolicyLoss(dual_clip=1.0), "dual_clip"),
        (lambda: PolicyLoss(iterations=0), "iterations"),
        (lambda: PolicyLoss(temperature=0.0), "temperature"),
        (lambda: PolicyLoss(correction=Correction(kind="truncate")), "correction.kind"),
        (lambda: PolicyLoss(kind="cispo", correction=Correction(kind="truncate")), "correction.kind"),
        (lambda: Correction(kind="cut"), "correction.kind"),  # type: ignore[arg-type]
        (lambda: Correction(level="batch"), "correction.level"),  # type: ignore[arg-type]
        (lambda: Correction(low=3.0, high=2.0), "correction.low"),
        (lambda: Correction(high=0.0), "correction.low"),
        (lambda: KLPenalty(math.inf), "kl.coefficient"),
        (lambda: KLPenalty(0.1, "k4"), "kl.estimator"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_are_refused(make: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.path == path
    assert caught.value.rule
    assert caught.value.repair


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: PolicyLoss()(hand_view(fields={"advantages": doubles(ADVANTAGES)})), "fields['old_logprobs']"),
        (lambda: PolicyLoss(entropy_coefficient=0.1)(hand_view()), "entropy_T"),
        (lambda: hand_view(weights_T=doubles([1.0])), "weights_T"),
        (lambda: hand_view(fields={"advantages": doubles([1.0])}), "fields['advantages']"),
        (lambda: hand_view(lengths=(3, 2)), "lengths"),
    ],
)
def test_tokens_that_are_refused(make: Any, path: str) -> None:
    with pytest.raises(DataError) as caught:
        make()
    assert caught.value.path == path
    assert caught.value.rule
    assert caught.value.repair


@pytest.mark.parametrize("old", [-9999.0, -torch.inf])
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_token_that_the_sampler_held_impossible_leaves_the_gradient_finite(old: float, advantage: float) -> None:
    logprobs = torch.tensor([-0.5, -1.0], requires_grad=True)
    log_ratio = logprobs - torch.tensor([-0.5, old])
    loss = clipped_surrogate(log_ratio, torch.tensor([1.0, advantage]), clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-1.0, -1.2 * advantage])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 0.0]
