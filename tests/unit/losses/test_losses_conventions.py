"""The conventions of other libraries: losses and gradients that their own functions computed, and their invariance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from forge.config.algorithm import AlgorithmConfig
from forge.errors import ConfigError
from forge.losses import Correction, KLPenalty, PolicyLoss, TokenView, make_loss
from forge.types import Batch, Sample
from policy_views import doubles, joined, random_views

# Three completions of three, two and two tokens. Of the last one no token counts, as with rollout.mask_truncated. The
# reference of the third token is so low that every estimate of the divergence leaves [-10, 10].
COUNTED = [1, 1, 1, 1, 1, 0, 0]
LENGTHS = (3, 2, 2)
TOKENS = {
    "logprobs": [-0.7, -1.2, -0.4, -2.0, -0.3, -0.8, -1.1],
    "proximal_logprobs": [-1.1, -1.0, -0.5, -1.6, -0.5, -0.7, -1.0],
    "old_logprobs": [-1.0, -1.3, -0.4, -1.7, -0.4, -0.6, -1.2],
    "ref_logprobs": [-0.9, -1.0, -13.6, -1.5, -0.5, -0.9, -1.4],
    "advantages": [0.8, 0.8, 0.8, -1.1, -1.1, 0.5, 0.5],
}
K1, K2, K3 = ({"coefficient": 0.1, "estimator": estimator, "place": "loss"} for estimator in ("k1", "k2", "k3"))
SEQUENCE = {"average": "sequence_mean"}


def tis(**keys: Any) -> dict[str, Any]:
    return {"correction": {"kind": "truncate", "level": "token", **keys}}


def seq_mask_tis(**keys: Any) -> dict[str, Any]:
    return tis(high=math.inf, sequence_mask={"ratio": "geometric_mean", **keys})


def computed(loss: PolicyLoss, **changes: list[float]) -> list[float]:
    """The loss of the batch, and its derivative with respect to the logprob of each token."""
    values = {name: doubles(changes.get(name, each)) for name, each in TOKENS.items()}
    logprobs = values.pop("logprobs").requires_grad_()
    view = TokenView(logprobs, doubles(COUNTED), LENGTHS, fields=values)
    weights = torch.tensor(COUNTED, dtype=torch.float32).split(LENGTHS)
    batch = Batch.of([Sample(torch.arange(len(each)), each) for each in weights])
    total = loss(view).total / loss.normalizer(batch)
    return [float(total.detach()), *torch.autograd.grad(total, logprobs)[0].tolist()]


def by_convention(convention: Any, keys: dict[str, Any], **changes: list[float]) -> list[float]:
    config = AlgorithmConfig.model_validate({"convention": convention, **keys})
    found = computed(make_loss(config, max_tokens=4, iterations=2), **changes)
    assert found[-2:] == [0, 0], "no token of the last completion counts"
    return found[:-2]


# What each library's own functions gave for these tokens, in float64: the loss, then the derivative of each token that
# counts. Their small constants (1e-8 beside a count; OpenRLHF estimates divergences in float32) are why they agree to
# eight digits only.

VERL = [
    # verl 0.9.1, core_algos: compute_policy_loss_vanilla and 0.1 x agg_loss(kl_penalty(…, "k1" and so on)), token-mean
    ({}, [-0.05511566059, 0, -0.1309969205, -0.1768273469, 0, 0.2687086068]),
    ({"kl": K1}, [0.2028843394, 0.02, -0.1109969205, -0.1568273469, 0.02, 0.2887086068]),
    ({"kl": K2}, [1.690984339, 0.004, -0.1349969205, 0.08717265311, -0.01, 0.2727086068]),
    ({"kl": K3}, [0.1490360501, 0.003625384938, -0.1354249757, -0.1768273469, -0.01297442541, 0.2723339917]),
    # the same with loss_agg_mode "seq-mean-token-mean" and the global_batch_size of 3 that its trainer gives
    ({"loss": SEQUENCE}, [0.09291035619, 0, -0.0727760667, -0.09823741461, 0, 0.2239238379]),
    (
        {"loss": SEQUENCE, "kl": K1},
        [0.2345770224, 0.01111111107, -0.06166495562, -0.08712630354, 0.01666666658, 0.2405905045],
    ),
    (
        {"loss": SEQUENCE, "kl": K3},
        [0.2072582619, 0.002014102737, -0.07523609734, -0.09823741461, -0.01081202112, 0.226944992],
    ),
    # compute_policy_loss_gspo, compute_policy_loss_cispo (clip_ratio_low=10, clip_ratio_high=0.2)
    (
        {"preset": "gspo", "loss": {"clip_low": 0.2, "clip_high": 0.2}},
        [0.03706147445, -0.09823741461, -0.09823741461, -0.09823741461, 0.1658868591, 0.1658868591],
    ),
    ({"preset": "cispo"}, [-0.01181357691, -0.192, -0.1309969205, -0.1768273469, 0.1474704101, 0.264]),
    # compute_policy_loss_sapo with tau_pos 1 and tau_neg 1.05, its defaults, and with 2 and 3
    (
        {"preset": "sapo"},
        [0.1095147461, -0.1249000861, -0.07218149666, -0.09796626552, 0.1192827833, 0.2209254662],
    ),
    (
        {"preset": "sapo", "loss": {"tau_positive": 2.0, "tau_negative": 3.0}},
        [-0.07289288146, -0.105073629, -0.07043617589, -0.0971587808, 0.0971365947, 0.2009352174],
    ),
]

OPENRLHF = [
    # OpenRLHF 0.11.2, models.loss.PolicyLoss and 0.1 x aggregate_loss(models.utils.compute_approx_kl(…))
    ({}, [-0.05511566059, 0, -0.1309969205, -0.1768273469, 0, 0.2687086068]),
    ({"kl": K1}, [0.138884338, 0.01999999955, -0.1109969209, -0.1768273469, 0.01999999955, 0.2887086063]),
    ({"kl": K2}, [0.1485843395, 0.003999999724, -0.1349969211, -0.1768273469, -0.009999999776, 0.2727086065]),
    ({"kl": K3}, [0.1490360485, 0.003625383601, -0.1354249756, -0.1768273469, -0.01297442243, 0.2723339904]),
    # token_level_loss=False, policy_loss_type="gspo": completions of which nothing counts are left out of the divisor
    ({"loss": SEQUENCE}, [0.1393655343, 0, -0.1091641, -0.1473561219, 0, 0.3358857568]),
    (
        {"preset": "gspo", "loss": {"clip_low": 0.2, "clip_high": 0.2}},
        [0.05559221167, -0.1473561219, -0.1473561219, -0.1473561219, 0.2488302887, 0.2488302887],
    ),
    # is_correction_level="token", is_correction_mode="clip", is_correction_threshold=[0.95, 1.1]
    ({"loss": tis(low=0.95, high=1.1)}, [-0.04560941563, 0, -0.1440966125, -0.1679859795, 0, 0.2552731765]),
    # is_correction_level="seq", is_correction_mode="mask": sequence-masked TIS without a bound of the tokens' weights.
    # The geometric means are e^0.0333 and 1, so that these leave out the first, none, and the second completion.
    ({"loss": seq_mask_tis(low=0.99, high=1.02)}, [0.4376476836, 0, 0, 0, 0, 0.243137602]),
    ({"loss": seq_mask_tis(low=0.99, high=1.2)}, [-0.0729084476, 0, -0.1768273469, -0.16, 0, 0.243137602]),
    ({"loss": seq_mask_tis(low=1.01, high=1.2)}, [-0.5105561312, 0, -0.1768273469, -0.16, 0, 0]),
]

NEMO = [
    # NeMo RL at 006907a9, the formulas of ClippedPGLossFn and calculate_kl: log r within 20, estimates within 10, each
    # times exp(x - x.detach())
    ({}, [-0.05511566048, 0, -0.1309969202, -0.1768273465, 0, 0.2687086063]),
    ({"kl": K1}, [0.1388843391, 0.02399999995, -0.1149969203, -0.1768273465, 0.00999999998, 0.2927086062]),
    ({"kl": K2}, [0.1485843391, 0.004399999991, -0.1345969202, -0.1768273465, -0.007499999985, 0.2731086062]),
    ({"kl": K3}, [0.1490360498, 0.003999999992, -0.1349969202, -0.1768273465, -0.00999999998, 0.2727086062]),
    # token_level_loss: false; the divisor counts samples whose sample_mask is 1
    ({"loss": SEQUENCE}, [0.1393655336, 0, -0.1091640995, -0.1473561212, 0, 0.3358857551]),
    (
        {"loss": SEQUENCE, "kl": K3},
        [0.3108873913, 0.003333333306, -0.1124974328, -0.1473561212, -0.01249999988, 0.3408857551],
    ),
    # truncated_importance_sampling_type: tis, ratio_min 0.95, ratio 1.1
    ({"loss": tis(low=0.95, high=1.1)}, [-0.04560941554, 0, -0.1440966123, -0.1679859792, 0, 0.2552731759]),
]

TRL = [
    # TRL 1.16.0, GRPOTrainer._compute_loss: loss_type "grpo" averages over all completions, "dapo" over tokens
    (
        {"loss": {**SEQUENCE, "correction": {"kind": "none"}}},
        [0.09291035712, 0, -0.07277606694, -0.09823741494, 0, 0.223923839],
    ),
    # vllm_importance_sampling_mode "token_truncate", clip_min 0.95, clip_max None and 1.1
    (
        {"loss": {**SEQUENCE, **tis(low=0.95, high=math.inf)}},
        [0.08192308923, 0, -0.09823741494, -0.09332554419, 0, 0.212727647],
    ),
    ({"loss": tis(low=0.95, high=1.1)}, [-0.04560941563, 0, -0.1440966125, -0.1679859795, 0, 0.2552731765]),
    # "sequence_truncate", [1.1, 1.2]: the ratios of the completions are e^0.1 and 1
    (
        {"loss": tis(level="sequence", low=1.1, high=1.2)},
        [-0.06321177699, 0, -0.1447739869, -0.1954244413, 0, 0.2955794675],
    ),
    # loss_type "sapo" with sapo_temperature_pos 1 and sapo_temperature_neg 1.05, its defaults, and with 2 and 3
    (
        {"preset": "sapo", "loss": {"correction": {"kind": "none"}}},
        [0.1095147476, -0.1249000866, -0.0721814969, -0.09796626584, 0.1192827839, 0.2209254673],
    ),
    (
        {"preset": "sapo", "loss": {"correction": {"kind": "none"}, "tau_positive": 2.0, "tau_negative": 3.0}},
        [-0.07289288132, -0.1050736294, -0.07043617612, -0.09715878113, 0.09713659519, 0.2009352184],
    ),
]

EVERY = [
    pytest.param(name, keys, wanted, id=f"{name}-{number}")
    for name, cases in {"verl": VERL, "openrlhf": OPENRLHF, "nemo": NEMO, "trl": TRL}.items()
    for number, (keys, wanted) in enumerate(cases)
]


@pytest.mark.parametrize(("convention", "keys", "wanted"), EVERY)
def test_a_convention_computes_what_the_library_does(
    convention: Any, keys: dict[str, Any], wanted: list[float]
) -> None:
    assert by_convention(convention, keys) == pytest.approx(wanted, abs=1e-8)


def test_nemo_bounds_the_weight_of_cispo_at_6() -> None:
    """Ratios of 5.5 and 8 count as 5.5 and 6; ClippedPGLossFn with ratio_clip_min 1 and ratio_clip_max 5."""
    before = [-0.7 - math.log(5.5), -1.2 - math.log(8), *TOKENS["proximal_logprobs"][2:]]
    found = by_convention("nemo", {"preset": "cispo"}, proximal_logprobs=before)
    wanted = [1.463177534, -0.8799999982, -0.9599999981, -0.1768273465, 0.1474704098, 0.2687086063]
    assert found == pytest.approx(wanted, abs=1e-8)
    assert AlgorithmConfig(preset="cispo").loss.clip_high == 4.0


# ---- By hand ---------------------------------------------------------------------------------------------------------

LOG_R = [0.2, -0.5, 3.0, -12.0]
"""Of four tokens, log(p_reference / p_policy): two near ones, one beyond 10 for k3, one beyond 10 for k1 to k3."""


def penalty(kl: KLPenalty) -> tuple[list[float], list[float]]:
    """The penalty of each token, and the derivative of its sum."""
    logprobs = doubles([-1.0, -2.0, -4.0, -0.5]).requires_grad_()
    values = kl.of_tokens(logprobs, logprobs.detach() + doubles(LOG_R), log_ratio=logprobs - logprobs.detach())
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    return values.tolist(), gradient.tolist()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("clamp", [None, 10.0])
@pytest.mark.parametrize("score_gradient", [False, True])
def test_clamp_and_score_term_by_hand(estimator: Any, clamp: float | None, score_gradient: bool) -> None:
    """With x = log r: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x; their derivatives are 1, -x and 1 - e^x."""
    each = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[estimator]
    slope = {"k1": lambda x: 1.0, "k2": lambda x: -x, "k3": lambda x: 1 - math.exp(x)}[estimator]
    wanted = [each(x) for x in LOG_R]
    slopes = [slope(x) + (each(x) if score_gradient else 0.0) for x in LOG_R]
    if clamp is not None:
        slopes = [0.0 if abs(value) > clamp else found for value, found in zip(wanted, slopes, strict=True)]
        wanted = [min(max(value, -clamp), clamp) for value in wanted]
    values, gradient = penalty(KLPenalty(1.0, estimator, clamp=clamp, score_gradient=score_gradient))
    assert values == pytest.approx(wanted, abs=1e-12)
    assert gradient == pytest.approx(slopes, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_score_term_makes_the_gradient_that_of_the_divergence(estimator: Any) -> None:
    """Over every token that the policy could have sampled, by its own probability."""
    logits = doubles([0.3, -0.4, 1.1]).requires_grad_()
    reference = doubles([0.4, 0.4, 0.2]).log()
    logprobs = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    for score_gradient in (True, False):
        kl = KLPenalty(1.0, estimator, score_gradient=score_gradient)
        values = kl.of_tokens(logprobs, reference, log_ratio=torch.zeros(3, dtype=torch.float64))
        mean = (logprobs.detach().exp() * values).sum()
        (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
        assert torch.allclose(found, wanted, atol=1e-12) == score_gradient


@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_without_an_upper_bound_no_ratio_is_too_large(kind: Any) -> None:
    """A ratio of e^20 weighs e^20; with the usual bound of 2, `truncate` cuts it to 2 and `mask` leaves it out."""
    sampler = [-20.7, *TOKENS["old_logprobs"][1:]]
    before = [-0.7, *TOKENS["proximal_logprobs"][1:]]
    found = {}
    for high in (2.0, math.inf):
        loss = PolicyLoss(proximal="trainer", iterations=2, correction=Correction(kind=kind, high=high))
        found[high] = computed(loss, old_logprobs=sampler, proximal_logprobs=before)[1]
    assert found[math.inf] == pytest.approx(-0.8 * math.exp(20) / 5)
    assert found[2.0] == pytest.approx(-0.8 * 2 / 5 if kind == "truncate" else 0.0)


def test_a_lower_bound_of_truncation_raises_and_counts_what_is_below() -> None:
    """The ratios e^-0.1, e^0.3, e^-0.1, e^0.1, e^-0.1 of the trainer before the step to the sampler."""
    correction = Correction(kind="truncate", low=0.95, high=1.2)
    ratio = doubles([-0.1, 0.3, -0.1, 0.1, -0.1]).exp()
    assert correction.weights(ratio).tolist() == pytest.approx([0.95, 1.2, 0.95, math.exp(0.1), 0.95])
    assert correction.is_outside(ratio).tolist() == [True, True, True, False, True]


# ---- Global divisors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", ["trl", "verl", "openrlhf", "nemo"])
@pytest.mark.parametrize("average", ["token_mean", "sequence_mean"])
def test_a_convention_does_not_depend_on_how_a_batch_is_split(convention: Any, average: Any) -> None:
    """Whole, one sample at a time, and in two uneven parts; two of the seven samples have no token that counts."""
    keys = {"convention": convention, "loss": {"average": average}, "kl": {"coefficient": 0.1}}
    loss = make_loss(AlgorithmConfig.model_validate(keys), max_tokens=9, iterations=2)
    views = random_views(poison=None)
    assert sum(not bool(view.counted_T.any()) for view in views) == 2
    batch = Batch.of([Sample(torch.arange(len(view.weights_T)), view.weights_T.float()) for view in views])
    found = []
    for cuts in ([7], [1] * 7, [2, 5]):
        parts = [views[sum(cuts[:place]) : sum(cuts[: place + 1])] for place in range(len(cuts))]
        total = sum(loss(joined(part)).total for part in parts) / loss.normalizer(batch)
        gradient = torch.autograd.grad(total, [view.logprobs_T for view in views])
        found.append(torch.cat([total.detach().reshape(1), *gradient]))
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-13)
    assert torch.allclose(found[0], found[2], rtol=0, atol=1e-13)
    expected = {"token_mean": batch.total_weight, "sequence_mean": 7.0 if convention in ("trl", "verl") else 5.0}
    assert loss.normalizer(batch) == pytest.approx(expected[average])


def test_a_batch_of_which_nothing_counts_has_the_divisor_0() -> None:
    batch = Batch.of([Sample(torch.arange(3), torch.zeros(3))])
    assert PolicyLoss(average="sequence_mean", count_masked=True).normalizer(batch) == 0


@pytest.mark.parametrize("clamp", [0.0, -1.0, math.inf, math.nan])
def test_a_clamp_out_of_range_is_refused(clamp: float) -> None:
    with pytest.raises(ConfigError) as refused:
        KLPenalty(0.1, clamp=clamp)
    assert refused.value.path == "kl.clamp"
    assert refused.value.rule
    assert refused.value.repair
