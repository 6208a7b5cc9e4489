"""The transports that move bytes between processes: TCP, RDMA and CUDA IPC. Here is what they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from forge.errors import StoreError

Range = tuple[int, memoryview]
"""An offset in a segment, and the local memory that is filled from there (or written there)."""


class SegmentSource(Protocol):
    """Where a data server finds the segments of its process."""

    def open(self, name: str) -> tuple[int, int]:
        """Return a file descriptor of the segment and its size, valid until `release(name)`; `StoreKeyError` if it is
        gone."""

    def release(self, name: str) -> None:
        """Undo one `open` that succeeded."""

    def wait_for(self, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Wait until ranges (offset and length) of a segment that is still filling are there. Raise if they are not
        soon, or never. Returns at once for a segment that is full."""

    def mapped(self, name: str) -> memoryview | None:
        """Return the memory of an open segment where the process has it mapped anyway; the view keeps it mapped."""


def as_bytes(name: str, ranges: Sequence[Range], *, writable: bool) -> list[Range]:
    """Return the ranges with their memory as flat bytes, without the empty ones. Raise on memory that is not usable."""
    flat: list[Range] = []
    for offset, target in ranges:
        if not isinstance(target, memoryview) or not target.c_contiguous or (writable and target.readonly):
            raise StoreError(
                f"segment {name!r}: a range's memory cannot be used",
                path=f"{name}[{offset}:]",
                value=target,
                rule=f"a C-contiguous{' writable' if writable else ''} memoryview",
                repair="pass memoryview(...) of contiguous memory",
            )
        if offset < 0:
            raise out_of_bounds(name, offset, target.nbytes, size=None)
        if target.nbytes:
            flat.append((offset, target if target.ndim == 1 and target.format == "B" else target.cast("B")))
    return flat


def batches(ranges: Sequence[Range], *, batch_bytes: int, batch_ranges: int) -> Iterator[list[Range]]:
    """Yield the ranges in order, in batches: large ranges are split, small ones are sent together."""
    batch: list[Range] = []
    room = batch_bytes
    for offset, target in ranges:
        size, start = len(target), 0
        while start < size:
            if not room or len(batch) == batch_ranges:
                yield batch
                batch, room = [], batch_bytes
            take = min(size - start, room)
            batch.append((offset + start, target if take == size else target[start : start + take]))
            start += take
            room -= take
    if batch:
        yield batch


def out_of_bounds(name: str, offset: int, nbytes: int, *, size: int | None) -> StoreError:
    """Return the error for a range that is not inside its segment."""
    within = "" if size is None else f" and offset + nbytes <= {size}, the size of the segment"
    return StoreError(
        f"a range lies outside of segment {name!r}",
        path=name,
        value={"offset": offset, "nbytes": nbytes},
        rule=f"offset >= 0{within}",
        repair="read with the manifest of the version that this segment belongs to",
    )
