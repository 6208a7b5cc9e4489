"""Digests of whole versions, put together from those of the pieces. Pure arithmetic, no torch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence

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


def tensor_digests(parts: Iterable[Part], layouts: Mapping[str, Layout]) -> dict[str, int]:
    """The digest of each tensor: the sum over its pieces, which the way it was cut does not change."""
    totals: dict[str, int] = {}
    for part in parts:
        layout = layouts[part.layout]
        for name in layout.names:  # also those of which this rank has nothing
            totals.setdefault(name, 0)
        digests = unpack_digests(part.digests)
        for packed, digest in zip(packing(layout, part.written).pieces, digests, strict=True):
            name = layout.names[packed.tensor]
            totals[name] = (totals[name] + digest) % MODULUS
    return totals


def version_digest(parts: Sequence[Part], layouts: Mapping[str, Layout], extra: bytes = b"") -> str:
    """One digest of everything: names, shapes, dtypes, values, and what is no tensor."""
    totals = tensor_digests(parts, layouts)
    forms: dict[str, str] = {}
    for part in parts:
        layout = layouts[part.layout]
        for name, held in zip(layout.names, layout.helds, strict=True):
            forms[name] = f"{held.dtype}{list(held.shape)}"
    text = "\n".join(f"{name!r} {forms[name]} {totals[name]:016x}" for name in sorted(totals))
    return hashlib.sha256(text.encode() + b"\0" + extra).hexdigest()


def sample_seed(key: str, version: int) -> int:
    """Which elements are sampled: others for every version, so that what is missed once is not missed for ever."""
    return int.from_bytes(hashlib.sha256(f"{key}\0{version}".encode()).digest()[:8], "little")
