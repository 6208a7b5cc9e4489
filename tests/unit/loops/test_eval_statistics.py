"""Estimates, intervals and the paired test, against values that are known from elsewhere."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from forge.loops.evals.statistics import (
    mean_estimate,
    paired_difference,
    pass_at_k,
    rate_estimate,
    sign_flip_p,
    t_probability,
    t_quantile,
    wilson_interval,
)


def test_pass_at_k_is_the_share_of_subsets_with_a_solved_sample() -> None:
    for n in range(1, 7):
        for solved in range(n + 1):
            samples = [True] * solved + [False] * (n - solved)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(samples, k))
                assert pass_at_k(n, solved, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_unbiased() -> None:
    chance, n, k, p = random.Random(0), 5, 3, 0.3
    found = [pass_at_k(n, sum(chance.random() < p for _ in range(n)), k) for _ in range(40_000)]
    assert sum(found) / len(found) == pytest.approx(1 - (1 - p) ** k, abs=0.004)


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [  # of published tables, and of R's qt()
        (0.975, 1, 12.7062047362),
        (0.975, 2, 4.3026527297),
        (0.975, 9, 2.2621571628),
        (0.95, 30, 1.6972608866),
        (0.995, 30, 2.7499956536),
        (0.975, 1000, 1.9623390808),
        (0.9, 4, 1.5332062741),
    ],
)
def test_quantiles_of_students_t(probability: float, degrees: int, expected: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9)
    assert t_probability(expected, degrees) == pytest.approx(probability, abs=1e-9)


@pytest.mark.parametrize(
    ("solved", "count", "low", "high"),
    [  # Newcombe (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0000),
    ],
)
def test_wilsons_interval(solved: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(solved / count, count, confidence=0.95) == pytest.approx((low, high), abs=5e-5)


def test_one_sample_per_task_has_wilsons_own_interval() -> None:
    values = [1.0] * 15 + [0.0] * 133
    found = rate_estimate(values, num_samples=1, confidence=0.95)
    assert (found.low, found.high) == wilson_interval(15 / 148, 148, confidence=0.95)


def test_an_interval_has_a_width_when_everything_is_solved() -> None:
    found = rate_estimate([1.0] * 20, num_samples=4, confidence=0.95)
    assert found.value == 1.0
    assert (found.low, found.high) == pytest.approx((0.8389, 1.0), abs=5e-5)


def test_more_samples_narrow_the_interval_and_never_beyond_all_of_them() -> None:
    chance = random.Random(3)
    one = [float(chance.random() < 0.4) for _ in range(200)]
    many = [sum(chance.random() < 0.4 for _ in range(16)) / 16 for _ in range(200)]
    wide = rate_estimate(one, num_samples=1, confidence=0.95)
    narrow = rate_estimate(many, num_samples=16, confidence=0.95)
    assert (narrow.high or 0) - (narrow.low or 0) < 0.4 * ((wide.high or 0) - (wide.low or 0))
    same = rate_estimate([0.5] * 8, num_samples=2, confidence=0.95)
    assert (same.low, same.high) == wilson_interval(0.5, 16, confidence=0.95)


@pytest.mark.parametrize(("num_tasks", "num_samples", "k"), [(30, 1, 1), (30, 8, 1), (30, 8, 4), (150, 4, 2)])
def test_intervals_cover_the_truth_as_often_as_they_say(num_tasks: int, num_samples: int, k: int) -> None:
    chance, repeats, covered = random.Random(num_tasks * num_samples + k), 600, 0
    # Tasks differ in difficulty, uniformly: pass@k is the integral of 1 - (1 - p)^k.
    truth = 1 - 1 / (k + 1)
    for _ in range(repeats):
        values = []
        for _ in range(num_tasks):
            difficulty = chance.random()
            solved = sum(chance.random() < difficulty for _ in range(num_samples))
            values.append(pass_at_k(num_samples, solved, k))
        found = rate_estimate(values, num_samples=num_samples, confidence=0.95)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= truth <= found.high
    assert 0.92 <= covered / repeats <= 0.99


def test_the_mean_has_students_interval() -> None:
    found = mean_estimate([1.0, 2.0, 3.0, 4.0, 5.0], confidence=0.95)
    reach = 2.7764451052 * math.sqrt(2.5 / 5)
    assert found.value == 3.0
    assert (found.low, found.high) == pytest.approx((3 - reach, 3 + reach), rel=1e-9)
    assert found.std_error == pytest.approx(math.sqrt(0.5))


def test_a_single_task_has_no_interval_of_its_reward() -> None:
    found = mean_estimate([0.5], confidence=0.95)
    assert (found.value, found.low, found.high, found.std_error) == (0.5, None, None, None)


@pytest.mark.parametrize(
    ("wins", "losses", "expected"),
    [(8, 2, 0.109375), (10, 0, 0.001953125), (5, 5, 1.0), (0, 0, 1.0), (1, 0, 1.0), (9, 3, 0.14599609375)],
)
def test_equal_differences_give_the_exact_sign_test(wins: int, losses: int, expected: float) -> None:
    assert sign_flip_p([1.0] * wins + [-1.0] * losses + [0.0] * 7) == pytest.approx(expected, abs=1e-12)


def test_unequal_differences_give_the_exact_permutation_test() -> None:
    # Fisher's example of Darwin's maize, as Box (1978) and textbooks give it: 1726 of 32768 signs.
    darwin = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    assert sign_flip_p([float(each) for each in darwin]) == pytest.approx(1726 / 32768, abs=1e-12)


def test_many_differences_are_tested_by_random_signs_always_the_same() -> None:
    differences = [1.0] * 30 + [-1.0] * 15
    exact = 2 * sum(math.comb(45, wins) for wins in range(30, 46)) / 2**45
    assert sign_flip_p(differences) == pytest.approx(exact, abs=0.003)
    assert sign_flip_p(differences) == sign_flip_p(differences)


def test_very_many_differences_are_normal() -> None:
    chance = random.Random(1)
    differences = [chance.choice([-0.5, 0.25, 0.25, 1.0, -1.0]) for _ in range(2000)]
    sampled, normal = sign_flip_p(differences), sign_flip_p([*differences, 1e-9])
    assert 0.001 < sampled < 0.999
    assert normal == pytest.approx(sampled, abs=0.006)


def test_a_paired_difference_counts_wins_and_losses() -> None:
    found = paired_difference([0.0, 0.5, 1.0, 0.25], [1.0, 0.5, 0.5, 0.5], confidence=0.9)
    assert (found.num_wins, found.num_losses, found.num_ties) == (2, 1, 1)
    assert found.estimate.value == pytest.approx(0.1875)
    assert found.p_value == 0.75
