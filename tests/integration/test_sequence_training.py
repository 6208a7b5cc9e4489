"""Episodes of several samples in the trainer: one sequence each, with every shared prefix computed once.

In float64 loss and gradient agree to 1e-10 with one plain rank that takes the whole batch as one row and shares
nothing, for every way to cut, share out and share prefixes; and an episode that is cut into samples agrees with the
same tokens in one sample. In float32 logprobs are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_ranks import Ranks, opened, ranks_of
from episode_rows import Maker, episodes, in_order, samples_of
from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.losses import Correction, CrossEntropy, KLPenalty, Loss, PolicyLoss
from forge.trainer.bundles import large_sequences
from forge.types import Batch, Sample
from gradient_cases import Options, Outcome, check_equal, outcomes_on, run_on_rank, split_options

VOCAB = 64
MODEL = ModelConfig(
    family="qwen3",
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    max_seq_len=256,
    rope_theta=100.0,
    norm_eps=1e-6,
    intermediate_size=24,
    tie_embeddings=False,
)
LOSSES: dict[str, Loss] = {
    "cross entropy": CrossEntropy(),
    "token mean": PolicyLoss(kl=KLPenalty(0.1), entropy_coefficient=0.01),
    "sequence mean": PolicyLoss(average="sequence_mean", kl=KLPenalty(0.2, "k2")),
    "count masked": PolicyLoss(average="sequence_mean", count_masked=True),
    "constant": PolicyLoss(average="constant", length=16),
    "gspo": PolicyLoss(kind="gspo", average="sequence_mean", clip_low=0.9, clip_high=5.0),
    "gspo by turns": PolicyLoss(kind="gspo", kl=KLPenalty(0.1), entropy_coefficient=0.01, clip_high=5.0),
    "correction": PolicyLoss(proximal="trainer", correction=Correction(kind="truncate", level="sequence", high=9.0)),
}


def branching() -> Batch:
    """Three groups, the members with up to six turns in trees; nothing counts of one episode."""
    batch = episodes(12, vocab=VOCAB, groups=[(4, 6), (1, 3, 5), (2,)], num_roots=2)
    samples = [
        replace(sample, loss_weights=torch.zeros(len(sample))) if sample.sequence == 3 else sample
        for sample in batch.samples()
    ]
    return Batch.of(samples)


def conversation(*, is_cut: bool) -> Batch:
    """Two episodes of three turns without branches, whole or as a sample after each turn, and one of one turn."""
    maker, samples = Maker(3, vocab=VOCAB), list[Sample]()
    prompt = maker.tokens(9)
    for number in range(2):
        turns = [maker.turn(None, prompt, 5), maker.turn(0, maker.tokens(3), 4), maker.turn(1, maker.tokens(2), 6)]
        [whole] = samples_of(turns, number)
        samples += _cut(whole, [14, 21, 29]) if is_cut else [whole]
    samples += samples_of([maker.turn(None, prompt, 7)], 2)
    return Batch.of(samples)


def _cut(sample: Sample, ends: list[int]) -> list[Sample]:
    """Samples that end after each turn; the tokens of a turn count in the first that has them."""
    found = []
    for start, end in zip([0, *ends], ends, strict=False):
        weights = sample.loss_weights[:end].clone()
        weights[:start] = 0
        fields = {name: values[:end] for name, values in sample.fields.items()}
        found.append(replace(sample, token_ids=sample.token_ids[:end], loss_weights=weights, fields=fields))
    return found


BATCHES = {
    "branching": branching,
    "whole": lambda: conversation(is_cut=False),
    "cut": lambda: conversation(is_cut=True),
}


@dataclass(frozen=True)
class Case:
    loss: str
    batch: str = "branching"
    shuffled: bool = False
    training: Options = ()
    distributed: Options = ()

    @property
    def plain(self) -> Case:
        return Case(self.loss, "whole" if self.batch == "cut" else self.batch)

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.training + self.distributed]
        return ", ".join([self.loss, self.batch, *(["shuffled"] if self.shuffled else []), *options])


def case(loss: str, batch: str = "branching", *, shuffled: bool = False, **options: Any) -> Case:
    return Case(loss, batch, shuffled, *split_options(options))


WHOLE = ("gspo", "gspo by turns", "correction")
"""Losses with a ratio per sequence."""

SMALL = {"max_seq_len": 40, "microbatch_tokens": 40}
"""Tokens of a row: fewer than the largest sequences have, so that these are split."""

TIGHT = 110
"""Tokens of a row: more than any sequence has, and far fewer than the batch has."""

ON_ONE = [
    *(case(loss, share_prefixes=True) for loss in LOSSES),
    *(case(loss, shuffled=True, share_prefixes=share, microbatch_tokens=TIGHT) for loss in LOSSES for share in (0, 1)),
    *(case(loss, share_prefixes=True, microbatch_tokens=64) for loss in ("token mean", "sequence mean")),
    *(case(loss, share_prefixes=share, **SMALL) for loss in WHOLE for share in (0, 1)),
    *(
        case("sequence mean", share_prefixes=True, activation_checkpointing=kind, microbatch_tokens=TIGHT)
        for kind in ("selective", "full")
    ),
    *(case(loss, "cut", share_prefixes=share) for loss in LOSSES for share in (False, True)),
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp", "share_prefixes": True},
    "replicate": {"strategy": "replicate"},
    "tensor": {"tensor": 2, "share_prefixes": True},
    "pipeline": {"pipeline": 2},
}
ON_TWO = [
    *(
        case(loss, shuffled=True, microbatch_tokens=TIGHT, **layout)
        for layout in LAYOUTS.values()
        for loss in ("sequence mean", "gspo", "correction")
    ),
    case("gspo", share_prefixes=True, activation_checkpointing="full", microbatch_tokens=TIGHT, strategy="fsdp"),
    case("token mean", share_prefixes=True, microbatch_tokens=64, strategy="fsdp"),
    *(case("gspo by turns", shuffled=True, **SMALL, **layout) for layout in LAYOUTS.values()),
]
PLAIN = list(dict.fromkeys(one.plain for one in ON_ONE + ON_TWO))


# The ranks' side.


def batch_of(one: Case) -> Batch:
    batch = BATCHES[one.batch]()
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(5)).tolist()
    return in_order(batch, order) if one.shuffled else batch


def config_of(one: Case, *, precision: str = "float64") -> TrainerConfig:
    """Weights do not move: the optimizer's rate is far below what float64 resolves. Nothing is clipped."""
    training = {"max_seq_len": 64, "microbatch_tokens": 1000, **dict(one.training)}
    fixed = {"schedule": "constant", "learning_rate": 1e-60, "max_grad_norm": None}
    return TrainerConfig(
        model=MODEL,
        training=TrainingConfig(**training, **fixed),
        distributed=DistributedConfig(precision=precision, with_gpus=False, **dict(one.distributed)),
        seed=5,
    )


def run_cases(cases: list[Case]) -> list[Outcome]:
    return run_on_rank(cases, config_of=config_of, batch_of=batch_of, loss_of=lambda one: LOSSES[one.loss])


def run_logprobs(share: bool, max_tokens: int) -> tuple[list[Tensor], list[Tensor], int]:
    """The logprobs of all tokens, those that a step kept, and how many tokens were computed."""
    one = case("token mean", share_prefixes=share, microbatch_tokens=max_tokens)
    with opened(config_of(one, precision="float32"), LOSSES["token mean"]) as engine:
        batch = branching()
        scores = engine.forward_logprobs(batch)
        kept = engine.train_step(batch, keep_logprobs=True).logprobs
        assert kept is not None
        return scores, list(kept), sum(sum(lengths) for lengths in engine._plan(batch).row_lengths)


def run_metrics(loss: str) -> tuple[dict[str, float], dict[str, float], list[bool]]:
    """The metrics of a step on whole sequences and on split ones, and whether kept logprobs are equal."""
    found = []
    for one in (case(loss), case(loss, share_prefixes=True, **SMALL)):
        with opened(config_of(one), LOSSES[loss]) as engine:
            found.append(engine.train_step(branching(), keep_logprobs=True))
    kept = [each.logprobs or () for each in found]
    return dict(found[0].metrics), dict(found[1].metrics), [torch.allclose(*pair) for pair in zip(*kept, strict=True)]


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


@pytest.mark.parametrize("share", [False, True])
def test_the_small_rows_split_sequences(share: bool) -> None:
    assert large_sequences(branching(), max_tokens=40, share_prefixes=share) == {0, 1}
    assert large_sequences(branching(), max_tokens=TIGHT, share_prefixes=share) == set()


@pytest.mark.parametrize("loss", WHOLE)
def test_metrics_are_those_of_whole_sequences(loss: str, ranks: Ranks, tmp_path: Path) -> None:
    [(whole, split, kept)] = ranks.run(run_metrics, 1, scratch=tmp_path, loss=loss)
    assert whole["ratio"] > 0
    assert split == pytest.approx(whole, rel=1e-8)
    assert kept
    assert all(kept)


def test_losses_differ(plain: dict[Case, Outcome]) -> None:
    """Were the losses all the same, the tests above would say little."""
    losses = [plain[Case(loss)].loss for loss in LOSSES]
    assert len({round(loss, 9) for loss in losses}) == len(LOSSES)


@pytest.fixture(scope="module")
def unshared(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Tensor], list[Tensor], int]:
    scratch = tmp_path_factory.mktemp("unshared")
    [found] = ranks.run(run_logprobs, 1, scratch=scratch, share=False, max_tokens=1000)
    return found


@pytest.mark.parametrize(("max_tokens", "num_ranks"), [(64, 1), (1000, 1), (110, 2)])
def test_logprobs_are_the_same_to_the_last_bit(
    max_tokens: int, num_ranks: int, ranks: Ranks, unshared: tuple[list[Tensor], list[Tensor], int], tmp_path: Path
) -> None:
    scores, kept, computed = ranks.run(run_logprobs, num_ranks, scratch=tmp_path, share=True, max_tokens=max_tokens)[0]
    assert all(map(torch.equal, scores, unshared[0]))
    assert all(map(torch.equal, kept, unshared[1]))
    for sample, values in zip(branching().samples(), kept, strict=True):
        assert torch.equal(values != 0, sample.loss_weights != 0)
    assert computed < 0.8 * unshared[2]
