"""The order of samples, as pure functions of a seed.

Everything random is a hash of what it is for, so that nothing has a state to save, and so that a position means the
same samples under any version of any library.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def derive(*parts: int | str) -> int:
    """A 64-bit key for one purpose, such as derive(seed, "epoch", 3)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def shuffled(count: int, key: int) -> Indices:
    """0 to count - 1 in the order that the key gives."""
    bits = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return np.argsort(bits, kind="stable").astype(np.int64)


def source_turn(count: int, *, weight: float, epoch: int, key: int, shuffle: bool) -> Indices:
    """Which of a source's samples an epoch takes.

    The epochs cut one endless sequence of permutations into pieces of weight x count. So weight 1 takes every sample
    once in each epoch, weight 2 twice, and weight 0.5 a half, and the other half in the next epoch.
    """
    share = Fraction(repr(weight)) * count
    start, stop = math.floor(share * epoch), math.floor(share * (epoch + 1))
    if start == stop:
        return np.empty(0, dtype=np.int64)
    pieces = []
    for lap in range(start // count, (stop - 1) // count + 1):
        order = shuffled(count, derive(key, "lap", lap)) if shuffle else np.arange(count, dtype=np.int64)
        pieces.append(order[max(start - lap * count, 0) : stop - lap * count])
    return np.concatenate(pieces)


def epoch_order(counts: Sequence[int], weights: Sequence[float], *, seed: int, epoch: int, shuffle: bool) -> Indices:
    """The samples of one epoch over all sources, as numbers that count through source after source.

    Shuffled, it is one order over all of them. Otherwise each source keeps its order and all are spread evenly.
    """
    offsets = np.concatenate([[0], np.cumsum(counts)])[:-1]
    turns = [
        source_turn(count, weight=weight, epoch=epoch, key=derive(seed, "source", number), shuffle=shuffle) + offset
        for number, (count, weight, offset) in enumerate(zip(counts, weights, offsets, strict=True))
    ]
    order: Any = np.concatenate(turns)
    if shuffle:
        order = order[shuffled(len(order), derive(seed, "epoch", epoch))]
    elif len(turns) > 1:
        spread = np.concatenate([(np.arange(len(turn)) + 0.5) / max(1, len(turn)) for turn in turns])
        order = order[np.argsort(spread, kind="stable")]
    return np.asarray(order, dtype=np.int64)


def hold_out(count: int, *, fraction: float, key: int) -> tuple[Indices, Indices]:
    """What stays and what is held out, each in order. Both have at least one sample where there are two."""
    held = min(max(1, round(fraction * count)), count - 1) if fraction > 0 else 0
    order = shuffled(count, key)
    return np.sort(order[held:]), np.sort(order[:held])


def next_stream(drawn: Sequence[int], weights: Sequence[float], live: Sequence[bool]) -> int | None:
    """Whose turn it is among streams, so that draws stay in proportion to weights; None when none is live."""
    waiting = [((drawn[number] + 1) / weights[number], number) for number in range(len(drawn)) if live[number]]
    return min(waiting)[1] if waiting else None


def pick(key: int, *, draw: int, count: int) -> int:
    """Which of `count` the given draw takes."""
    return derive(key, draw) % count
