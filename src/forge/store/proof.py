"""Digests of whole versions, put together from those of the pieces. Pure arithmetic, no torch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from forge.store.packing import packing
from forge.store.records import Layout, Part

MODULUS = 1 << 64


def pack_digests(digests: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(digests)}Q", *digests)


def unpack_digests(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 8}Q", data)


def added(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Sums of digests, slot by slot; an empty list counts as zeros."""
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
        name: f"{held.dtype}{list(held.shape)}"
        for layout, _ in parts
        for name, held in zip(layout.names, layout.helds, strict=True)
    }
    names = tuple(sorted(forms))
    number = {name: index for index, name in enumerate(names)}
    of_piece = [
        number[layout.names[packed.tensor]] for layout, written in parts for packed in packing(layout, written).pieces
    ]
    text = "\n".join(f"{name!r} {forms[name]}" for name in names)
    return _Tensors(names, hashlib.sha256(text.encode()).digest(), np.array(of_piece, dtype=np.int64))


def _totals(parts: Sequence[Part], layouts: Mapping[str, Layout]) -> tuple[_Tensors, npt.NDArray[np.uint64]]:
    tensors = _tensors(tuple((layouts[part.layout], part.written) for part in parts))
    digests = np.frombuffer(b"".join(part.digests for part in parts), dtype="<u8")
    if len(digests) != len(tensors.of_piece):
        raise ValueError(f"{len(digests)} digests for {len(tensors.of_piece)} pieces")
    totals = np.zeros(len(tensors.names), dtype="<u8")
    np.add.at(totals, tensors.of_piece, digests)
    return tensors, totals


def version_digest(parts: Sequence[Part], layouts: Mapping[str, Layout], extra: bytes = b"") -> str:
    """One digest of everything: names, shapes, dtypes, values, and what is no tensor."""
    tensors, totals = _totals(parts, layouts)
    return hashlib.sha256(tensors.forms + totals.tobytes() + extra).hexdigest()


def sample_seed(key: str, version: int) -> int:
    """Which elements are sampled: others for every version, so that what is missed once is not missed for ever."""
    return int.from_bytes(hashlib.sha256(f"{key}\0{version}".encode()).digest()[:8], "little")
