"""The contract of the trainer: gradients do not depend on how a batch is cut, ordered, packed or shared out.

In float64 the gradient of every parameter agrees to 1e-10 with that of one plain rank which takes the whole batch as
one row, for the loss of supervised fine-tuning and for policy losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from engine_ranks import Ranks, made_batch, ranks_of
from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.losses import CrossEntropy, KLPenalty, Loss, PolicyLoss
from forge.types import Batch
from gradient_cases import Options, Outcome, check_equal, outcomes_on, run_on_rank, split_options

VOCAB = 64
FACTS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "vocab_size": VOCAB,
    "max_seq_len": 2048,
    "rope_theta": 100.0,
    "norm_eps": 1e-6,
}
MODELS = {
    "untied": ModelConfig(family="qwen3", intermediate_size=24, tie_embeddings=False, **FACTS),
    "tied": ModelConfig(family="qwen3", intermediate_size=24, tie_embeddings=True, **FACTS),
    "wide": ModelConfig(family="llama", intermediate_size=256, tie_embeddings=False, **FACTS),
    "mixture": ModelConfig(
        family="qwen3_moe",
        intermediate_size=24,
        tie_embeddings=False,
        num_experts=4,
        num_experts_per_token=2,
        expert_intermediate_size=12,
        **FACTS,
    ),
}
POLICY_FIELDS = ("advantages", "old_logprobs", "ref_logprobs")
LOSSES: dict[str, Loss] = {
    "cross entropy": CrossEntropy(),
    "token mean": PolicyLoss(kl=KLPenalty(0.1), entropy_coefficient=0.01),
    "sequence mean": PolicyLoss(average="sequence_mean", kl=KLPenalty(0.2, "k2"), entropy_coefficient=0.02),
    "constant": PolicyLoss(average="constant", length=16, kl=KLPenalty(0.1), entropy_coefficient=0.01),
    "plain policy": PolicyLoss(),
}
BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "mixed": ((9, 1, 15, 4, 2, 11, 16, 1, 3, 7), (3,)),
    "tall": ((9, 16, 11, 13, 15), ()),
    "one sample": ((13,), ()),
    "long": ((300, 211, 3), ()),
    "tempered": ((9, 16, 11, 13, 15), ()),
}
"""Lengths, and which samples have no token that counts. No two of `tall` fit into 16 tokens: each is a row by itself,
and on two ranks one of them takes its last row without a sample."""
TEMPERATURES = (0.7, 1.0, 0.7, 1.3, 1.0)
"""Of the samples of `tempered`. In rows of 16 tokens each is alone with its temperature."""


def batch_of(name: str, *, order: str = "as made") -> Batch:
    lengths, weightless = BATCHES[name]
    batch = made_batch(lengths, vocab=VOCAB, fields=POLICY_FIELDS, seed=11, weightless=weightless)
    samples = list(batch.samples())
    if name == "tempered":
        pairs = zip(samples, TEMPERATURES, strict=True)
        samples = [replace(sample, temperature=temperature) for sample, temperature in pairs]
    if order == "reversed":
        samples.reverse()
    elif order == "shuffled":
        samples = [samples[index] for index in torch.randperm(len(samples), generator=torch.Generator().manual_seed(5))]
    return Batch.of(samples)


@dataclass(frozen=True)
class Case:
    """One way to compute the gradients of a batch. What it says nothing about is as in the plain way."""

    loss: str = "cross entropy"
    batch: str = "mixed"
    order: str = "as made"
    model: str = "untied"
    training: Options = ()
    distributed: Options = ()

    @property
    def plain(self) -> Case:
        return Case(loss=self.loss, batch=self.batch, model=self.model)

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.training + self.distributed]
        return ", ".join([self.loss, self.batch, self.order, self.model, *options])


def case(*, loss: str = "cross entropy", batch: str = "mixed", order: str = "as made", **options: Any) -> Case:
    model = options.pop("model", "untied")
    return Case(loss, batch, order, model, *split_options(options))


ON_ONE = [
    *(case(loss=loss, microbatch_tokens=16, head_chunk_tokens=3, order="shuffled") for loss in LOSSES),
    *(case(loss=loss, microbatch_tokens=29, head_chunk_tokens=1, order="reversed") for loss in LOSSES),
    *(case(loss=loss, batch="tall", microbatch_tokens=16) for loss in ("cross entropy", "sequence mean")),
    *(
        case(loss=loss, activation_checkpointing=kind, microbatch_tokens=20)
        for loss in ("cross entropy", "token mean")
        for kind in ("selective", "full")
    ),
    *(
        case(loss=loss, model="wide", batch="long", max_seq_len=300, microbatch_tokens=tokens, activation_offload=True)
        for loss in ("cross entropy", "token mean")
        for tokens in (303, 600)
    ),
    *(case(loss=loss, batch="tempered", microbatch_tokens=16) for loss in ("cross entropy", "token mean")),
    case(loss="token mean", batch="tempered", microbatch_tokens=33, head_chunk_tokens=3, order="shuffled"),
    case(model="tied", microbatch_tokens=16, order="shuffled"),
    case(model="mixture", microbatch_tokens=16, order="shuffled"),
    case(model="mixture", loss="token mean", microbatch_tokens=16, activation_checkpointing="full"),
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "replicate": {"strategy": "replicate"},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}
ON_TWO = [
    *(
        case(loss=loss, order="shuffled", microbatch_tokens=16, head_chunk_tokens=7, **layout)
        for layout in LAYOUTS.values()
        for loss in LOSSES
    ),
    *(case(loss=loss, batch="one sample", **layout) for layout in LAYOUTS.values() for loss in LOSSES),
    *(case(loss=loss, batch="tall", microbatch_tokens=16, strategy="fsdp") for loss in ("cross entropy", "token mean")),
    *(case(loss="token mean", batch="tempered", microbatch_tokens=33, **layout) for layout in LAYOUTS.values()),
    case(batch="tall", microbatch_tokens=16, strategy="replicate"),
    case(model="mixture", batch="tall", microbatch_tokens=16, expert=2),
    case(batch="tall", microbatch_tokens=16, pipeline=2, pipeline_microbatches=2, pipeline_schedule="GPipe"),
    case(tensor=2, sequence_parallel=False, microbatch_tokens=16),
    case(activation_checkpointing="full", microbatch_tokens=16, strategy="fsdp"),
    case(activation_checkpointing="selective", microbatch_tokens=16, tensor=2),
    case(activation_checkpointing="full", microbatch_tokens=16, pipeline=2),
    case(model="tied", microbatch_tokens=16, strategy="fsdp"),
    case(model="tied", microbatch_tokens=16, tensor=2),
    case(model="mixture", microbatch_tokens=16, strategy="fsdp"),
    case(model="mixture", microbatch_tokens=16, expert=2),
    case(model="mixture", microbatch_tokens=16, expert=2, tensor=2, loss="token mean"),
    case(model="mixture", batch="one sample", expert=2),
    case(model="mixture", microbatch_tokens=16, pipeline=2),
]
PLAIN = list(dict.fromkeys(one.plain for one in ON_ONE + ON_TWO))


# The ranks' side.


def config_of(one: Case) -> TrainerConfig:
    """Weights do not move: the optimizer's rate is far below what float64 resolves. Nothing is clipped."""
    training = {"max_seq_len": max(16, max(BATCHES[one.batch][0])), "microbatch_tokens": 1000, **dict(one.training)}
    fixed = {"schedule": "constant", "learning_rate": 1e-60, "max_grad_norm": None}
    return TrainerConfig(
        model=MODELS[one.model],
        training=TrainingConfig(**training, **fixed),
        distributed=DistributedConfig(precision="float64", **dict(one.distributed)),
        seed=5,
    )


def run_cases(cases: list[Case]) -> list[Outcome]:
    return run_on_rank(
        cases,
        config_of=config_of,
        batch_of=lambda one: batch_of(one.batch, order=one.order),
        loss_of=lambda one: LOSSES[one.loss],
    )


# The tests' side.


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from ranks_of(__name__)


plain = outcomes_on(1, run_cases, PLAIN)
on_one = outcomes_on(1, run_cases, ON_ONE)
on_two = outcomes_on(2, run_cases, ON_TWO)


@pytest.mark.parametrize("one", ON_ONE, ids=str)
def test_on_one_rank(one: Case, on_one: dict[Case, Outcome], plain: dict[Case, Outcome]) -> None:
    check_equal(on_one[one], plain[one.plain])


@pytest.mark.parametrize("one", ON_TWO, ids=str)
def test_on_two_ranks(one: Case, on_two: dict[Case, Outcome], plain: dict[Case, Outcome]) -> None:
    check_equal(on_two[one], plain[one.plain])


def test_cases_differ(plain: dict[Case, Outcome]) -> None:
    """Were the losses all the same, the tests above would say little."""
    for batch in ("mixed", "one sample"):
        losses = [plain[Case(loss=loss, batch=batch)].loss for loss in LOSSES]
        assert len({round(loss, 9) for loss in losses}) == len(LOSSES)
    of_temperatures = [plain[Case(loss="cross entropy", batch=batch)].loss for batch in ("tall", "tempered")]
    assert of_temperatures[0] != pytest.approx(of_temperatures[1], rel=1e-4)
