"""Rows: every sample goes through the model once, alone among its neighbours, and the ranks do about the same work."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forge.errors import ConfigError, DataError, ForgeError
from forge.trainer.microbatches import EVEN_LENGTH, check_batch, plan_rows, scatter_back
from forge.trainer.row_building import Row, build_rows
from forge.types import Batch, Sample

torch.set_num_threads(1)


def sample(length: int, *, seed: int) -> Sample:
    """Token ids from 1, so that a 0 can only come from padding or a missing target."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 3, (length,), generator=generator).float() / 2
    weights[0] = 0
    return Sample(
        torch.randint(1, 1000, (length,), generator=generator),
        weights,
        {"advantages": torch.randn(length, generator=generator)},
        f"file:{seed}",
    )


def batch_of(lengths: tuple[int, ...]) -> Batch:
    return Batch.of([sample(length, seed=seed) for seed, length in enumerate(lengths)])


def cost(length: int) -> float:
    return length + length * length / EVEN_LENGTH


@st.composite
def settings_of_plans(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    max_tokens = draw(st.integers(1, 60))
    lengths = draw(st.lists(st.integers(1, max_tokens), min_size=1, max_size=40))
    options = {
        "num_ranks": draw(st.integers(1, 5)),
        "max_tokens": max_tokens,
        "row_multiple": draw(st.sampled_from([1, 2, 4, 8])),
        "fixed_shape": draw(st.booleans()),
    }
    return tuple(lengths), options


NEEDS_TIGHT_PACKING = ((3, 3, 2, 2, 2), {"num_ranks": 1, "max_tokens": 6, "row_multiple": 1, "fixed_shape": False})
ONE_SAMPLE_A_ROW = (
    tuple(range(60, 30, -1)),
    {"num_ranks": 2, "max_tokens": 60, "row_multiple": 1, "fixed_shape": False},
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(settings_of_plans())
@example(NEEDS_TIGHT_PACKING)
@example(ONE_SAMPLE_A_ROW)
def test_a_plan_holds_each_sample_once_within_the_limits(drawn: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    lengths, options = drawn
    plan = plan_rows(lengths, **options)
    assert plan == plan_rows(list(lengths), **options)
    assert plan.num_ranks == options["num_ranks"]
    assert {len(rows) for rows in plan.rows} == {plan.num_rows}
    assert sorted(index for rows in plan.rows for row in rows for index in row) == list(range(len(lengths)))
    full = -(-options["max_tokens"] // options["row_multiple"]) * options["row_multiple"]
    for rows, row_lengths in zip(plan.rows, plan.row_lengths, strict=True):
        for row, row_length in zip(rows, row_lengths, strict=True):
            num_tokens = sum(lengths[index] for index in row)
            assert num_tokens <= options["max_tokens"]
            assert row_length % options["row_multiple"] == 0
            if options["fixed_shape"]:
                assert row_length == full
            elif row:
                assert num_tokens <= row_length < num_tokens + options["row_multiple"]
            else:
                assert row_length == options["row_multiple"]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(settings_of_plans())
@example(ONE_SAMPLE_A_ROW)
def test_ranks_differ_by_no_more_than_a_row(drawn: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    lengths, options = drawn
    plan = plan_rows(lengths, **options)
    rows = [[sum(cost(lengths[index]) for index in row) for row in rows] for rows in plan.rows]
    totals = [sum(costs) for costs in rows]
    by_round = list(zip(*rows, strict=True))
    assert max(totals) - min(totals) <= max(max(costs) - min(costs) for costs in by_round) + 1e-9
    assert all(min(before) >= max(after) - 1e-9 for before, after in pairwise(by_round))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(settings_of_plans())
def test_rows_are_few(drawn: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    """Two rows that are both at most half full would have been one, so all but one are more than half full."""
    lengths, options = drawn
    plan = plan_rows(lengths, **options)
    at_most = 2 * sum(lengths) // options["max_tokens"] + 1
    assert (plan.num_rows - 1) * options["num_ranks"] < at_most


def test_rows_are_packed_to_the_last_token_where_they_can_be() -> None:
    lengths = (30, 30, 70, 70)
    plan = plan_rows(lengths, num_ranks=1, max_tokens=100)
    assert [sum(lengths[index] for index in row) for row in plan.rows[0]] == [100, 100]
    lengths, options = NEEDS_TIGHT_PACKING
    assert plan_rows(lengths, **options).rows == (((0, 1), (2, 3, 4)),)


def test_few_samples_are_spread_over_the_ranks() -> None:
    plan = plan_rows((10, 10, 10, 10), num_ranks=4, max_tokens=100)
    assert plan.rows == (((0,),), ((1,),), ((2,),), ((3,),))


def test_long_samples_weigh_more_than_their_tokens() -> None:
    """By tokens alone the long sample's rank would get ten short ones as well, and would be late."""
    lengths = (40_000, *(1_000,) * 60)
    plan = plan_rows(lengths, num_ranks=2, max_tokens=100_000)
    assert plan.rows == (((0,),), (tuple(range(1, 61)),))


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(settings_of_plans())
@example(((1, 1, 1), {"num_ranks": 2, "max_tokens": 1, "row_multiple": 4, "fixed_shape": True}))
def test_the_batch_can_be_rebuilt_from_the_rows(drawn: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    lengths, options = drawn
    batch = batch_of(lengths)
    samples = list(batch.samples())
    plan = plan_rows(lengths, **options)
    for rank in range(plan.num_ranks):
        rows = build_rows(batch, plan, rank)
        assert [row.sample_indices for row in rows] == list(plan.rows[rank])
        assert [row.token_ids_L.shape[0] for row in rows] == list(plan.row_lengths[rank])
        for row in rows:
            check_row(row, samples)


def check_row(row: Row, samples: list[Sample]) -> None:
    assert sum(row.document_lengths) == row.token_ids_L.shape[0] == row.offsets[-1]
    assert all(length == 1 for length in row.document_lengths[len(row.sample_indices) :])
    expected_index, expected_loss = [], []
    for index, start, length in zip(row.sample_indices, row.offsets, row.sample_lengths, strict=False):
        original, part = samples[index], slice(start, start + length)
        assert torch.equal(row.token_ids_L[part], original.token_ids)
        assert row.positions_L[part].tolist() == list(range(length))
        assert torch.equal(row.tokens_T[part], original.token_ids)
        assert row.places_T[part].tolist() == row.own_U[part].tolist() == list(range(start, start + length))
        assert torch.equal(row.weights_T[part], original.loss_weights)
        assert torch.equal(row.fields["advantages"][part], original.fields["advantages"])
        expected_index += range(start + 1, start + length)
        expected_loss += [start + t for t in range(1, length) if original.loss_weights[t] != 0]
    num_tokens = sum(row.sample_lengths)
    for padding in (row.token_ids_L, row.positions_L):
        assert not padding[num_tokens:].any()
    assert row.weights_T.shape == row.fields["advantages"].shape == (num_tokens,)
    assert row.predicted_P.tolist() == expected_index
    assert row.counted_N.tolist() == expected_loss
    assert (row.is_shared, row.sharing(row.documents())) == (False, None)
    dtypes = {row.token_ids_L.dtype, row.positions_L.dtype, row.places_T.dtype, row.counted_N.dtype}
    assert dtypes == {torch.int64}


def test_values_of_some_tokens_become_values_of_all() -> None:
    batch = Batch.of(
        [
            Sample(torch.tensor([5, 6, 7]), torch.tensor([0.0, 0.0, 1.0])),
            Sample(torch.tensor([8]), torch.tensor([0.0])),
            Sample(torch.tensor([9, 4]), torch.tensor([0.0, 2.0])),
        ]
    )
    plan = plan_rows(batch.lengths, num_ranks=1, max_tokens=8, row_multiple=4)
    (row,) = build_rows(batch, plan, 0)
    assert row.token_ids_L.tolist() == [5, 6, 7, 8, 9, 4, 0, 0]
    assert row.tokens_T.tolist() == [5, 6, 7, 8, 9, 4]
    assert row.positions_L.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert row.document_lengths == (3, 1, 2, 1, 1)
    assert row.offsets == (0, 3, 4, 6, 7, 8)
    assert row.counted_N.tolist() == [2, 5]
    assert row.predicted_P.tolist() == [1, 2, 5]
    assert row.predictors(row.predicted_P).tolist() == [0, 1, 4]
    values = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    tokens = row.align(values, row.counted_N)
    assert tokens.tolist() == [0, 0, -1, 0, 0, -2]
    (tokens * row.weights_T).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 2]
    assert row.align(torch.tensor([-3.0, -1.0, -2.0]), row.predicted_P).tolist() == [0, -3, -1, 0, 0, -2]


def test_a_row_without_samples_has_no_target() -> None:
    batch = batch_of((3,))
    plan = plan_rows(batch.lengths, num_ranks=2, max_tokens=8, row_multiple=2)
    (row,) = build_rows(batch, plan, 1)
    assert row.token_ids_L.tolist() == row.positions_L.tolist() == [0, 0]
    assert row.document_lengths == (1, 1)
    assert row.sample_indices == row.sample_lengths == ()
    for values in (row.counted_N, row.predicted_P, row.weights_T, row.fields["advantages"]):
        assert values.shape == (0,)
    assert row.align(torch.zeros(0), row.counted_N).shape == (0,)


def test_padding_never_touches_a_sample() -> None:
    """Attention by the rule of the row (same document, not later) reads from each sample only itself."""
    batch = batch_of((5, 3, 4))
    plan = plan_rows(batch.lengths, num_ranks=1, max_tokens=13, row_multiple=8, fixed_shape=True)
    (row,) = build_rows(batch, plan, 0)
    document = torch.repeat_interleave(torch.tensor(row.document_lengths))
    by_positions = (row.positions_L == 0).cumsum(0) - 1
    assert torch.equal(document, by_positions)
    sees = (document[:, None] == document[None, :]).tril()
    assert sees.sum(1).tolist() == (row.positions_L + 1).tolist()
    assert not sees[:12, 12:].any()
    assert not sees[12:, :12].any()


def test_rounding_up_adds_rows_without_samples_to_every_rank() -> None:
    plan = plan_rows((4, 4, 4), num_ranks=2, max_tokens=7, row_multiple=2, fixed_shape=True)
    assert plan.num_rows == 2
    longer = plan.rounded_up(4)
    assert longer.num_rows == 4
    assert [rows[:2] for rows in longer.rows] == list(plan.rows)
    assert all(rows[2:] == ((), ()) for rows in longer.rows)
    assert longer.row_lengths == ((8,) * 4, (8,) * 4)
    assert longer.rounded_up(2) == longer
    assert all(row.counted_N.numel() == 0 for row in build_rows(batch_of((4, 4, 4)), longer, 1)[2:])


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(settings_of_plans())
def test_results_come_back_in_the_order_of_the_batch(drawn: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    lengths, options = drawn
    batch = batch_of(lengths)
    plan = plan_rows(lengths, **options)
    values = [[row.token_ids_L * 2 for row in build_rows(batch, plan, rank)] for rank in range(plan.num_ranks)]
    back = scatter_back(plan, values)
    assert len(back) == len(lengths)
    assert torch.equal(torch.cat(back), batch.token_ids * 2)
    assert [part.shape[0] for part in back] == list(lengths)


def test_results_that_do_not_fit_the_plan() -> None:
    plan = plan_rows((4, 3), num_ranks=2, max_tokens=4)
    with pytest.raises(ValueError, match="3 values came for a row with 4 tokens"):
        scatter_back(plan, [[torch.zeros(3)], [torch.zeros(3)]])
    with pytest.raises(ValueError, match="shorter"):
        scatter_back(plan, [[torch.zeros(4)]])


def test_a_row_moves_whole() -> None:
    row = build_rows(batch_of((3, 2)), plan_rows((3, 2), num_ranks=1, max_tokens=5), 0)[0].to("meta")
    tensors = [getattr(row, name) for name in Row.__dataclass_fields__ if torch.is_tensor(getattr(row, name))]
    assert len(tensors) == 8
    assert {values.device.type for values in (*tensors, *row.fields.values())} == {"meta"}


def refusal(error_type: type[ForgeError], call: Any) -> ForgeError:
    with pytest.raises(error_type) as caught:
        call()
    error = caught.value
    for said in (error.path, error.rule, error.repair):
        assert said
        assert said in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    return error


def test_a_sample_that_is_too_long_is_named() -> None:
    error = refusal(
        DataError, lambda: plan_rows((3, 9), num_ranks=1, max_tokens=8, identities=("train.jsonl:1", "train.jsonl:2"))
    )
    assert (error.path, error.value) == ("train.jsonl:2", 9)
    assert error.message == "train.jsonl:2 is too long: 9 tokens"
    assert "at most 8 tokens" in str(error.rule)
    assert "training.microbatch_tokens to 9" in str(error.repair)
    assert refusal(DataError, lambda: plan_rows((3, 9), num_ranks=1, max_tokens=8)).path == "sample 1 of the batch"


def test_samples_and_batches_without_tokens() -> None:
    error = refusal(DataError, lambda: plan_rows((3, 0), num_ranks=1, max_tokens=8, identities=("a", "b")))
    assert (error.path, error.value) == ("b", 0)
    assert refusal(DataError, lambda: plan_rows((), num_ranks=1, max_tokens=8)).rule == "at least one sample"


@pytest.mark.parametrize("name", ["num_ranks", "max_tokens", "row_multiple"])
def test_limits_of_a_plan(name: str) -> None:
    options = {"num_ranks": 1, "max_tokens": 8, "row_multiple": 1, name: 0}
    error = refusal(ConfigError, lambda: plan_rows((1,), **options))  # type: ignore[arg-type]
    assert (error.path, error.value, error.rule) == (name, 0, "at least 1")


def test_a_first_token_that_is_to_count_is_refused() -> None:
    batch = batch_of((3, 4))
    weights = batch.loss_weights.clone()
    weights[3] = 0.5
    wrong = Batch(batch.token_ids, weights, batch.lengths, batch.fields, batch.identities)
    plan = plan_rows(batch.lengths, num_ranks=1, max_tokens=8)
    error = refusal(DataError, lambda: build_rows(wrong, plan, 0))
    assert (error.path, error.value, error.rule) == ("file:1: loss_weights[0]", 0.5, "must be 0")


def test_a_plan_of_another_batch_is_refused() -> None:
    plan = plan_rows((3, 4), num_ranks=1, max_tokens=8)
    error = refusal(DataError, lambda: build_rows(batch_of((4, 3)), plan, 0))
    assert error.value == (3, 4)


def test_a_plan_can_travel() -> None:
    plan = plan_rows((3, 4, 5), num_ranks=2, max_tokens=8)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_mask_as_weights_is_the_same_as_ones() -> None:
    """A sum of booleans would be a boolean, and a mean over samples of it a sum."""
    tokens, weights = torch.arange(1, 6), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    plan = plan_rows((5,), num_ranks=1, max_tokens=8)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16):
        row = build_rows(Batch.of([Sample(tokens, weights.to(dtype))]), plan, 0)[0]
        assert row.weights_T.dtype == torch.float32
        assert torch.equal(row.weights_T, weights)


@pytest.mark.parametrize("path", ["token_ids", "loss_weights", "fields['advantages']"])
def test_a_batch_whose_tensors_do_not_fit_its_lengths_is_refused(path: str) -> None:
    good = batch_of((3, 4))
    tensors = {"token_ids": good.token_ids, "loss_weights": good.loss_weights, **good.fields}
    name = "advantages" if "advantages" in path else path
    tensors[name] = tensors[name][:-1]
    wrong = Batch(tensors["token_ids"], tensors["loss_weights"], (3, 4), {"advantages": tensors["advantages"]})
    error = refusal(DataError, lambda: check_batch(wrong, vocab_size=None))
    assert (error.path, error.value) == (path, (6,))


def test_a_negative_weight_is_refused() -> None:
    batch = Batch.of([Sample(torch.arange(3), torch.tensor([0.0, 1.0, -0.5]))])
    error = refusal(DataError, lambda: check_batch(batch, vocab_size=None))
    assert (error.path, error.value, error.rule) == ("loss_weights[2]", -0.5, "at least 0")
