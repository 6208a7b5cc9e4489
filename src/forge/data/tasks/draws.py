"""Randomness without state: draws and permutations that are hashes of what they are for."""

from __future__ import annotations

from forge.data.mixing import derive

_ROUNDS = 6


class Draws:
    """A sequence of numbers that a key gives, the same on every machine and under every version of Python."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._count = 0

    def below(self, count: int) -> int:
        """A number from 0 to count - 1."""
        self._count += 1
        return derive(self._key, self._count) % count

    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + self.below(high - low + 1)


def permuted(value: int, *, count: int, key: int) -> int:
    """Where the key's permutation of 0 to count - 1 takes a value. None of the others is computed.

    A Feistel network over the next even number of bits, gone through again until the result is below `count`.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = value >> half, value & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (derive(key, number, right) & mask)
        value = left << half | right
        if value < count:
            return value
