"""Orders are permutations that the seed decides, and weights mean what they say."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data.mixing import derive, epoch_order, hold_out, next_stream, pick, shuffled


def splitmix64(key: int, step: int) -> int:
    """The published generator, on whole numbers of any size."""
    bits = (key + step * 0x9E3779B97F4A7C15) % 2**64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) % 2**64
    return bits ^ (bits >> 31)


def test_the_order_of_a_key_does_not_change_between_releases() -> None:
    key = derive(0, "epoch", 0)
    assert key == 0xD0A8B3383B686034
    assert shuffled(10, key).tolist() == sorted(range(10), key=lambda index: splitmix64(key, index + 1))
    assert [pick(key, draw=draw, count=100) for draw in range(5)] == [69, 62, 27, 25, 2]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(count=st.integers(0, 200), key=st.integers(0, 2**64 - 1))
def test_a_shuffle_is_a_permutation(count: int, key: int) -> None:
    assert sorted(shuffled(count, key).tolist()) == list(range(count))


def test_shuffles_are_uniform_enough() -> None:
    places = np.array([np.flatnonzero(shuffled(8, derive(seed)) == 3)[0] for seed in range(4000)])
    assert np.abs(np.bincount(places, minlength=8) - 500).max() < 5 * np.sqrt(500)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    halves=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_over_two_epochs_every_sample_comes_twice_its_weight(
    counts: list[int], halves: list[int], seed: int, shuffle: bool
) -> None:
    weights = [half / 2 for half in halves[: len(counts)]]
    orders = [epoch_order(counts, weights, seed=seed, epoch=epoch, shuffle=shuffle).tolist() for epoch in (0, 1)]
    seen = Counter(orders[0] + orders[1])
    assert set(seen) <= set(range(sum(counts)))
    start = 0
    for count, weight in zip(counts, weights, strict=True):
        assert [seen[start + index] for index in range(count)] == [2 * weight] * count
        first = sum(1 for number in orders[0] if start <= number < start + count)
        assert first == int(weight * count)
        start += count


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return epoch_order([20, 20], [1.0, 1.0], seed=seed, epoch=epoch, shuffle=True).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert any(number >= 20 for number in order(0, 0)[:20])  # sources are mixed, not one after the other


def test_without_shuffling_each_source_keeps_its_order_and_is_spread_evenly() -> None:
    order = epoch_order([2, 4], [1.0, 1.0], seed=0, epoch=0, shuffle=False).tolist()
    assert order == [2, 0, 3, 4, 1, 5]


@pytest.mark.parametrize("weight", [0.1, 0.7, 1.7])
def test_a_part_that_is_no_whole_number_evens_out_over_epochs(weight: float) -> None:
    sizes = [len(epoch_order([3], [weight], seed=0, epoch=epoch, shuffle=True)) for epoch in range(30)]
    assert sum(sizes) == round(30 * 3 * weight)
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=50, deadline=None, derandomize=True)
@given(count=st.integers(1, 60), fraction=st.floats(0.01, 0.99), key=st.integers(0, 2**32))
def test_what_is_held_out_and_what_stays_are_all_and_disjoint(count: int, fraction: float, key: int) -> None:
    stays, held = hold_out(count, fraction=fraction, key=key)
    assert sorted([*stays.tolist(), *held.tolist()]) == list(range(count))
    assert len(stays) >= 1
    assert len(held) == (0 if count == 1 else min(max(1, round(fraction * count)), count - 1))


def test_streams_are_drawn_in_proportion_until_they_end() -> None:
    drawn, left, order = [0, 0], [4, 100], []
    while (number := next_stream(drawn, [2.0, 1.0], [count > 0 for count in left])) is not None:
        drawn[number] += 1
        left[number] -= 1
        order.append(number)
    assert order[:6] == [0, 0, 1, 0, 0, 1]
    assert order[6:] == [1] * 98
    assert next_stream(drawn, [2.0, 1.0], [False, False]) is None
