"""Preference losses in the trainer: gradients that do not depend on how a batch is cut, shared out or packed.

In float64 the gradient of every parameter agrees to 1e-10 with that of one plain rank that takes the whole batch as one
row and shares nothing. KTO's estimate of the divergence, which the policy scores before the batch is cut, is the same
under every layout as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_ranks import Ranks, opened, ranks_of
from forge.config import ModelConfig, TrainerConfig
from forge.losses import KTO, Loss, PairLoss
from forge.types import Batch, Sample
from gradient_cases import Options, Outcome, check_equal, outcomes_on, run_on_rank, split_options, still_trainer

VOCAB = 64
MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "vocab_size": VOCAB,
    "max_seq_len": 2048,
    "rope_theta": 100.0,
    "norm_eps": 1e-6,
    "tie_embeddings": False,
    "intermediate_size": 24,
}
LOSSES: dict[str, Loss] = {
    "dpo": PairLoss(beta=0.5, label_smoothing=0.1, nll_coefficient=0.3),
    "ipo": PairLoss(kind="ipo"),
    "orpo": PairLoss(kind="orpo", beta=0.5, nll_coefficient=1.0),
    "simpo": PairLoss(kind="simpo", beta=2.0),
    "kto": KTO(beta=0.5, undesirable_weight=1.3, max_seq_len=16),
}


def batch_of(loss: str) -> Batch:
    """Pairs of answers, also in different orders; for KTO single answers with a label."""
    maker = torch.Generator().manual_seed(7)
    samples = []
    for pair, (prompt, *lengths) in enumerate([(5, 4, 9), (3, 12, 1), (1, 6, 7), (8, 2, 5), (2, 3, 3)]):
        prefix = torch.randint(VOCAB, (prompt,), generator=maker)
        for chosen, length in zip((1.0, 0.0), lengths, strict=True):
            tokens = torch.cat([prefix, torch.randint(VOCAB, (length,), generator=maker)])
            completion = torch.cat([torch.zeros(prompt), torch.ones(length)])
            weights = completion.clone()
            if loss == "orpo" and chosen:
                weights[1:] = 1.0
            fields = {
                "chosen": torch.full_like(weights, chosen),
                "completion": completion,
                "ref_logprobs": -4.2 + 0.3 * torch.randn(len(tokens), generator=maker),
                "mismatched_ref_logprob": torch.full_like(weights, -30.0 - length),
            }
            samples.append(Sample(tokens, weights, fields, f"pair {pair}", None if loss == "kto" else pair))
    samples[2:4] = reversed(samples[2:4])
    return Batch.of(samples)


@dataclass(frozen=True)
class Case:
    """One way to compute the gradients of a loss. What it says nothing about is as in the plain way."""

    loss: str
    training: Options = ()
    distributed: Options = ()

    def __str__(self) -> str:
        return ", ".join([self.loss, *(f"{name}={value}" for name, value in self.training + self.distributed)])


def cases(*losses: str, **options: Any) -> list[Case]:
    return [Case(loss, *split_options(options)) for loss in losses or LOSSES]


ON_ONE = [
    *cases(microbatch_tokens=32),
    *cases(microbatch_tokens=16),  # pairs longer than that are split: two passes
    *cases(microbatch_tokens=32, share_prefixes=True),
    *cases("dpo", "kto", microbatch_tokens=32, activation_checkpointing="full"),
]
ON_TWO = [
    *cases(microbatch_tokens=32, strategy="fsdp"),
    *cases("dpo", "orpo", "kto", microbatch_tokens=16, strategy="replicate", share_prefixes=True),
    *cases("dpo", "kto", microbatch_tokens=32, tensor=2),
    *cases("dpo", "kto", microbatch_tokens=32, pipeline=2),
]
PLAIN = [Case(loss) for loss in LOSSES]


# The ranks' side.


def config_of(one: Case) -> TrainerConfig:
    return still_trainer(ModelConfig(family="qwen3", **MODEL), one.training, one.distributed)


def run_cases(cases: list[Case]) -> list[Outcome]:
    return run_on_rank(
        cases,
        config_of=config_of,
        batch_of=lambda one: batch_of(one.loss),
        loss_of=lambda one: LOSSES[one.loss],
    )


def evaluated() -> dict[str, Any]:
    """What a step and a validation report of each loss, and of a batch whose policy is its own reference."""
    found: dict[str, Any] = {}
    with opened(config_of(Case("dpo", (("microbatch_tokens", 32),)))) as engine:
        for name, loss in LOSSES.items():
            engine.loss = loss
            batch = batch_of(name)
            found[name] = engine.train_step(batch), engine.evaluate(batch)
        engine.loss = PairLoss()
        batch = batch_of("dpo")
        reference = torch.cat(engine.forward_logprobs(batch))
        fields = {**batch.fields, "ref_logprobs": reference}
        found["own reference"] = engine.train_step(replace(batch, fields=fields))
    return found


# The tests' side.


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from ranks_of(__name__)


plain = outcomes_on(1, run_cases, PLAIN)
on_one = outcomes_on(1, run_cases, ON_ONE)
on_two = outcomes_on(2, run_cases, ON_TWO)


@pytest.mark.parametrize("one", ON_ONE, ids=str)
def test_on_one_rank(one: Case, on_one: dict[Case, Outcome], plain: dict[Case, Outcome]) -> None:
    check_equal(on_one[one], plain[Case(one.loss)])


@pytest.mark.parametrize("one", ON_TWO, ids=str)
def test_on_two_ranks(one: Case, on_two: dict[Case, Outcome], plain: dict[Case, Outcome]) -> None:
    check_equal(on_two[one], plain[Case(one.loss)])


def test_a_step_and_a_validation_report_the_same(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks.run(evaluated, 1, scratch=tmp_path)
    for name in LOSSES:
        step, validation = found[name]
        assert validation.loss / validation.weight == pytest.approx(step.loss, rel=1e-12)
        assert validation.weight == (10 if name == "kto" else 5)
        means = {metric: total / divisor for metric, (total, divisor) in validation.metrics.items()}
        assert means == pytest.approx(dict(step.metrics), rel=1e-12)
        assert means["reward_margin"] == pytest.approx(means["reward_chosen"] - means["reward_rejected"])
    assert found["kto"][0].metrics["kl"] > 0, "otherwise the estimate is not in the loss"
    own = found["own reference"]
    assert own.loss == pytest.approx(0.6931471805599453, rel=1e-6)
    assert own.metrics["reward_margin"] == pytest.approx(0.0, abs=1e-6)
