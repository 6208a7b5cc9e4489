"""Sequences of several samples: how batches number them, and what losses make of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from episode_rows import episodes
from forge.errors import DataError
from forge.losses import Correction, KLPenalty, PolicyLoss, TokenView
from forge.trainer.microbatches import plan_batch
from forge.trainer.row_building import Row, build_rows
from forge.types import Batch, Sample
from policy_views import doubles, put_together

LOSSES = {
    "token mean": PolicyLoss(kl=KLPenalty(0.1)),
    "sequence mean": PolicyLoss(average="sequence_mean", kl=KLPenalty(0.1)),
    "count masked": PolicyLoss(average="sequence_mean", count_masked=True),
    "constant": PolicyLoss(average="constant", length=8),
    "gspo": PolicyLoss(kind="gspo", average="sequence_mean", clip_low=0.5, clip_high=0.5),
    "correction": PolicyLoss(proximal="trainer", correction=Correction(kind="truncate", level="sequence", high=50.0)),
}


def sample(length: int, *, sequence: int | None = None, counted: int = 1) -> Sample:
    weights = torch.zeros(length)
    weights[length - counted :] = 1.0
    return Sample(torch.arange(length), weights, sequence=sequence)


def test_batches_number_sequences_in_the_order_of_their_first_samples() -> None:
    batch = Batch.of([sample(2, sequence=7), sample(3), sample(2, sequence=0), sample(4, sequence=7)])
    assert batch.sequences == batch.sequence_numbers == (0, 1, 2, 0)
    assert batch.num_sequences == 3
    assert [each.sequence for each in batch.samples()] == [0, 1, 2, 0]
    assert Batch.of(list(batch.samples())).sequences == batch.sequences


def test_samples_that_are_sequences_by_themselves_have_no_numbers() -> None:
    for given_numbers in ((None, None), (5, 3), (None, 0)):
        batch = Batch.of([sample(2, sequence=number) for number in given_numbers])
        assert (batch.sequences, batch.sequence_numbers, batch.num_sequences) == ((), (0, 1), 2)
        assert [each.sequence for each in batch.samples()] == [None, None]


def view_of(row: Row, logprobs: torch.Tensor) -> TokenView:
    return TokenView(
        logprobs,
        row.weights_T,
        row.sample_lengths,
        fields=row.fields,
        sequences=row.sequences,
        sequence_weights_T=row.sequence_weights_T,
    )


def in_doubles(batch: Batch) -> Batch:
    fields = {name: values.double() for name, values in batch.fields.items()}
    return replace(batch, loss_weights=batch.loss_weights.double(), fields=fields)


def outcome(
    loss: PolicyLoss, batch: Batch, logprobs: torch.Tensor, *, num_ranks: int, max_tokens: int
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient of the logprobs and metrics of a batch, cut into rows as a trainer does it."""
    plan = plan_batch(batch, num_ranks=num_ranks, max_tokens=max_tokens, whole_sequences=loss.needs_whole_sequences)
    leaf = logprobs.clone().requires_grad_()
    parts = leaf.split(batch.lengths)
    rows = [row for rank in range(num_ranks) for row in build_rows(batch, plan, rank) if row.sample_indices]
    terms = [loss(view_of(row, torch.cat([parts[index] for index in row.sample_indices]))) for row in rows]
    total = torch.stack([each.total for each in terms]).sum() / loss.normalizer(batch)
    total.backward()
    assert leaf.grad is not None
    metrics = {name: float(value) for name, value in put_together(terms).items()}
    return float(total.detach()), leaf.grad, metrics


def logprobs_of(batch: Batch, seed: int = 0) -> torch.Tensor:
    maker = torch.Generator().manual_seed(seed)
    return torch.randn(batch.num_tokens, generator=maker, dtype=torch.float64) * 0.3 - 4.0


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 10**6), num_ranks=st.integers(1, 3), room=st.integers(0, 60))
@settings(max_examples=15, deadline=None)
def test_how_a_batch_is_split_does_not_matter(name: str, seed: int, num_ranks: int, room: int) -> None:
    loss = LOSSES[name]
    batch = in_doubles(episodes(seed, vocab=50, groups=[(3, 1, 4), (5,), (2, 2)], num_roots=1 + seed % 2))
    sizes: dict[int, int] = {}
    for sequence, length in zip(batch.sequence_numbers, batch.lengths, strict=True):
        sizes[sequence] = sizes.get(sequence, 0) + length
    least = max(sizes.values()) if loss.needs_whole_sequences else max(batch.lengths)
    logprobs = logprobs_of(batch)
    expected = outcome(loss, batch, logprobs, num_ranks=1, max_tokens=10**6)
    found = outcome(loss, batch, logprobs, num_ranks=num_ranks, max_tokens=least + room)
    assert found[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-14)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-11, atol=1e-14)
    assert found[2] == pytest.approx(expected[2], rel=1e-11)


def unsplit(batch: Batch) -> tuple[Batch, list[int]]:
    """One sample for each sequence: the tokens that count of all its samples, after one that does not.

    Returns them, and where in the old batch each token's logprob is found.
    """
    samples, places = [], list[int]()
    old = list(batch.samples())
    starts = [sum(batch.lengths[:index]) for index in range(len(batch))]
    for sequence in range(batch.num_sequences):
        chosen = [0]
        members = [index for index, number in enumerate(batch.sequence_numbers) if number == sequence]
        for index in members:
            chosen += [starts[index] + int(place) for place in old[index].loss_weights.nonzero()]
        weights = batch.loss_weights[chosen].clone()
        weights[0] = 0
        fields = {name: values[chosen] for name, values in batch.fields.items()}
        samples.append(Sample(batch.token_ids[chosen], weights, fields))
        places += chosen
    return Batch.of(samples), places


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_an_episode_in_several_samples_is_one_sequence(name: str, seed: int) -> None:
    """Its tokens in one sample, with the same logprobs, have the same loss and gradient."""
    batch = in_doubles(episodes(seed, vocab=50, groups=[(4, 6), (1, 3)]))
    whole, places = unsplit(batch)
    assert whole.sequences == ()
    assert batch.sequences
    logprobs = logprobs_of(batch)
    found = outcome(LOSSES[name], batch, logprobs, num_ranks=1, max_tokens=10**6)
    expected = outcome(LOSSES[name], whole, logprobs[places], num_ranks=1, max_tokens=10**6)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[2] == pytest.approx(expected[2], rel=1e-11)
    gathered = torch.zeros_like(logprobs).index_add_(0, torch.tensor(places), expected[1])
    torch.testing.assert_close(found[1], gathered, rtol=1e-11, atol=1e-14)


# Two sequences by hand. The first has two samples that share a prefix: tokens x y | a b and x y a b | c, of which the
# second counts c alone. The ratios are exp(log_ratio), advantages 1 and -1.
LOG_RATIOS = [0.0, 0.0, 0.3, -0.1, 0.0, 0.0, 9.0, 9.0, 0.1, 0.0, 0.2]
WEIGHTS = [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 1.0]
LENGTHS, SEQUENCES = (4, 5, 2), (0, 0, 1)


def hand_view() -> TokenView:
    old = doubles([-1.0] * 11)
    return TokenView(
        (old + doubles(LOG_RATIOS)).requires_grad_(),
        doubles(WEIGHTS),
        LENGTHS,
        fields={"advantages": doubles([1.0] * 9 + [-1.0] * 2), "old_logprobs": old},
        sequences=SEQUENCES,
    )


def hand_batch() -> Batch:
    parts = doubles(WEIGHTS).split(LENGTHS)
    each = zip(LENGTHS, parts, SEQUENCES, strict=True)
    return Batch.of([Sample(torch.arange(size), weights, sequence=number) for size, weights, number in each])


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (
            PolicyLoss(clip_low=1.0, clip_high=math.inf, average="sequence_mean"),
            (-(math.exp(0.3) + math.exp(-0.1) + 2 * math.exp(0.1)) / 4 + math.exp(0.2)) / 2,
        ),
        (
            PolicyLoss(clip_low=1.0, clip_high=math.inf, average="constant", length=5),
            (-(math.exp(0.3) + math.exp(-0.1) + 2 * math.exp(0.1)) + math.exp(0.2)) / 10,
        ),
        (
            PolicyLoss(clip_low=1.0, clip_high=math.inf),
            (-(math.exp(0.3) + math.exp(-0.1) + 2 * math.exp(0.1)) + math.exp(0.2)) / 5,
        ),
        # one ratio for a, b and c: the mean of the three log ratios is 0.1
        (
            PolicyLoss(kind="gspo", clip_low=1.0, clip_high=math.inf, average="sequence_mean"),
            (-math.exp(0.1) + math.exp(0.2)) / 2,
        ),
        # the product of the three ratios, exp(0.3), is above the bound: the first sequence is left out
        (
            PolicyLoss(
                clip_low=1.0,
                clip_high=math.inf,
                average="sequence_mean",
                correction=Correction(kind="mask", level="sequence", high=1.3),
            ),
            math.exp(0.2) / 2,
        ),
    ],
)
def test_by_hand(policy: PolicyLoss, expected: float) -> None:
    total = float(policy(hand_view()).total.detach()) / policy.normalizer(hand_batch())
    assert total == pytest.approx(expected, abs=1e-12)


def test_gradient_of_one_ratio_per_sequence_by_hand() -> None:
    """Each of the three tokens moves the common ratio by a third, in the loss of weight 1 of its sequence."""
    view = hand_view()
    policy = PolicyLoss(kind="gspo", clip_low=1.0, clip_high=math.inf, average="sequence_mean")
    (gradient,) = torch.autograd.grad(policy(view).total, view.logprobs_T)
    third = -math.exp(0.1) / 3
    assert gradient.tolist() == pytest.approx([0, 0, third, third, 0, 0, 0, 0, third, 0, math.exp(0.2)], abs=1e-12)


def test_masked_sequences_count_once() -> None:
    masked = [Sample(torch.arange(3), torch.zeros(3), sequence=9) for _ in range(4)]
    batch = Batch.of([*hand_batch().samples(), *masked])
    assert batch.sequences == (0, 0, 1, 2, 2, 2, 2)
    assert PolicyLoss(average="sequence_mean").normalizer(batch) == 2
    assert PolicyLoss(average="sequence_mean", count_masked=True).normalizer(batch) == 3
    assert PolicyLoss(average="constant", length=10).normalizer(batch) == 30
    assert PolicyLoss().normalizer(batch) == 5


def test_the_weight_of_a_sequence_is_that_of_the_whole_batch() -> None:
    """A micro-batch that holds one sample of a sequence divides by the weight of all of them."""
    batch = hand_batch()
    plan = plan_batch(batch, num_ranks=1, max_tokens=5)
    found = {}
    for row in build_rows(batch, plan, 0):
        assert row.sequence_weights_T is not None
        assert row.sequence_weights_T.dtype == torch.float64
        parts = row.sequence_weights_T.split(row.sample_lengths)
        found.update(zip(row.sample_indices, (part.tolist() for part in parts), strict=True))
    assert found == {0: [4.0] * 4, 1: [4.0] * 5, 2: [1.0] * 2}
    assert len(plan.rows[0]) == 3


@pytest.mark.parametrize("sequences", [(0,), (0, 0, 2), (1, 1, 2), (0, -1, 1)])
def test_sequences_that_are_not_those_of_the_samples(sequences: Sequence[int]) -> None:
    with pytest.raises(DataError) as caught:
        replace(hand_view(), sequences=tuple(sequences))
    assert (caught.value.path, caught.value.value) == ("sequences", tuple(sequences))
    assert caught.value.rule
    assert caught.value.repair


@pytest.mark.parametrize(
    ("loss", "needs"),
    [
        (PolicyLoss(), False),
        (PolicyLoss(average="sequence_mean", count_masked=True), False),
        (PolicyLoss(kind="gspo"), True),
        (PolicyLoss(correction=Correction(kind="mask", level="sequence")), True),
    ],
)
def test_which_losses_need_whole_sequences(loss: PolicyLoss, needs: bool) -> None:
    assert loss.needs_whole_sequences is needs
