"""The weights of the digest: fixed for ever, because digests made by different processes are compared."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

BLOCK_WORDS: Final = 1024
MASK: Final = (1 << 64) - 1
BLOCK_SALT: Final = 0xF0E1D2C3B4A59687
_WORD_SEED: Final = 0x746F726368666F72
STEP: Final = 0x9E3779B97F4A7C15
FIRST: Final = 0xBF58476D1CE4E5B9
SECOND: Final = 0x94D049BB133111EB

Words = npt.NDArray[np.uint64]


def splitmix64(x: int) -> int:
    x = (x + STEP) & MASK
    x = ((x ^ (x >> 30)) * FIRST) & MASK
    x = ((x ^ (x >> 27)) * SECOND) & MASK
    return x ^ (x >> 31)


def splitmix64_each(x: Words) -> Words:
    x = x + np.uint64(STEP)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(SECOND)
    return x ^ (x >> np.uint64(31))


def block_weight(block: int) -> int:
    """Odd, so that multiplying by it loses nothing."""
    return splitmix64((block + BLOCK_SALT) & MASK) | 1


def _word_weights() -> Words:
    chosen: dict[int, None] = {}
    state = _WORD_SEED
    while len(chosen) < BLOCK_WORDS:
        chosen[(splitmix64(state) >> 32) | 1] = None
        state = (state + STEP) & MASK
    return np.array(list(chosen), dtype=np.uint64)


WORD_WEIGHTS: Final = _word_weights()
"""Distinct odd numbers below 2**32, one for each word of a block."""


def weigh(words: Words, at: Words) -> int:
    """The sum over 32-bit words that stand at the given places of a tensor's image."""
    blocks = splitmix64_each((at // np.uint64(BLOCK_WORDS)) + np.uint64(BLOCK_SALT)) | np.uint64(1)
    weights = WORD_WEIGHTS[(at % np.uint64(BLOCK_WORDS)).astype(np.int64)] * blocks
    return int((words * weights).sum(dtype=np.uint64))
