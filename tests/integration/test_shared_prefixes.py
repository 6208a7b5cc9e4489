"""Prompts that go through the trainer once: the same logprobs to the last bit, the same gradient, fewer tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from episode_rows import episodes
from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.losses import KLPenalty, PolicyLoss
from forge.models.tiny import make_tiny
from forge.trainer.bundles import large_sequences
from forge.trainer.engine import Engine
from forge.types import Batch, Sample

FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe")

pytestmark = pytest.mark.usefixtures("one_thread")


def rollouts() -> Batch:
    """Groups of completions of prompts, as a policy is taught with; one completion counts for nothing."""
    chance = torch.Generator().manual_seed(3)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, 500, (count,), generator=chance)

    samples = []
    for length, size in ((21, 4), (6, 3), (2, 2), (40, 1)):
        prompt = tokens(length)
        for place in range(size):
            ids = torch.cat([prompt, tokens(int(tokens(1)) % 13 + 1)])
            weights = torch.zeros(len(ids))
            weights[length:] = 0.0 if (length, place) == (6, 1) else 1.0
            fields = {name: torch.rand(len(ids), generator=chance) - 0.5 for name in ("advantages", "ref_logprobs")}
            fields["old_logprobs"] = torch.rand(len(ids), generator=chance) * -6
            samples.append(Sample(ids, weights, fields))
    return Batch.of(samples)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("prefixes") / request.param
    make_tiny(place, family=request.param, num_layers=2)
    return place


def engine(folder: Path, *, share: bool, max_tokens: int, precision: str) -> Engine:
    return Engine(
        TrainerConfig(
            model=ModelConfig(path=str(folder)),
            training=TrainingConfig(
                max_seq_len=64, microbatch_tokens=max_tokens, schedule="constant", share_prefixes=share, max_steps=9
            ),
            distributed=DistributedConfig(with_gpus=False, precision=precision),
        ),
        loss=PolicyLoss(kl=KLPenalty(0.1), entropy_coefficient=0.01, temperature=0.8),
    )


@pytest.mark.parametrize("max_tokens", [64, 1024])
def test_scores_are_the_same_to_the_last_bit(folder: Path, max_tokens: int) -> None:
    found = []
    for share in (False, True):
        made = engine(folder, share=share, max_tokens=max_tokens, precision="float32")
        found.append(made.forward_logprobs(rollouts(), temperature=0.8))
        made.close()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("max_tokens", [64, 1024])
def test_loss_gradient_and_metrics_are_the_same(folder: Path, max_tokens: int) -> None:
    results, gradients = [], []
    for share in (False, True):
        made = engine(folder, share=share, max_tokens=max_tokens, precision="float64")
        made._kept = {}
        made._pass(rollouts(), backward=True)
        totals = made._sums()
        results.append({"loss": totals.loss, **totals.metrics})
        gradients.append({name: each.grad for name, each in made._parameters.items()})
        made.close()
    is_mixture = folder.name == "qwen3_moe"  # whose router computes in float32, whatever the others do
    assert results[1] == pytest.approx(results[0], rel=1e-6 if is_mixture else 1e-9, abs=1e-12)
    close = {"rtol": 1e-4, "atol": 1e-6} if is_mixture else {"rtol": 1e-8, "atol": 1e-11}
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, **close)


def test_fewer_tokens_are_computed(folder: Path) -> None:
    batch = rollouts()
    counts = []
    for share in (False, True):
        made = engine(folder, share=share, max_tokens=1024, precision="float32")
        counts.append(sum(sum(lengths) for lengths in made._plan(batch).row_lengths))
        made.close()
    assert counts == [batch.num_tokens, batch.num_tokens - 3 * 21 - 2 * 6]


def branching() -> Batch:
    """Two groups of episodes whose branches share sampled tokens, at several depths."""
    return episodes(2, vocab=500, groups=[(6, 4, 5), (20, 2)])


def test_branches_that_share_turns_have_the_same_logprobs_and_gradient(folder: Path) -> None:
    batch = branching()
    scores, losses, gradients, counts = [], [], [], []
    for share in (False, True):
        made = engine(folder, share=share, max_tokens=256, precision="float32")
        scores.append(torch.cat(made.forward_logprobs(batch, temperature=0.8)))
        made.close()
        made = engine(folder, share=share, max_tokens=256, precision="float64")
        made._pass(batch, backward=True)
        losses.append(made._sums().loss)
        gradients.append({name: each.grad for name, each in made._parameters.items()})
        counts.append(sum(sum(lengths) for lengths in made._plan(batch).row_lengths))
        made.close()
    assert torch.equal(*scores)
    is_mixture = folder.name == "qwen3_moe"
    assert losses[1] == pytest.approx(losses[0], rel=1e-6 if is_mixture else 1e-9)
    close = {"rtol": 1e-4, "atol": 1e-6} if is_mixture else {"rtol": 1e-8, "atol": 1e-11}
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, **close)
    assert counts[0] == batch.num_tokens
    assert counts[1] < 0.6 * batch.num_tokens


def test_a_sequence_that_does_not_fit_into_one_row_gives_the_same_step(folder: Path) -> None:
    results = []
    for max_tokens in (256, 64):
        made = engine(folder, share=True, max_tokens=max_tokens, precision="float64")
        made.loss = PolicyLoss(kind="gspo")
        try:
            assert bool(large_sequences(branching(), max_tokens=max_tokens, share_prefixes=True)) == (max_tokens == 64)
            results.append(made.train_step(branching()))
        finally:
            made.close()
    whole, split = results
    close = 1e-6 if folder.name == "qwen3_moe" else 1e-9
    assert (split.loss, split.grad_norm) == pytest.approx((whole.loss, whole.grad_norm), rel=close, abs=close)
