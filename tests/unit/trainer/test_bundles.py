"""Trees of samples: every prefix that branches or group members share is computed once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from episode_rows import Maker, each_alone, episodes, in_order, samples_of
from forge.errors import DataError
from forge.trainer import bundles
from forge.trainer.bundles import LEAST, MOST_ATTENDED, find_bundles, sequence_bundles
from forge.trainer.microbatches import RowPlan, check_batch, plan_batch, scatter_back
from forge.trainer.row_building import build_rows
from forge.types import Batch, Sample

VOCAB = 1000


def group_with_branches(*, num_members: int, num_branches: int, prompt: int, first: int, last: int) -> Batch:
    """A group whose members sample a first turn, and from it branch into so many second turns."""
    maker = Maker(0, vocab=VOCAB)
    samples: list[Sample] = []
    question = maker.tokens(prompt)
    for member in range(num_members):
        turns = [maker.turn(None, question, first)]
        turns += [maker.turn(0, maker.tokens(0), last) for _ in range(num_branches)]
        samples += samples_of(turns, member)
    return Batch.of(samples)


def num_prefixes(samples: Sequence[Sample]) -> int:
    """The tokens that a tree of these samples has: its distinct prefixes."""
    return len({tuple(each.token_ids[:end].tolist()) for each in samples for end in range(1, len(each) + 1)})


def computed(plan: RowPlan) -> int:
    return sum(sum(lengths) for lengths in plan.row_lengths)


def test_a_group_of_branching_episodes_is_one_tree() -> None:
    batch = group_with_branches(num_members=8, num_branches=4, prompt=200, first=100, last=50)
    [found] = find_bundles(batch, max_tokens=10_000)
    assert (batch.num_tokens, found.num_computed) == (8 * 4 * 350, 200 + 8 * (100 + 4 * 50))
    assert sorted(found.samples) == list(range(32))
    assert sorted(found.prefixes) == [0] + [200] * 7 + [300] * 24
    plan = plan_batch(batch, num_ranks=1, max_tokens=10_000, share_prefixes=True)
    assert computed(plan) == 2600
    prompts_alone = plan_batch(each_alone(batch), num_ranks=1, max_tokens=10_000, share_prefixes=True)
    assert computed(prompts_alone) == 350 + 31 * 150


def check_rows(batch: Batch, plan: RowPlan) -> None:
    """Every sample is in one row, and finds its own tokens and positions at the places it is told."""
    seen: list[int] = []
    for rank in range(plan.num_ranks):
        for row in build_rows(batch, plan, rank):
            seen += row.sample_indices
            assert torch.equal(row.token_ids_L[row.places_T], row.tokens_T)
            positions = [torch.arange(length) for length in row.sample_lengths]
            assert torch.equal(
                row.positions_L[row.places_T], torch.cat([torch.zeros(0, dtype=torch.int64), *positions])
            )
            assert torch.equal(row.tokens_T[row.own_U], row.token_ids_L[: len(row.own_U)])
            assert torch.equal(row.places_T[row.own_U], torch.arange(len(row.own_U)))
            for length, prefix in zip(row.sample_lengths, row.prefixes, strict=True):
                assert 0 <= prefix < length
            if row.is_shared:
                sharing = row.sharing(row.documents())
                assert sharing is not None
                assert sum(sharing.queries.lengths) == len(row.own_U)
    assert sorted(seen) == list(range(len(batch)))


@given(
    seed=st.integers(0, 10**6),
    num_roots=st.integers(1, 3),
    num_ranks=st.integers(1, 3),
    room=st.one_of(st.integers(0, 80), st.just(10_000)),
    whole=st.booleans(),
    shuffle=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_tree_is_laid_out(seed: int, num_roots: int, num_ranks: int, room: int, whole: bool, shuffle: bool) -> None:
    # A vocabulary of two tokens makes samples that are alike by chance, or begin with all of another.
    batch = episodes(seed, vocab=(2, 5, 500)[seed % 3], groups=[(3, 5), (1, 1, 7), (4,)], num_roots=num_roots)
    if shuffle:
        batch = in_order(batch, torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist())
    sizes = dict.fromkeys(batch.sequence_numbers, 0)
    for number, length in zip(batch.sequence_numbers, batch.lengths, strict=True):
        sizes[number] += length
    max_tokens = (max(sizes.values()) if whole else max(batch.lengths)) + room
    found = find_bundles(batch, max_tokens=max_tokens, whole_sequences=whole)
    samples = list(batch.samples())
    for bundle in found:
        lengths = [batch.lengths[index] for index in bundle.samples]
        assert bundle.num_computed == sum(lengths) - sum(bundle.prefixes) <= max_tokens
        members = [samples[index] for index in bundle.samples]
        kept_apart = LEAST * (len(members) - 1) + len(members)  # short prefixes, and one token that is always its own
        assert num_prefixes(members) <= bundle.num_computed <= num_prefixes(members) + kept_apart
    if whole:
        homes = [{batch.sequence_numbers[index] for index in bundle.samples} for bundle in found]
        assert sum(len(home) for home in homes) == batch.num_sequences
    plan = plan_batch(batch, num_ranks=num_ranks, max_tokens=max_tokens, share_prefixes=True, whole_sequences=whole)
    check_rows(batch, plan)
    assert plan == plan_batch(
        batch, num_ranks=num_ranks, max_tokens=max_tokens, share_prefixes=True, whole_sequences=whole
    )


def test_long_prefixes_are_computed_exactly_once() -> None:
    """With room for everything, and prefixes that are long enough, nothing at all is computed twice."""
    maker = Maker(1, vocab=10**9)
    samples: list[Sample] = []
    trees = [[None, 0, 0, 1, 2, 1, 3, 2], [None, 0, 1, 2], [None, 0, 0, 0, 1, 4]]
    question = maker.tokens(9)
    for number, parents in enumerate(trees):
        turns = [maker.turn(parent, question if parent is None else maker.tokens(5), 6) for parent in parents]
        samples += samples_of(turns, number)
    batch = Batch.of(samples)
    for order in (range(len(batch)), reversed(range(len(batch)))):
        found = find_bundles(in_order(batch, list(order)), max_tokens=10_000)
        assert [bundle.num_computed for bundle in found] == [num_prefixes(samples)]


def test_prompts_with_the_same_system_prompt_alone_are_not_one_bundle() -> None:
    batch = episodes(4, vocab=10**9, groups=[(2, 3), (3, 2), (4, 4)])
    groups = [[0, 1], [2, 3], [4, 5]]
    found = find_bundles(batch, max_tokens=10_000)
    assert [sorted({batch.sequences[index] for index in each.samples}) for each in found] == groups


def test_a_history_that_was_replaced_does_not_part_a_group() -> None:
    """Each member has a branch and a second root; the first turns of all members share the prompt nevertheless."""
    maker = Maker(2, vocab=10**9)
    question, samples = maker.tokens(20), list[Sample]()
    for member in range(3):
        turns = [maker.turn(None, question, 5), maker.turn(0, maker.tokens(2), 5), maker.turn(0, maker.tokens(2), 5)]
        turns.append(maker.turn(None, maker.tokens(12), 5))
        samples += samples_of(turns, member)
    batch = Batch.of(samples)
    found = find_bundles(batch, max_tokens=10_000)
    assert sorted(len(each.samples) for each in found) == [1, 1, 1, 6]
    assert sum(each.num_computed for each in found) == num_prefixes(samples)


def test_attention_sees_a_bounded_number_of_copies() -> None:
    batch = group_with_branches(num_members=2, num_branches=60, prompt=300, first=20, last=2)
    found = find_bundles(batch, max_tokens=10_000)
    assert len(found) > 1
    for bundle in found:
        attended = sum(batch.lengths[index] for index in bundle.samples)
        assert attended <= MOST_ATTENDED * bundle.num_computed
        assert attended > MOST_ATTENDED / 2 * bundle.num_computed
    [whole] = find_bundles(in_order(batch, range(60)), max_tokens=10_000, whole_sequences=True)  # cannot be split
    assert len(whole.samples) == 60


def test_a_sequence_that_does_not_fit_into_a_row() -> None:
    batch = group_with_branches(num_members=2, num_branches=3, prompt=10, first=5, last=5)
    assert len(find_bundles(batch, max_tokens=29)) == 4
    for make, size in ((find_bundles, 30), (sequence_bundles, 60)):
        options = {"whole_sequences": True} if make is find_bundles else {}
        assert len(make(batch, max_tokens=size, **options)) == 2
        with pytest.raises(DataError) as caught:
            make(batch, max_tokens=size - 1, **options)
        assert (caught.value.path, caught.value.value) == ("episode 0, leaf 1", size)
        assert f"at most {size - 1} tokens" in (caught.value.rule or "")
        assert f"training.microbatch_tokens to {size}" in (caught.value.repair or "")


@pytest.mark.parametrize("share", [False, True])
def test_whole_sequences_are_in_one_row(share: bool) -> None:
    batch = in_order(episodes(5, vocab=VOCAB, groups=[(4, 4, 4)], num_roots=2), [8, 3, 0, 5, 2, 7, 4, 1, 6])
    plan = plan_batch(batch, num_ranks=2, max_tokens=150, share_prefixes=share, whole_sequences=True)
    check_rows(batch, plan)
    rows = [row for rank in plan.rows for row in rank if row]
    assert len(rows) > 1
    homes = [{batch.sequences[index] for index in row} for row in rows]
    assert sum(len(home) for home in homes) == batch.num_sequences


def test_results_come_back_in_the_order_of_the_batch() -> None:
    batch = episodes(6, vocab=3, groups=[(5, 5), (5,)])
    plan = plan_batch(batch, num_ranks=2, max_tokens=120, share_prefixes=True)
    assert any(list(row) != sorted(row) for rank in plan.rows for row in rank)  # the tree's order is another
    values = [[row.tokens_T for row in build_rows(batch, plan, rank)] for rank in range(2)]
    for found, sample in zip(scatter_back(plan, values), batch.samples(), strict=True):
        assert torch.equal(found, sample.token_ids)


def test_samples_that_are_sequences_are_bundled_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sequences of several samples no tree is looked for: the same rows, the same bits, the same speed."""
    monkeypatch.setattr(bundles, "_find_trees", None)
    batch = each_alone(episodes(7, vocab=VOCAB, groups=[(1, 1, 1), (1, 1)]))
    [one, two] = find_bundles(batch, max_tokens=10_000, whole_sequences=True)
    assert (one.samples, two.samples) == ((0, 1, 2), (3, 4))
    assert one.prefixes == (0, one.prefix, one.prefix)


def test_a_batch_with_too_few_sequence_numbers() -> None:
    batch = replace(episodes(8, vocab=VOCAB, groups=[(3, 3)]), sequences=(0, 0, 0, 0, 0))
    with pytest.raises(DataError) as caught:
        check_batch(batch, vocab_size=VOCAB)
    assert (caught.value.path, caught.value.value) == ("sequences", 5)
    assert f"{len(batch)} numbers" in (caught.value.rule or "")
    assert caught.value.repair
