"""Preference losses: the values and gradients of TRL's own functions, formulas written out, cuts, and bad batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.errors import ConfigError, DataError
from forge.losses import KTO, Loss, LossTerms, PairLoss, TokenView
from forge.losses.base import completed
from forge.losses.kto import mismatched
from forge.types import Batch, Sample

# Three pairs with prompts of two tokens. The first token of a prompt is not predicted.
PROMPTS = [[-1.5, -0.9], [-0.3, -2.2], [-1.1, -0.6]]
CHOSEN = [[-0.7, -1.2, -0.4], [-2.0, -0.3], [-0.05, -0.9, -1.4, -0.2]]
REJECTED = [[-1.0, -0.6], [-0.5, -1.9, -0.8], [-2.5]]
REF_CHOSEN = [[-0.9, -1.0, -0.6], [-1.5, -0.5], [-0.4, -1.4, -1.2, -0.3]]
REF_REJECTED = [[-0.8, -0.7], [-0.9, -1.5, -1.0], [-1.7]]
# The logprobs of whole mismatched answers, of the policy and of the reference.
MISMATCHED, REF_MISMATCHED = [-2.9, -3.3, -4.1, -1.7, -5.0, -2.2], [-3.4, -3.1, -4.4, -2.0, -5.1, -2.0]


def answers(*, paired: bool, loss_on: str = "answers") -> Batch:
    """The pairs as samples of two by two, or as single answers with the chosen ones first."""
    samples = []
    sides = [(CHOSEN, REF_CHOSEN, 1.0), (REJECTED, REF_REJECTED, 0.0)]
    for given, reference, is_chosen in sides:
        for pair, (prompt, logprobs, ref) in enumerate(zip(PROMPTS, given, reference, strict=True)):
            completion = torch.tensor([0.0] * len(prompt) + [1.0] * len(logprobs))
            weights = completion.clone()
            if loss_on == "all" and is_chosen:
                weights[1:] = 1.0
            fields = {
                "chosen": torch.full_like(completion, is_chosen),
                "completion": completion,
                "ref_logprobs": doubles([math.nan] * len(prompt) + ref),
            }
            tokens = torch.arange(len(completion)) + 100 * pair + 50 * int(is_chosen) * completion.long()
            number = pair if paired else None
            samples.append(Sample(tokens, weights, fields, f"pair {pair}", sequence=number))
    return Batch.of(samples)


def doubles(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logprobs_of() -> Tensor:
    rows = [prompt + each for side in (CHOSEN, REJECTED) for prompt, each in zip(PROMPTS, side, strict=True)]
    for row in rows:
        row[0] = math.nan  # nothing may look at it
    return doubles([value for row in rows for value in row])


def view_of(batch: Batch, logprobs_T: Tensor, samples: Sequence[int] | None = None) -> TokenView:
    """Some samples of a batch as a micro-batch."""
    starts = [0, *accumulate(batch.lengths)]
    chosen = range(len(batch)) if samples is None else samples
    places = torch.cat([torch.arange(starts[index], starts[index + 1]) for index in chosen])
    numbers = {number: place for place, number in enumerate(dict.fromkeys(batch.sequence_numbers[i] for i in chosen))}
    return TokenView(
        logprobs_T[places],
        batch.loss_weights[places].double(),
        tuple(batch.lengths[index] for index in chosen),
        fields={name: values[places] for name, values in batch.fields.items()},
        sequences=tuple(numbers[batch.sequences[index]] for index in chosen) if batch.sequences else (),
    )


def kto_batch(shift: float = 0.0) -> Batch:
    batch = answers(paired=False)
    lengths = torch.tensor(batch.lengths)
    reference = (doubles(REF_MISMATCHED) + shift).repeat_interleave(lengths)
    return replace(batch, fields={**batch.fields, "mismatched_ref_logprob": reference})


def score(batch: Batch) -> list[Tensor]:
    """The policy's logprobs of mismatched answers: each in equal parts over its tokens."""
    return [
        total / sample.fields["completion"].double().sum() * torch.ones(len(sample), dtype=torch.float64)
        for total, sample in zip(MISMATCHED, batch.samples(), strict=True)
    ]


def computed(loss: Loss, batch: Batch, cuts: Sequence[Sequence[int]] | None = None) -> tuple[list[float], LossTerms]:
    """The loss of a batch that is cut in some way, and its derivative with respect to the logprobs that count."""
    batch = completed(loss, batch, score)
    logprobs = logprobs_of().requires_grad_()
    parts = [loss(view_of(batch, logprobs, samples)) for samples in cuts or [list(range(len(batch)))]]
    total = sum(part.total for part in parts) / loss.normalizer(batch)
    (gradient,) = torch.autograd.grad(total, logprobs)
    counted = gradient[batch.loss_weights != 0].tolist()
    assert torch.all(gradient[batch.loss_weights == 0] == 0)
    metrics = {name: sum(part.metrics[name] for part in parts) for name in parts[0].metrics}
    return [float(total.detach()), *counted], LossTerms(total.detach(), metrics)


def metrics_of(loss: Any, batch: Batch) -> dict[str, float]:
    divisors = loss.metric_divisors(batch)
    return {name: float(value) / divisors[name] for name, value in computed(loss, batch)[1].metrics.items()}


# What functions of TRL 1.16.0 gave for these tokens, in float64: DPOTrainer._compute_loss, KTOTrainer._compute_loss,
# ORPOTrainer.get_batch_loss_metrics and CPOTrainer.get_batch_loss_metrics (loss_type "simpo"), with a stand-in for the
# model that returns the logprobs above. The loss, then the derivative of each token that counts: chosen, then rejected.

DPO, ORPO, SIMPO = ({"kind": kind} for kind in ("dpo", "orpo", "simpo"))
TRL = [
    (
        DPO,
        [0.6717888762, *[-0.01641668541] * 3, *[-0.01708324655] * 2, *[-0.01537757983] * 4],
        [*[0.01641668541] * 2, *[0.01708324655] * 3, 0.01537757983],
    ),
    (
        DPO | {"beta": 0.5},
        [0.608604943, *[-0.07709502578] * 3, *[-0.09369608348] * 2, *[-0.05256641661] * 4],
        [*[0.07709502578] * 2, *[0.09369608348] * 3, 0.05256641661],
    ),
    (DPO | {"beta": 0.5, "variant": "hinge"}, [0.775, *[-1 / 6] * 9], [1 / 6] * 6),
    (
        DPO | {"beta": 0.5, "variant": "robust", "label_smoothing": 0.2},
        [0.533604943, *[-0.1326505813] * 3, *[-0.149251639] * 2, *[-0.1081219722] * 4],
        [*[0.1326505813] * 2, *[0.149251639] * 3, 0.1081219722],
    ),
    (
        DPO | {"beta": 0.5, "nll_coefficient": 0.3},  # loss_type ["sigmoid", "sft"], loss_weights [1.0, 0.3]
        [0.8469382763, *[-0.1104283591] * 3, *[-0.1270294168] * 2, *[-0.08589974995] * 4],
        [*[0.07709502578] * 2, *[0.09369608348] * 3, 0.05256641661],
    ),
    (
        {"kind": "ipo"},
        [22.38690394, *[-1.085185185] * 3, *[-1.738888889] * 2, *[-0.66875] * 4],
        [*[1.627777778] * 2, *[1.159259259] * 3, 2.675],
    ),
    (
        SIMPO | {"beta": 2.0},
        [0.6843757672, *[-0.1348154125] * 3, *[-0.2202521229] * 2, *[-0.006372615294] * 4],
        [*[0.2022231187] * 2, *[0.1468347486] * 3, 0.02549046118],
    ),
    (
        SIMPO | {"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.1, "nll_coefficient": 0.4},
        [1.260683694, *[-0.1817224571] * 3, *[-0.2652917683] * 2, *[-0.03803014139] * 4],
        [*[0.205917019] * 2, *[0.1472315493] * 3, -0.0256572122],
    ),
    (  # -log p_policy over prompt and answer, as there
        ORPO | {"nll_coefficient": 1.0},
        [0.9540650262, -1 / 12, *[-0.09339066651] * 3, -1 / 12, *[-0.09628565218] * 2, -1 / 12, *[-0.08463896808] * 4],
        [*[0.01466876224] * 2, *[0.008997168618] * 3, 0.002681991913],
    ),
    (
        ORPO | {"beta": 0.5, "nll_coefficient": 1.0},
        [1.153658464, -1 / 12, *[-0.1336199992] * 3, -1 / 12, *[-0.1480949276] * 2, -1 / 12, *[-0.08986150704] * 4],
        [*[0.07334381118] * 2, *[0.04498584309] * 3, 0.01340995957],
    ),
]


@pytest.mark.parametrize(("keys", "chosen", "rejected"), TRL, ids=[str(keys) for keys, *_ in TRL])
def test_pairs_have_the_loss_and_gradient_of_trl(
    keys: dict[str, Any], chosen: list[float], rejected: list[float]
) -> None:
    loss_on = "all" if keys["kind"] == "orpo" else "answers"
    found, _ = computed(PairLoss(**keys), answers(paired=True, loss_on=loss_on))
    assert found == pytest.approx([*chosen, *rejected], rel=2e-9)


TRL_KTO = [
    (
        {},
        0.0,
        [0.4943783962, *[-0.004166620371] * 3, *[-0.00416471126] * 2, *[-0.004162707949] * 4],
        [*[0.004166099588] * 2, *[0.004166620371] * 3, 0.004157605751],
    ),
    (
        {"beta": 0.3, "undesirable_weight": 1.3},
        0.0,
        [0.5541141515, *[-0.01249875008] * 3, *[-0.0124473359] * 2, *[-0.01239365401] * 4],
        [*[0.01623011] * 2, *[0.01624837511] * 3, 0.01593561598],
    ),
    (  # a negative estimate counts as 0
        {"beta": 0.3},
        9.0,
        [0.4832096412, *[-0.01248875675] * 3, *[-0.01247472163] * 2, *[-0.0123431222] * 4],
        [*[0.01249718792] * 2, *[0.01248875675] * 3, 0.012321714],
    ),
]


@pytest.mark.parametrize(("keys", "shift", "desirable", "undesirable"), TRL_KTO)
def test_kto_has_the_loss_and_gradient_of_trl(
    keys: dict[str, Any], shift: float, desirable: list[float], undesirable: list[float]
) -> None:
    found, _ = computed(KTO(**keys), kto_batch(shift))
    assert found == pytest.approx([*desirable, *undesirable], rel=2e-9)


def test_metrics_are_those_of_trl() -> None:
    dpo = metrics_of(PairLoss(beta=0.1), answers(paired=True))
    expected = {
        "reward_chosen": 0.02166666667,
        "reward_rejected": -0.02333333333,
        "reward_margin": 0.045,
        "accuracy": 2 / 3,
        "ranking_accuracy": 2 / 3,
        "logprob_chosen": -2.383333333,
        "logprob_rejected": -2.433333333,
        "nll": 7.15 / 9,
    }
    assert dpo == pytest.approx(expected, rel=1e-9)
    orpo = metrics_of(PairLoss(kind="orpo", nll_coefficient=1.0), answers(paired=True, loss_on="all"))
    expected = {
        "reward_chosen": -0.08513888889,
        "reward_rejected": -0.1455555556,
        "reward_margin": 0.06041666667,
        "accuracy": 2 / 3,
        "ranking_accuracy": 2 / 3,
        "logprob_chosen": -0.8513888889,
        "logprob_rejected": -1.455555556,
        "nll": 0.9041666667,
    }
    assert orpo == pytest.approx(expected, rel=1e-9)
    kto = metrics_of(KTO(beta=0.3), kto_batch())
    expected = {
        "reward_chosen": 0.065,
        "reward_rejected": -0.07,
        "reward_margin": 0.135,
        "accuracy": 4 / 6,  # 0.2 and 0.75 are above kl, -0.1 and -0.8 below it; -0.3 and 0.2 are on the wrong side
        "logprob_chosen": -2.383333333,
        "logprob_rejected": -2.433333333,
        "kl": 0.1333333333,
        "nll": 7.15 / 9,
    }
    assert kto == pytest.approx(expected, rel=1e-9)


def written_out(loss: PairLoss) -> float:
    """The mean over pairs, from the definitions in the papers."""
    total = 0.0
    for chosen, rejected, ref_chosen, ref_rejected in zip(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, strict=True):
        c, r = sum(chosen) - sum(ref_chosen), sum(rejected) - sum(ref_rejected)
        mean_c, mean_r = sum(chosen) / len(chosen), sum(rejected) / len(rejected)
        if loss.kind == "dpo":
            p = 1 / (1 + math.exp(-loss.beta * (c - r)))
            total -= (1 - loss.label_smoothing) * math.log(p) + loss.label_smoothing * math.log(1 - p)
        elif loss.kind == "ipo":
            total += (c / len(chosen) - r / len(rejected) - 0.5 / loss.beta) ** 2
        elif loss.kind == "orpo":
            odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (mean_c, mean_r)]
            total -= loss.beta * math.log(odds[0] / (odds[0] + odds[1]))
        else:
            total -= math.log(1 / (1 + math.exp(loss.gamma - loss.beta * (mean_c - mean_r))))
    return total / len(CHOSEN)


KINDS: dict[str, Any] = {
    "dpo": PairLoss(beta=0.7),
    "cdpo": PairLoss(beta=0.7, label_smoothing=0.15),
    "ipo": PairLoss(kind="ipo", beta=0.4),
    "orpo": PairLoss(kind="orpo", beta=0.4),
    "simpo": PairLoss(kind="simpo", beta=1.7, gamma=0.3),
}
ALL: dict[str, Any] = KINDS | {
    "robust": PairLoss(beta=0.7, variant="robust", label_smoothing=0.3),
    "nll": PairLoss(kind="orpo", nll_coefficient=0.5),
    "kto": KTO(beta=0.8, desirable_weight=1.4),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_loss_is_what_its_paper_says(name: str) -> None:
    assert computed(KINDS[name], answers(paired=True))[0][0] == pytest.approx(written_out(KINDS[name]), rel=1e-12)


def batch_for(loss: Loss) -> Batch:
    return kto_batch() if isinstance(loss, KTO) else answers(paired=True, loss_on="all")


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_the_differences_of_values(name: str) -> None:
    loss = ALL[name]
    batch = completed(loss, batch_for(loss), score)
    given = logprobs_of().nan_to_num(0.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda values: loss(view_of(batch, values)).total, (given,), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_a_loss_does_not_depend_on_how_a_batch_is_cut(name: str) -> None:
    loss = ALL[name]
    batch = batch_for(loss)
    cuts = [[4, 1], [0, 3, 2, 5]] if not isinstance(loss, KTO) else [[4], [0, 3], [5, 1, 2]]
    whole, terms = computed(loss, batch)
    found, parts = computed(loss, batch, cuts)
    assert found == pytest.approx(whole, rel=1e-12, abs=1e-15)
    for metric, value in terms.metrics.items():
        assert float(parts.metrics[metric]) == pytest.approx(float(value), rel=1e-12), metric


@pytest.mark.parametrize("name", ALL)
def test_pairs_without_weights_do_not_count(name: str) -> None:
    loss = ALL[name]
    batch = batch_for(loss)
    samples = list(batch.samples())
    masked = [
        replace(each, loss_weights=torch.zeros(len(each))) if each.identity == "pair 1" else each for each in samples
    ]
    left_out = Batch.of(masked)
    assert loss.normalizer(left_out) == loss.normalizer(batch) * 2 / 3
    gradient = computed(loss, left_out)[0]
    assert all(math.isfinite(value) for value in gradient)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("logprob", [-1e-9, -1e4])
def test_extreme_logprobs_have_finite_losses_and_gradients(name: str, logprob: float) -> None:
    loss = ALL[name]
    batch = completed(loss, batch_for(loss), score)
    for side in (1.0, 0.0):
        values = torch.where(batch.fields["chosen"] == side, logprob, -1.0).float().requires_grad_()
        terms = loss(view_of(batch, values))
        (gradient,) = torch.autograd.grad(terms.total, values)
        assert torch.isfinite(terms.total)
        assert torch.isfinite(gradient).all()


def test_an_answer_behind_another_prompt() -> None:
    batch = kto_batch()
    other = mismatched(batch)
    assert other is not None
    samples, made = list(batch.samples()), list(other.samples())
    # The first three are the chosen answers of the prompts 0, 1 and 2, then come the rejected ones.
    for index, partner in enumerate([5, 0, 1, 2, 3, 4]):
        expected = torch.cat([samples[index].token_ids[:2], samples[partner].token_ids[2:]])
        assert made[index].token_ids.equal(expected)
        assert made[index].fields["completion"].tolist() == [0.0, 0.0, *[1.0] * (len(expected) - 2)]
    # Answers to one prompt beside each other are not put behind it again, and each is there once.
    ordered = Batch.of([samples[index] for index in (0, 3, 1, 4)])
    shown = mismatched(ordered, max_seq_len=4)
    assert shown is not None
    ends = [samples[index].token_ids[2:4].tolist() for index in (1, 4, 0, 3)]
    assert [sample.token_ids[2:].tolist() for sample in shown.samples()] == ends
    assert mismatched(Batch.of(samples[:1])) is None
    same = mismatched(Batch.of([samples[0], samples[3]]))
    assert same is not None
    assert [len(sample) for sample in same.samples()] == [len(samples[3]), len(samples[0])]


def test_one_answer_alone_has_no_divergence() -> None:
    one = Batch.of([next(kto_batch().samples())])
    found = completed(KTO(), one, lambda _: pytest.fail("there is nothing to score"))
    assert set(found.fields["kl"].tolist()) == {0.0}


def refused(call: Any) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        call()
    assert caught.value.path
    assert caught.value.repair
    return f"{caught.value.path}: {caught.value.rule}"


def test_bad_batches_are_refused() -> None:
    batch = answers(paired=True)
    samples = list(batch.samples())
    alone = Batch.of([samples[0], samples[1], samples[4]])
    assert "the rejected one is missing" in refused(lambda: PairLoss().normalizer(alone))
    assert "pair 1: " in refused(lambda: PairLoss().normalizer(Batch.of([samples[0], samples[3], samples[4]])))
    for name in ("chosen", "completion"):
        half = replace(batch, fields={**batch.fields, name: torch.full_like(batch.loss_weights, 0.5)})
        assert f"the field '{name}' is 0 or 1" in refused(lambda half=half: PairLoss().normalizer(half))
        without = replace(batch, fields={key: value for key, value in batch.fields.items() if key != name})
        assert name in refused(lambda without=without: PairLoss().normalizer(without))
    assert "a sequence of its own" in refused(lambda: KTO().normalizer(batch))
    mixed = kto_batch()
    fields = {**mixed.fields, "chosen": torch.arange(mixed.num_tokens).remainder(2).float()}
    assert "the same at all tokens" in refused(lambda: KTO().normalizer(replace(mixed, fields=fields)))
    assert "mismatched_ref_logprob" in refused(lambda: completed(KTO(), answers(paired=False), score))
    assert refused(lambda: PairLoss(beta=0.0)) == "beta: above 0"
    assert refused(lambda: KTO(beta=-1.0)) == "beta: above 0"
    assert refused(lambda: PairLoss(label_smoothing=0.5)) == "label_smoothing: at least 0 and below 0.5"
