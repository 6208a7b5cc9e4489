"""In float32 on a CPU a sample's logprobs have the same bits whatever else is in the batch, for the trainer's engine.

That is what a generator's logprobs can then be compared with. The same engines show that the row-wise attention trains:
on one rank and on two, with and without recomputing activations, a step's loss and gradient agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_ranks import Ranks, made_batch, opened, ranks_of
from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.types import Batch

VOCAB = 132
FACTS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 136,
    "intermediate_size": 150,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_seq_len": 256,
    "rope_theta": 100.0,
    "norm_eps": 1e-6,
}
MODELS = {
    "dense": ModelConfig(family="qwen3", tie_embeddings=False, **FACTS),
    "mixture": ModelConfig(
        family="qwen3_moe",
        tie_embeddings=False,
        num_experts=4,
        num_experts_per_token=2,
        expert_intermediate_size=77,
        **FACTS,
    ),
    "wide": ModelConfig(
        family="llama",
        tie_embeddings=False,
        **{**FACTS, "hidden_size": 1104, "intermediate_size": 48, "num_heads": 5, "num_kv_heads": 5},
    ),
}
"""The last is of shapes for which torch's own products depend on the batch with two threads, on an Intel Xeon."""
LENGTHS = (8, 2, 70, 33, 16, 17, 5, 128)
PACKINGS = (128, 150, 280)
"""Tokens of a row: with the first no two of the longer samples share one, with the last all are in one."""
ONE_RANK = {
    "plain": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
}
TWO_RANKS = {
    "fsdp": {},
    "pipeline": {"pipeline": 2},
    "tensor": {"tensor": 2},
}


def batch() -> Batch:
    return made_batch(LENGTHS, vocab=VOCAB, seed=3)


# The ranks' side.


def config_of(model: str, *, row_tokens: int, training: dict[str, Any], layout: dict[str, Any]) -> TrainerConfig:
    return TrainerConfig(
        model=MODELS[model],
        training=TrainingConfig(
            max_seq_len=128, microbatch_tokens=row_tokens, head_chunk_tokens=50, schedule="constant", **training
        ),
        distributed=DistributedConfig(with_gpus=False, **layout),
    )


def enlarge(engine: Any) -> None:
    """Make logits so large that a last bit of any of them shows in logprobs."""
    for part in engine.parts:
        for parameter in part.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(10)


def score_packed(model: str, num_threads: int) -> list[list[Tensor]]:
    """Each sample's logprobs: alone, and in batches that are packed in several ways and orders."""
    torch.set_num_threads(num_threads)
    samples = list(batch().samples())
    orders = (list(range(len(samples))), list(reversed(range(len(samples)))), [3, 1, 4])
    found: list[list[Tensor]] = [[] for _ in samples]
    for row_tokens in PACKINGS:
        with opened(config_of(model, row_tokens=row_tokens, training={}, layout={})) as engine:
            enlarge(engine)
            if row_tokens == PACKINGS[0]:
                for index, sample in enumerate(samples):
                    found[index] += engine.forward_logprobs(Batch.of([sample]))
            for order in orders:
                scores = engine.forward_logprobs(Batch.of([samples[index] for index in order]))
                for index, score in zip(order, scores, strict=True):
                    found[index].append(score)
    return found


def train(model: str, layouts: dict[str, dict[str, Any]], *, are_training: bool) -> dict[str, tuple[Any, ...]]:
    """Logprobs before, loss and gradient norm of one step, and logprobs after it."""
    found = {}
    for name, options in layouts.items():
        training, layout = (options, {}) if are_training else ({}, options)
        with opened(config_of(model, row_tokens=150, training=training, layout=layout)) as engine:
            before = engine.forward_logprobs(batch())
            result = engine.train_step(batch())
            found[name] = (before, result.loss, result.grad_norm, engine.forward_logprobs(batch()))
    return found


# The tests' side.


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from ranks_of(__name__)


def assert_same_bits(found: list[list[Tensor]]) -> None:
    for length, of_sample in zip(LENGTHS, found, strict=True):
        assert len(of_sample) >= 1 + 2 * len(PACKINGS)
        assert of_sample[0].shape == (length,)
        assert of_sample[0][1:].max() < 0
        for other in of_sample[1:]:
            assert torch.equal(other, of_sample[0]), length


@pytest.mark.parametrize("model", list(MODELS))
def test_logprobs_have_the_same_bits_in_any_batch(ranks: Ranks, tmp_path: Path, model: str) -> None:
    [found] = ranks.run(score_packed, 1, scratch=tmp_path, model=model, num_threads=1)
    assert_same_bits(found)


def test_logprobs_have_the_same_bits_with_two_threads(ranks: Ranks, tmp_path: Path) -> None:
    [one] = ranks.run(score_packed, 1, scratch=tmp_path / "one", model="wide", num_threads=1)
    [two] = ranks.run(score_packed, 1, scratch=tmp_path / "two", model="wide", num_threads=2)
    assert_same_bits([[*alone, *together] for alone, together in zip(one, two, strict=True)])


def test_recomputing_and_splitting_give_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    [one] = ranks.run(train, 1, scratch=tmp_path / "one", model="dense", layouts=ONE_RANK, are_training=True)
    both = ranks.run(train, 2, scratch=tmp_path / "two", model="dense", layouts=TWO_RANKS, are_training=False)
    before, loss, norm, after = one["plain"]
    assert not torch.equal(after[2], before[2])
    for found in (one, *both):
        for name, (scores, its_loss, its_norm, its_scores) in found.items():
            assert its_loss == pytest.approx(loss, rel=1e-6), name
            assert its_norm == pytest.approx(norm, rel=1e-5), name
            for mine, known in zip(its_scores, after, strict=True):
                torch.testing.assert_close(mine, known, rtol=1e-4, atol=1e-4, msg=name)
            if name != "tensor":  # which sums over ranks what one rank sums at once
                assert all(map(torch.equal, scores, before)), name
