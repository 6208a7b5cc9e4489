"""The kernel's rules again, written to be seen to be right: byte by byte, in plain Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def word_weights() -> list[int]:
    found: list[int] = []
    state = 0x746F726368666F72
    while len(found) < 1024:
        value = (splitmix64(state) >> 32) | 1
        if value not in found:
            found.append(value)
        state = (state + 0x9E3779B97F4A7C15) & MASK
    return found


WEIGHTS = word_weights()


def byte_digest(value: int, at: int) -> int:
    """What one byte at one place of the image contributes."""
    word, inside = divmod(at, 4)
    block = splitmix64((word // 1024 + 0xF0E1D2C3B4A59687) & MASK) | 1
    return (value << (8 * inside)) * WEIGHTS[word % 1024] * block


def digest_of_bytes(data: bytes, at: int = 0) -> int:
    return sum(byte_digest(value, at + i) for i, value in enumerate(data)) & MASK


def to_bf16(data: bytes) -> bytes:
    bits = int.from_bytes(data, "little")
    if bits & 0x7FFFFFFF > 0x7F800000:
        return b"\xc0\x7f"
    low, high = bits & 0xFFFF, bits >> 16
    if low > 0x8000 or (low == 0x8000 and high & 1):
        high += 1
    return high.to_bytes(2, "little")


@dataclass
class Rectangle:
    """One row of a table. Each walk is (offset, byte strides)."""

    shape: tuple[int, ...]
    itemsize: int
    src: tuple[int, tuple[int, ...]]
    dst: tuple[int, tuple[int, ...]]
    image: tuple[int, tuple[int, ...]]
    slot: int = 0
    cast: bool = False
    src_itemsize: int = field(init=False)

    def __post_init__(self) -> None:
        self.src_itemsize = 4 if self.cast else self.itemsize

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Of every element: its bytes' place in source, destination and image."""
        for index in itertools.product(*map(range, self.shape)):
            yield tuple(place(index, walk) for walk in (self.src, self.dst, self.image))  # type: ignore[misc]

    def extents(self) -> tuple[int, int]:
        """How large source and destination must be."""
        src = max((s for s, _, _ in self.places()), default=0) + self.src_itemsize
        dst = max((d for _, d, _ in self.places()), default=0) + self.itemsize
        return src, dst

    def apply(self, src: bytes, dst: bytearray) -> int:
        """Copy into dst and return the digest."""
        total = 0
        for s, d, image in self.places():
            value = src[s : s + self.src_itemsize]
            value = to_bf16(value) if self.cast else value
            dst[d : d + self.itemsize] = value
            total += digest_of_bytes(value, image)
        return total & MASK


def place(index: Sequence[int], walk: tuple[int, tuple[int, ...]]) -> int:
    offset, strides = walk
    return offset + sum(i * step for i, step in zip(index, strides, strict=True))
