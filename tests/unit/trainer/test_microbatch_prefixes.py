"""Samples that begin alike: which tokens are computed once, and where everything else finds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forge.trainer.bundles import find_bundles
from forge.trainer.microbatches import plan_batch
from forge.trainer.row_building import build_rows
from forge.types import Batch, Sample


def sample(prompt: Sequence[int], answer: Sequence[int], *, counted: bool = True) -> Sample:
    weights = torch.tensor([0.0] * len(prompt) + [1.0 if counted else 0.0] * len(answer))
    return Sample(torch.tensor([*prompt, *answer]), weights)


P, Q = (1, 2, 3, 4, 5), (1, 2, 3, 4, 6)


def bundles(*samples: Sample, max_tokens: int = 100) -> list[tuple[tuple[int, ...], int, int]]:
    found = find_bundles(Batch.of(samples), max_tokens=max_tokens)
    return [(bundle.samples, bundle.prefix, bundle.num_computed) for bundle in found]


def test_the_completions_of_a_prompt_share_it_and_nothing_else() -> None:
    answers = [sample(P, (7, 8)), sample(P, (7, 9)), sample(P, (9,))]  # two answers begin alike: that is their own
    assert bundles(*answers) == [((0, 1, 2), 5, 5 + 2 + 2 + 1)]


def test_another_prompt_begins_another_bundle() -> None:
    assert bundles(sample(P, (7,)), sample(P, (8,)), sample(Q, (7,)), sample(Q, (8,))) == [
        ((0, 1), 5, 7),
        ((2, 3), 5, 7),
    ]


def test_a_bundle_is_no_larger_than_a_row() -> None:
    answers = [sample(P, (7, 8, 9)) for _ in range(5)]
    assert bundles(*answers, max_tokens=11) == [((0, 1), 5, 11), ((2, 3), 5, 11), ((4,), 0, 8)]


def test_short_beginnings_are_not_worth_it() -> None:
    assert bundles(sample((1, 2, 3), (7,)), sample((1, 2, 3), (8,))) == [((0,), 0, 4), ((1,), 0, 4)]


def test_samples_that_do_not_count_keep_one_token_of_their_own() -> None:
    same = sample(P, (7,), counted=False)
    assert bundles(same, same) == [((0, 1), 5, 7)]


def test_every_token_knows_where_it_is_computed_and_who_predicts_it() -> None:
    batch = Batch.of([sample(P, (7, 8)), sample(P, (9,)), sample((3, 3, 3), (4,))])
    plan = plan_batch(batch, num_ranks=1, max_tokens=100, row_multiple=4, share_prefixes=True)
    assert (plan.row_lengths, plan.prefixes) == (((12,),), (0, 5, 0))
    (row,) = build_rows(batch, plan, 0)
    assert row.token_ids_L.tolist() == [1, 2, 3, 4, 5, 7, 8, 9, 3, 3, 3, 4]
    assert row.positions_L.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 0, 1, 2, 3]
    assert row.tokens_T.tolist() == batch.token_ids.tolist()
    assert row.places_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert row.own_U.tolist() == [0, 1, 2, 3, 4, 5, 6, 12, 13, 14, 15, 16]
    assert torch.equal(row.tokens_T[row.own_U], row.token_ids_L)
    assert torch.equal(row.token_ids_L[row.places_T], row.tokens_T)
    assert row.counted_N.tolist() == [5, 6, 12, 16]
    assert row.predictors(row.counted_N).tolist() == [4, 5, 4, 10]  # 7 and 9 are both predicted by the prompt's last


def test_padding_comes_after_what_is_shared() -> None:
    batch = Batch.of([sample(P, (7,)), sample(P, (9,))])
    (row,) = build_rows(batch, plan_batch(batch, num_ranks=1, max_tokens=100, row_multiple=8, share_prefixes=True), 0)
    sharing = row.sharing(row.documents())
    assert sharing is not None
    assert (row.document_lengths, row.num_padding) == ((6, 6, 1), 1)
    assert sharing.places.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 7]
    assert sharing.own.tolist() == [0, 1, 2, 3, 4, 5, 11, 12]
    assert sharing.places[sharing.own].tolist() == list(range(8))
