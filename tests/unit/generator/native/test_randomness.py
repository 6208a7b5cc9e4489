"""Random numbers that are a function of seed and place."""

from __future__ import annotations

import numpy as np
import pytest

from forge.generator.native.randomness import completion_seed, fresh_seed, uniforms

PINNED = [0.30697759202943364, 0.11703298039315357, 0.8726049564548553, 0.2541189626699345]
PINNED_SEEDS = [4632749453214746301, 5169476037192309194, 7207133745586190900]


def test_a_number_depends_on_its_own_seed_and_place_alone() -> None:
    seeds, steps = np.arange(50, dtype=np.int64) * 977, np.arange(50, dtype=np.int64) % 7
    together = uniforms(seeds, steps)
    alone = [uniforms(seeds[i : i + 1], steps[i : i + 1])[0] for i in range(50)]
    assert together.tolist() == alone
    assert together.dtype == np.float64
    assert len(set(alone)) == 50


def test_the_numbers_of_a_seed_never_change_between_releases() -> None:
    found = uniforms(np.array([0, 0, 1, 2**63 - 1]), np.array([0, 1, 0, 5]))
    assert found.tolist() == PINNED
    assert [completion_seed(0, 0), completion_seed(0, 1), completion_seed(2**63 - 1, 3)] == PINNED_SEEDS


def chi_square(values: np.ndarray, *, bins: int) -> float:
    counts = np.bincount((values * bins).astype(int), minlength=bins)
    assert len(counts) == bins
    expected = len(values) / bins
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("along", ["steps", "seeds", "completion seeds"])
def test_numbers_are_even_and_unrelated(along: str) -> None:
    count = np.arange(16384)
    if along == "steps":
        found = uniforms(np.full(16384, 17), count)
    elif along == "seeds":
        found = uniforms(count, np.full(16384, 3))
    else:
        found = uniforms(np.array([completion_seed(5, index) for index in range(16384)], dtype=np.uint64), 0 * count)
    assert found.min() >= 0.0
    assert found.max() < 1.0
    assert 170 < chi_square(found, bins=256) < 355  # 255 degrees of freedom: both ends are beyond 1 in 10,000
    pairs = (found[:-1] * 16).astype(int) / 16 + found[1:] / 16
    assert 170 < chi_square(pairs, bins=256) < 355  # a number and the next one
    fine = (found * 2**45) % 1.0
    assert 170 < chi_square(fine, bins=256) < 355  # the lowest bits


def test_seeds_of_completions_fit_and_differ() -> None:
    found = {completion_seed(seed, index) for seed in (0, 1, 2, 2**63 - 1) for index in range(200)}
    assert len(found) == 800
    assert all(0 <= seed < 2**63 for seed in found)


def test_fresh_seeds_fit_and_differ() -> None:
    found = {fresh_seed() for _ in range(100)}
    assert len(found) == 100
    assert all(0 <= seed < 2**63 for seed in found)
