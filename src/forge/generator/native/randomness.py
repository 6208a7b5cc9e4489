"""Stateless random numbers: the number of a token is a function of the completion's seed and the token's position.

A generator with state would make completions depend on one another, or on preemption. A hash of (seed, position) does
not: the same seed samples the same tokens whatever else is in the batch.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio, odd: multiples of it never repeat
_SEED: Final = np.uint64(0xD1B54A32D192ED03)
_INDEX: Final = np.uint64(0x8CB92BA72F3D8DD7)


def uniforms(seeds: NDArray[Any], steps: NDArray[Any]) -> NDArray[np.float64]:
    """Return for each completion the number in [0, 1) that decides its token `step`; float64 [S], with 53 random bits.

    Both arguments are integers [S]. Element i depends on `seeds[i]` and `steps[i]` alone.
    """
    start = _mixed(seeds.astype(np.uint64) + _SEED)
    bits = _mixed(start + steps.astype(np.uint64) * _STEP)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def completion_seed(seed: int, index: int) -> int:
    """Return the seed of completion `index` of a request with `seed`: from 0 to 2^63 - 1.

    It does not depend on how many completions the request asked for.
    """
    start = _mixed(np.array([seed], dtype=np.uint64) + _INDEX)
    return int(_mixed(start + np.array([index], dtype=np.uint64) * _STEP)[0] >> np.uint64(1))


def fresh_seed() -> int:
    """Return a seed for a request without one, from the system's entropy: from 0 to 2^63 - 1."""
    return secrets.randbits(63)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's bijection, in which every bit of the result depends on every bit of the input."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
