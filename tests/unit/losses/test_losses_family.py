"""The members of the family of policy losses: values and gradients worked by hand, and a peer's own numbers."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from forge.config.algorithm import AlgorithmConfig
from forge.errors import ConfigError
from forge.losses import Correction, KLPenalty, PolicyLoss, TokenView, clipped_value_loss, effective_samples, make_loss
from forge.losses.correction import SequenceMask
from forge.losses.surrogates import sequence_log_ratio
from peer_losses import TRL_LOSSES, like_trl
from policy_views import TOTAL, doubles, hand_view


def tried(loss: PolicyLoss, view: TokenView | None = None) -> tuple[float, list[float], dict[str, float]]:
    """Total, gradient by token, and metrics."""
    view = hand_view() if view is None else view
    terms = loss(view)
    (gradient,) = torch.autograd.grad(terms.total, view.logprobs_T)
    return float(terms.total.detach()), gradient.tolist(), {name: float(value) for name, value in terms.metrics.items()}


def near(value: Any) -> Any:
    return pytest.approx(value, abs=1e-12)


# ---- By hand ---------------------------------------------------------------------------------------------------------
# policy_views has six tokens of two samples: ratios 1.5 and 0.5 with A = 1, then 1.1 with A = -2 and 0.5 with A = -1,
# weight 2. The first token of each sample does not count.


def test_dual_clipping_bounds_the_loss_of_a_negative_advantage() -> None:
    """1.05 x 2 = 2.1 in place of 2.2 at the ratio 1.1, and no gradient; the ratio 0.5 is below the bound."""
    total, gradient, metrics = tried(PolicyLoss(dual_clip=1.05))
    assert total == near(TOTAL - 0.1)
    assert gradient == near([0, 0, -0.5, 0, 0, 0])
    assert metrics["clip_dual"] == 1
    assert tried(PolicyLoss(dual_clip=1.2))[0] == near(TOTAL)


def test_gspo_has_one_ratio_for_a_sample() -> None:
    """sqrt(1.5 x 0.5) = 0.8660 is within the bounds; sqrt(1.1 x 0.5) = 0.7416 is cut at 0.8, for both advantages."""
    total, gradient, metrics = tried(PolicyLoss(kind="gspo"))
    ratio = math.sqrt(0.75)
    assert total == near(-2 * ratio + 0.8 * 2 + 2 * 0.8 * 1)
    assert gradient == near([0, -ratio, -ratio, 0, 0, 0])
    assert metrics["ratio"] == near(2 * ratio + 3 * math.sqrt(0.55))
    assert (metrics["clip_low"], metrics["clip_high"]) == (3, 0)
    assert metrics["sampler_ratio"] == near(1.5 + 0.5 + 1.1 + 2 * 0.5)


def test_gspo_of_a_sample_of_which_nothing_counts_is_finite() -> None:
    view = hand_view(weights_T=doubles([0, 1, 1, 0, 0, 0]))
    total, gradient, _ = tried(PolicyLoss(kind="gspo", average="sequence_mean"), view)
    assert total == near(-math.sqrt(0.75))
    assert gradient == near([0, -math.sqrt(0.75) / 2, -math.sqrt(0.75) / 2, 0, 0, 0])
    assert torch.isfinite(sequence_log_ratio(view, doubles([math.inf] * 6))).all()


@pytest.mark.parametrize(
    ("clip_low", "weights", "num_low"),
    [(1.0, [1.2, 0.5, 1.1, 0.5], 0), (0.2, [1.2, 0.8, 1.1, 0.8], 3)],
)
def test_cispo_clips_a_weight_and_keeps_every_gradient(clip_low: float, weights: list[float], num_low: int) -> None:
    view = hand_view()
    total, gradient, metrics = tried(PolicyLoss(kind="cispo", clip_low=clip_low), view)
    first, second, third, fourth = weights
    expected = [0, -first, -second, 0, 2 * third, 2 * fourth]
    assert gradient == near(expected)
    assert total == near(float((doubles(expected) * view.logprobs_T.detach()).sum()))
    assert (metrics["clip_low"], metrics["clip_high"]) == (num_low, 1)


def test_reinforce_does_not_look_at_the_ratio() -> None:
    view = hand_view()
    total, gradient, metrics = tried(PolicyLoss(kind="reinforce", clip_low=0.0, clip_high=0.0), view)
    assert gradient == near([0, -1, -1, 0, 2, 2])
    assert total == near(float((doubles(gradient) * view.logprobs_T.detach()).sum()))
    assert "clip_low" not in metrics


def test_sapo_fades_with_the_distance_of_the_ratio_from_1() -> None:
    """-(4 / tau) s A with s = 1 / (1 + e^-(tau (r - 1))), and the gradient -4 s (1 - s) r A; tau by the sign of A."""
    loss = PolicyLoss(kind="sapo", tau_positive=2.0, tau_negative=3.0)
    total, gradient, metrics = tried(loss)
    value, slopes = 0.0, [0.0]
    for ratio, advantage, weight, tau in [(1.5, 1, 1, 2), (0.5, 1, 1, 2), (1.1, -2, 1, 3), (0.5, -1, 2, 3)]:
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        value -= weight * 4 / tau * gate * advantage
        slopes.append(-weight * 4 * gate * (1 - gate) * ratio * advantage)
    assert total == near(value)
    assert gradient == near([*slopes[:3], 0.0, *slopes[3:]])
    assert "clip_low" not in metrics


def test_sapo_at_the_ratio_1_has_the_gradient_of_the_ratio() -> None:
    loss = PolicyLoss(kind="sapo", proximal="trainer", tau_positive=0.3, tau_negative=7.0)
    assert tried(loss)[1] == near([0, -1, -1, 0, 2, 2])


def test_sapo_of_a_ratio_beyond_all_bounds_is_finite_and_has_no_gradient() -> None:
    view = hand_view()
    view = hand_view(fields={**view.fields, "old_logprobs": doubles([-1, -math.inf, -0.5, -1, -math.inf, -0.7])})
    total, gradient, _ = tried(PolicyLoss(kind="sapo"), view)
    assert math.isfinite(total)
    assert (gradient[1], gradient[4]) == (0, 0)


# ---- Between sampler and trainer -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        # The geometric means are sqrt(0.75) = 0.866 and sqrt(0.55) = 0.742, the products 0.75 and 0.55.
        (SequenceMask(low=0.8), [1, 0]),
        (SequenceMask(high=0.8), [0, 1]),
        (SequenceMask(low=0.7, high=0.9), [1, 1]),
        (SequenceMask(ratio="product", low=0.6, high=0.8), [1, 0]),
        (SequenceMask(ratio="product", low=0.8), [0, 0]),
    ],
)
@pytest.mark.parametrize(
    ("kind", "weights"), [("truncate", [1.2, 0.8, 1.1, 0.8]), ("none", [1, 1, 1, 1]), ("mask", [0, 0, 1.1, 0])]
)
def test_a_sequence_mask_leaves_out_whole_sequences_whatever_weighs_their_tokens(
    mask: SequenceMask, kept: list[int], kind: Any, weights: list[float]
) -> None:
    correction = Correction(kind=kind, low=0.8, high=1.2, sequence_mask=mask)
    loss = PolicyLoss(proximal="trainer", correction=correction)
    assert loss.needs_whole_sequences
    _, gradient, metrics = tried(loss)
    first, second = ([kept[0] * each for each in weights[:2]], [kept[1] * each for each in weights[2:]])
    assert gradient == near([0, -first[0], -first[1], 0, 2 * second[0], 2 * second[1]])
    assert metrics["sequence_masked"] == 2 * (1 - kept[0]) + 3 * (1 - kept[1])
    unmasked = tried(PolicyLoss(proximal="trainer", correction=replace(correction, sequence_mask=None)))[2]
    assert metrics == near({**unmasked, "sequence_masked": metrics["sequence_masked"]})


def test_a_sequence_mask_works_with_the_samplers_ratio_in_the_loss() -> None:
    """It only leaves out: the first sequence has the loss of `clip`, -1.2 - 0.5."""
    total, gradient, _ = tried(PolicyLoss(correction=Correction(sequence_mask=SequenceMask(low=0.8))))
    assert total == near(-1.7)
    assert gradient == near([0, 0, -0.5, 0, 0, 0])


def test_a_sequence_mask_measures_all_samples_of_a_sequence_together() -> None:
    """1.5 x 0.5 x 1.1 x 0.5 = 0.4125, whose fourth root is 0.8014."""
    for low, is_kept in ((0.80, True), (0.81, False)):
        loss = PolicyLoss(correction=Correction(sequence_mask=SequenceMask(low=low)))
        assert tried(loss, hand_view(sequences=(0, 0)))[0] == near(TOTAL if is_kept else 0.0)


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"low": -1.0}, "low"),
        ({"low": 2.0, "high": 1.0}, "low"),
        ({"high": 0.0}, "low"),
        ({"ratio": "mean"}, "ratio"),
    ],
)
def test_a_sequence_mask_out_of_range_is_refused(keys: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SequenceMask(**keys)
    assert refused.value.path == f"correction.sequence_mask.{path}"
    assert refused.value.repair


@pytest.mark.parametrize("name", ["tau_positive", "tau_negative"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_of_sapo_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError) as refused:
        PolicyLoss(kind="sapo", **{name: value})  # type: ignore[arg-type]
    assert refused.value.path == name


@pytest.mark.parametrize(
    ("correction", "weights", "num_outside"),
    [
        (Correction(kind="none"), [1, 1, 1, 1], None),
        (Correction(kind="truncate", high=1.2), [1.2, 0.5, 1.1, 0.5], 1),
        (Correction(kind="mask", low=0.8, high=1.3), [0, 0, 1.1, 0], 4),
        (Correction(kind="mask", high=1.3), [0, 0.5, 1.1, 0.5], 1),
        # The products: 1.5 x 0.5 = 0.75 and 1.1 x 0.5 = 0.55.
        (Correction(kind="truncate", level="sequence", high=0.7), [0.7, 0.7, 0.55, 0.55], 2),
        (Correction(kind="mask", level="sequence", low=0.6), [0.75, 0.75, 0, 0], 3),
    ],
)
@pytest.mark.parametrize("kind", ["clip", "reinforce"])
def test_corrections_by_hand(
    correction: Correction, weights: list[float], num_outside: float | None, kind: Any
) -> None:
    """Against the trainer's own logprobs the ratio is 1, so that each token's gradient is -A, times the correction."""
    loss = PolicyLoss(kind=kind, proximal="trainer", correction=correction)
    _, gradient, metrics = tried(loss)
    first, second, third, fourth = weights
    assert gradient == near([0, -first, -second, 0, 2 * third, 2 * fourth])
    assert metrics.get("sampler_ratio_outside") == num_outside
    assert metrics["ratio"] == near(5)
    if correction.level == "sequence":
        extremes = (metrics["sampler_ratio_max"], metrics["sampler_ratio_min"], metrics["sampler_ratio"])
        assert extremes == near((0.75, 0.55, 2 * 0.75 + 3 * 0.55))


def test_a_ratio_that_is_in_the_loss_is_not_multiplied_in_again() -> None:
    """Only the ratio 1.1 is inside; its loss is 2.2, and 1.1 x 2.2 would count the ratio twice."""
    total, gradient, metrics = tried(PolicyLoss(correction=Correction(kind="mask", low=0.8, high=1.3)))
    assert total == near(2.2)
    assert gradient == near([0, 0, 0, 0, 2.2, 0])
    assert metrics["sampler_ratio_outside"] == 4
    reinforce = PolicyLoss(kind="reinforce", correction=Correction(kind="truncate", high=1.2))
    assert tried(reinforce)[1] == near([0, -1.2, -0.5, 0, 2.2, 1.0])


def test_a_second_step_on_a_batch_is_compared_with_the_trainer_before_the_first() -> None:
    """That had half of the sampler's probabilities: ratios of 3, 1, 2.2 and 1, and a correction of 0.5."""
    view = hand_view()
    proximal = view.fields["old_logprobs"] + math.log(0.5)
    view = hand_view(fields={**view.fields, "proximal_logprobs": proximal})
    loss = PolicyLoss(proximal="trainer", iterations=2, correction=Correction(kind="truncate"))
    assert loss.fields == ("advantages", "old_logprobs", "proximal_logprobs")
    total, gradient, metrics = tried(loss, view)
    assert total == near(0.5 * (-1.2 - 1 + 4.4 + 2))
    assert gradient == near([0, 0, -0.5, 0, 2.2, 1.0])
    assert metrics["sampler_ratio"] == near(2.5)
    first = PolicyLoss(proximal="trainer")
    assert first.fields == ("advantages", "old_logprobs")
    assert PolicyLoss(kind="reinforce", proximal="trainer", iterations=2).fields == ("advantages", "old_logprobs")


@pytest.mark.parametrize("kind", ["clip", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_token_that_the_sampler_held_impossible(kind: Any, level: Any) -> None:
    view = hand_view()
    old = torch.where(torch.tensor([False, True] + [False] * 4), -math.inf, view.fields["old_logprobs"])
    view = hand_view(fields={**view.fields, "old_logprobs": old})
    _, gradient, metrics = tried(
        PolicyLoss(kind=kind, proximal="trainer", correction=Correction(kind="truncate", level=level)), view
    )
    assert all(map(math.isfinite, gradient))
    assert metrics["sampler_ratio_outside"] >= 1


def test_the_effective_sample_size() -> None:
    metrics = tried(PolicyLoss())[2]
    means = {name: metrics[name] / 5 for name in ("sampler_ratio", "sampler_ratio_square")}
    assert effective_samples(means) == pytest.approx(0.82**2 / 0.842)
    assert effective_samples({"sampler_ratio": 1.0, "sampler_ratio_square": 1.0}) == 1
    assert effective_samples({"sampler_ratio": math.inf, "sampler_ratio_square": math.inf}) == 0


def test_the_weighted_penalty_has_the_gradient_of_the_divergence() -> None:
    """Over every token that could have been drawn, by the probability of an old policy that drew them."""
    logits = doubles([0.3, -0.4, 1.1]).requires_grad_()
    old, reference = doubles([0.2, 0.5, 0.3]), doubles([0.4, 0.4, 0.2])
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference.log())).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for estimator in ("k1", "k3"):
        fields = {"advantages": torch.zeros(3), "old_logprobs": old.log(), "ref_logprobs": reference.log()}
        view = TokenView(logprobs, old, (3,), fields=fields)
        loss = PolicyLoss(kl=KLPenalty(1.0, estimator, weighted=True))  # type: ignore[arg-type]
        (found,) = torch.autograd.grad(loss(view).total, logits, retain_graph=True)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_reference_that_finds_a_token_far_likelier_leaves_the_gradient_finite() -> None:
    view = TokenView(
        torch.tensor([-200.0], requires_grad=True),
        torch.ones(1),
        (1,),
        fields={name: torch.tensor([-0.1]) for name in ("advantages", "old_logprobs", "ref_logprobs")},
    )
    total, gradient, _ = tried(PolicyLoss(kl=KLPenalty(0.1)), view)
    assert math.isfinite(total)
    assert all(map(math.isfinite, gradient))


# ---- The critic ------------------------------------------------------------------------------------------------------


def test_the_value_loss_by_hand() -> None:
    """The first went too far towards its return (0.5, allowed 0.2): its twin 0.7 counts. The others do themselves."""
    values = doubles([1.0, 0.2, 2.0]).requires_grad_()
    returns, old = doubles([2.0, 1.0, 1.0]), doubles([0.5, 0.5, 1.0])
    loss = clipped_value_loss(values, returns, old, clip=0.2)
    assert loss.tolist() == near([1.3**2 / 2, 0.8**2 / 2, 0.5])
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == near([0, -0.8, 1.0])
    assert clipped_value_loss(values, returns, old).tolist() == near([0.5, 0.32, 0.5])
    assert torch.autograd.gradcheck(lambda leaf: clipped_value_loss(leaf, returns, old, clip=0.2), (values,))
    with pytest.raises(ConfigError) as refused:
        clipped_value_loss(values, returns, old, clip=0.0)
    assert (refused.value.path, refused.value.value) == ("clip", 0.0)


# ---- From a configuration --------------------------------------------------------------------------------------------


def test_a_configuration_becomes_a_loss() -> None:
    loss = make_loss(AlgorithmConfig(), max_tokens=None)
    assert loss == PolicyLoss()
    assert not loss.needs_entropy
    config = AlgorithmConfig.model_validate(
        {
            "preset": "dr_grpo",
            "loss": {"dual_clip": 3, "proximal": "trainer", "correction": {"kind": "truncate", "high": 5.0}},
            "kl": {"coefficient": 0.02, "estimator": "k2", "weighted": True},
        }
    )
    loss = make_loss(config, max_tokens=32, temperature=0.7, iterations=2)
    assert loss == PolicyLoss(
        dual_clip=3.0,
        average="constant",
        length=32,
        proximal="trainer",
        iterations=2,
        correction=Correction(kind="truncate", high=5.0),
        kl=KLPenalty(0.02, "k2", weighted=True),
        temperature=0.7,
    )
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_a_penalty_in_the_reward_is_not_in_the_loss() -> None:
    config = AlgorithmConfig.model_validate({"kl": {"coefficient": 0.1, "place": "reward"}})
    assert make_loss(config, max_tokens=8).fields == ("advantages", "old_logprobs")


def test_the_exact_entropy_is_reported_where_it_was_asked_for() -> None:
    """Of the four tokens that count, 1 + 2 + 3 + 2 x 4; the loss stays as it is."""
    loss = make_loss(AlgorithmConfig(), max_tokens=8, exact_entropy=True)
    assert loss.needs_entropy
    total, _, metrics = tried(loss, hand_view(entropy_T=doubles([9, 1, 2, 9, 3, 4])))
    assert (total, metrics["entropy"]) == near((TOTAL, 14))


def test_greedy_sampling_reports_logprobs_of_temperature_1() -> None:
    assert make_loss(AlgorithmConfig(), max_tokens=8, temperature=0.0).temperature == 1.0


def test_a_constant_average_without_a_length_is_refused() -> None:
    config = AlgorithmConfig(preset="dr_grpo")
    with pytest.raises(ConfigError) as refused:
        make_loss(config, max_tokens=None)
    assert refused.value.path == "algorithm.loss.length"
    assert "generator.sampling.max_tokens" in str(refused.value.repair)
    named = AlgorithmConfig.model_validate({"preset": "dr_grpo", "loss": {"length": 7}})
    assert make_loss(named, max_tokens=None).length == make_loss(named, max_tokens=32).length == 7


# ---- A peer's numbers ------------------------------------------------------------------------------------------------
# `peer_losses` has what TRL 1.16.0 computed.


@pytest.mark.parametrize(("keys", "wanted"), [(keys, wanted) for _, keys, wanted in TRL_LOSSES])
def test_the_convention_of_trl_computes_what_trl_does(keys: dict[str, Any], wanted: list[float]) -> None:
    config = AlgorithmConfig.model_validate({"convention": "trl", **keys})
    assert like_trl(make_loss(config, max_tokens=4, iterations=2)) == pytest.approx(wanted, abs=2e-10)
