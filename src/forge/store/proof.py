"""The arithmetic of digests: the weights of words, and the digest of a version from its pieces. No torch.

The weights never change: digests made by different processes, and by different releases, are compared.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from forge.store.records import Layout, Part, packing

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
    """Return the sum over 32-bit words that stand at the given places of a tensor's image."""
    blocks = splitmix64_each((at // np.uint64(BLOCK_WORDS)) + np.uint64(BLOCK_SALT)) | np.uint64(1)
    weights = WORD_WEIGHTS[(at % np.uint64(BLOCK_WORDS)).astype(np.int64)] * blocks
    return int((words * weights).sum(dtype=np.uint64))


MODULUS = 1 << 64


def pack_digests(digests: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(digests)}Q", *digests)


def unpack_digests(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 8}Q", data)


def added(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Add digests, slot by slot; an empty list counts as zeros."""
    return [(a + b) % MODULUS for a, b in zip(one, other, strict=True)] if one else list(other)


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors of versions that are laid out alike."""

    names: tuple[str, ...]
    """Sorted."""
    forms: bytes
    """A digest of their names, dtypes and shapes."""
    of_piece: npt.NDArray[np.int64]
    """For each piece, part after part, which tensor it belongs to."""


@lru_cache(maxsize=64)
def _tensors(parts: tuple[tuple[Layout, tuple[int, ...] | None], ...]) -> _Tensors:
    forms = {
        name: (str(shards.dtype), tuple(shards.shape))
        for layout, _ in parts
        for name, shards in zip(layout.names, layout.shards, strict=True)
    }
    names = tuple(sorted(forms))
    number = {name: index for index, name in enumerate(names)}
    of_piece = [
        number[layout.names[packed.tensor]] for layout, written in parts for packed in packing(layout, written).pieces
    ]
    return _Tensors(names, described_forms(forms), np.array(of_piece, dtype=np.int64))


def described_forms(forms: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return a digest of the dtypes and shapes of tensors, by name."""
    text = "\n".join(f"{name!r} {dtype}{list(shape)}" for name, (dtype, shape) in sorted(forms.items()))
    return hashlib.sha256(text.encode()).digest()


def _totals(parts: Sequence[Part], layouts: Mapping[str, Layout]) -> tuple[_Tensors, npt.NDArray[np.uint64]]:
    tensors = _tensors(tuple((layouts[part.layout], part.written) for part in parts))
    digests = np.frombuffer(b"".join(part.digests for part in parts), dtype="<u8")
    if len(digests) != len(tensors.of_piece):
        raise ValueError(f"{len(digests)} digests for {len(tensors.of_piece)} pieces")
    totals = np.zeros(len(tensors.names), dtype="<u8")
    np.add.at(totals, tensors.of_piece, digests)
    return tensors, totals


def version_digest(parts: Sequence[Part], layouts: Mapping[str, Layout], extra: bytes = b"") -> str:
    """Return one digest of everything: names, shapes, dtypes, values, and what is not a tensor."""
    tensors, totals = _totals(parts, layouts)
    return hashlib.sha256(tensors.forms + totals.tobytes() + extra).hexdigest()


def sample_seed(key: str, version: int) -> int:
    """Return the seed that chooses the sampled elements: another for every version."""
    return int.from_bytes(hashlib.sha256(f"{key}\0{version}".encode()).digest()[:8], "little")
