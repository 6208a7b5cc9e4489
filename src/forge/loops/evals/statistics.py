"""Estimates over tasks, their confidence intervals, and the paired test of two evaluations. Pure functions.

Tasks are the independent observations; the samples of one task are not. So every estimate is a mean over tasks of a
number per task, and its uncertainty comes from how these numbers differ between tasks (a clustered standard error, with
tasks as the clusters).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

_EXACT_DIFFERENCES: Final = 16
_MANY_DIFFERENCES: Final = 2_000
_NUM_FLIPS: Final = 100_000
_FLIPS_AT_ONCE: Final = 2_000
_CLOSE: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks.

    Attributes:
        value: the estimate.
        low, high: the ends of its confidence interval; None where there are too few tasks for one.
        std_error: the standard error over tasks; None for a single task.
    """

    value: float
    low: float | None
    high: float | None
    std_error: float | None

    def plain(self) -> dict[str, float | None]:
        """Return it as JSON can hold it."""
        return {"value": self.value, "low": self.low, "high": self.high, "std_error": self.std_error}


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return pass@k: how likely at least one of k samples is solved, unbiased (Chen 2021, arXiv 2107.03374)."""
    if num_samples - num_solved < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def mean_estimate(values: Sequence[float], *, confidence: float) -> Estimate:
    """Return the mean of one number per task, with Student's t interval. The numbers may be of any size."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Estimate(mean, None, None, None)
    error = _std_error(values, mean)
    reach = t_quantile(0.5 + confidence / 2, len(values) - 1) * error
    return Estimate(mean, mean - reach, mean + reach, error)


def rate_estimate(values: Sequence[float], *, num_samples: int, confidence: float) -> Estimate:
    """Return the mean of one number from 0 to 1 per task, such as pass@k, with a Wilson interval.

    The interval is Wilson's score interval for the effective number of observations, p (1 - p) / variance of the mean,
    corrected for the number of tasks as Korn and Graubard do. It is at least the number of tasks, so that with one
    sample per task the interval is Wilson's own, and at most that of all samples. Unlike a bootstrap's, the interval
    has a width when every task, or none, is solved.
    """
    count = len(values)
    mean = min(1.0, max(0.0, math.fsum(values) / count))
    error = _std_error(values, mean) if count > 1 else None
    effective = float(count)
    if error is not None and num_samples > 1 and 0.0 < mean < 1.0:
        level = 0.5 + confidence / 2
        narrower = NormalDist().inv_cdf(level) / t_quantile(level, count - 1)
        found = mean * (1 - mean) / max(error * error, _CLOSE) * narrower**2
        effective = min(max(effective, found), float(count * num_samples))
    low, high = wilson_interval(mean, effective, confidence=confidence)
    return Estimate(mean, low, high, error)


def wilson_interval(rate: float, count: float, *, confidence: float) -> tuple[float, float]:
    """Return Wilson's score interval of a rate that was observed `count` times."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = z * z / count
    middle = (rate + share / 2) / (1 + share)
    reach = z / (1 + share) * math.sqrt(rate * (1 - rate) / count + share / (4 * count))
    low = 0.0 if rate <= 0.0 else max(0.0, middle - reach)
    high = 1.0 if rate >= 1.0 else min(1.0, middle + reach)
    return low, high


def _std_error(values: Sequence[float], mean: float) -> float:
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


# ---- Two evaluations of the same tasks -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """How much larger the numbers of B are than those of A, task by task.

    Attributes:
        estimate: the mean difference, with Student's t interval over tasks.
        p_value: of the hypothesis that the signs of the differences are random (`sign_flip_p`).
        num_wins, num_losses, num_ties: tasks whose number is larger, smaller and equal in B.
    """

    estimate: Estimate
    p_value: float
    num_wins: int
    num_losses: int
    num_ties: int


def paired_difference(first: Sequence[float], second: Sequence[float], *, confidence: float) -> PairedDifference:
    """Compare one number per task of A (`first`) with that of B (`second`)."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    wins = sum(difference > _CLOSE for difference in differences)
    losses = sum(difference < -_CLOSE for difference in differences)
    return PairedDifference(
        mean_estimate(differences, confidence=confidence),
        sign_flip_p(differences),
        wins,
        losses,
        len(differences) - wins - losses,
    )


def sign_flip_p(differences: Sequence[float], *, seed: int = 0) -> float:
    """Return the two-sided p-value of a paired permutation test: how often random signs give a mean difference at least
    as large.

    With up to 16 differences that are not 0 all signs are tried, and the value is exact. Otherwise 100,000 random
    choices of signs are, always the same ones for a seed, and with more than 2,000 the sum of random signs is taken as
    normal. Where all differences have one size, it is the sign test,
    which for pass or fail is McNemar's exact test.
    """
    sizes = np.array([abs(each) for each in differences if abs(each) > _CLOSE], dtype=np.float64)
    if not len(sizes):
        return 1.0
    observed = abs(math.fsum(differences)) * (1 - 1e-9)
    if len(sizes) <= _EXACT_DIFFERENCES:
        sums = np.zeros(1)
        for size in sizes:
            sums = np.concatenate([sums + size, sums - size])
        return float(np.mean(np.abs(sums) >= observed))
    if len(sizes) > _MANY_DIFFERENCES:
        return 2 * NormalDist().cdf(-observed / math.sqrt(float(sizes @ sizes)))
    chance = np.random.Generator(np.random.PCG64(seed))
    num_larger = 0
    for _ in range(_NUM_FLIPS // _FLIPS_AT_ONCE):
        signs = chance.integers(0, 2, size=(_FLIPS_AT_ONCE, len(sizes)), dtype=np.int8) * 2 - 1
        num_larger += int(np.sum(np.abs(signs @ sizes) >= observed))
    return (1 + num_larger) / (1 + _NUM_FLIPS)


# ---- Student's t -----------------------------------------------------------------------------------------------------


def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, for a probability of at least one half."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_probability(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def t_probability(value: float, degrees: int) -> float:
    """Return how likely Student's t is at most `value`, which is not negative."""
    return 1.0 - 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + value * value))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function, by its continued fraction (DLMF 8.17.22)."""
    if x <= 0.0 or x >= 1.0:
        return min(1.0, max(0.0, x))
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1.0 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a / _continued_fraction(lambda n: _beta_term(n, a, b, x))


def _beta_term(number: int, a: float, b: float, x: float) -> float:
    m = number // 2
    if number % 2:
        return -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
    return m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))


def _continued_fraction(term: Callable[[int], float]) -> float:
    """Return 1 + t1 / (1 + t2 / (1 + …)), by Lentz's method."""
    tiny = 1e-300
    value, c, d = 1.0, 1.0, 0.0
    for number in range(1, 10_000):
        each = term(number)
        d = 1.0 / ((1.0 + each * d) or tiny)
        c = (1.0 + each / c) or tiny
        value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value
