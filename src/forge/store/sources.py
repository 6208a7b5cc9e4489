"""The parts of a version as a reader gets at them: memory that is mapped here, or a process to ask for bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge.errors import StoreError, WeightMismatch
from forge.store.client import StoreClient
from forge.store.fetch_plan import Pull
from forge.store.records import Holder, Part, Version
from forge.store.segments import Segment
from forge.store.transports.base import Range


@dataclass(eq=False)
class Source:
    """One part, opened."""

    part: Part
    holder: Holder | None
    segment: Segment | None = None
    memory: Tensor | None = None
    """The part's bytes, where they can be read in place."""

    @property
    def is_mapped(self) -> bool:
        return self.memory is not None

    def check_stamp(self, version: Version) -> None:
        """Raise unless the segment still holds this version: a lease promises it, and this makes sure."""
        if self.segment is not None and self.segment.stamp != self.part.segment.stamp:
            raise WeightMismatch(
                f"rank {self.part.rank}'s part of version {version.number} of {version.key!r} was overwritten while it "
                "was being read",
                path=version.key,
                value=version.number,
                rule="a version that is leased stays as it is",
                repair="fetch again; if it happens twice, report it: leases do not hold",
            )


def open_source(client: StoreClient, version: Version, part: Part, *, is_private: bool = False) -> Source:
    """The best way to a part. A holder that has gone is passed over for the next."""
    record = part.segment
    if record.inline is not None:
        return Source(part, None, memory=torch.frombuffer(bytearray(record.inline), dtype=torch.uint8))
    tried: list[str] = []
    for way in client.ways():
        for holder in record.holders:
            if holder.way != way or (way in ("shm", "cuda") and holder.host != client.host):
                continue
            try:
                return _open(client, part, holder, is_private=is_private)
            except (OSError, StoreError) as error:
                tried.append(f"{holder.describe()} by {way}: {error}")
    raise StoreError(
        f"rank {part.rank}'s part of version {version.number} of {version.key!r} cannot be reached from here",
        path=version.key,
        value=tried or [f"{holder.describe()} by {holder.way}" for holder in record.holders],
        rule="a process that holds it answers",
        repair="fetch a newer version, or keep copies: `await ts.setup(volumes=2, copies=2)`",
    )


def _open(client: StoreClient, part: Part, holder: Holder, *, is_private: bool) -> Source:
    if holder.way == "shm":
        segment = client.open(holder, part.segment, is_private=is_private)
        return Source(part, holder, segment, segment.flat())
    if holder.way == "cuda":
        from forge.store.transports.cuda import open_memory

        return Source(part, holder, memory=open_memory(holder, part.segment))
    return Source(part, holder)


class Shadows:
    """Memory for the bytes of parts that are pulled, at the offsets that they have there. Kept, so that its pages stay
    warm from one version to the next."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def take(self, part: int, size: int) -> Tensor:
        kept = self._kept.pop(part, None)
        return kept if kept is not None and kept.numel() >= size else torch.empty(size, dtype=torch.uint8)

    def give_back(self, part: int, memory: Tensor) -> None:
        self._kept[part] = memory


def pull(
    client: StoreClient, source: Source, pulls: Sequence[Pull], *, shadow: Tensor, targets: Sequence[Tensor]
) -> None:
    """Fetch bytes of a part from the process that holds it."""
    assert source.holder is not None
    ranges: list[Range] = []
    base = memory_view(shadow.data_ptr(), shadow.numel())
    direct = {wanted.target for wanted in pulls} - {-1}
    views = {index: memory_view(targets[index].data_ptr(), span(targets[index])) for index in direct}
    for wanted in pulls:
        view = base if wanted.target < 0 else views[wanted.target]
        at = wanted.offset if wanted.target < 0 else wanted.at
        ranges.append((wanted.offset, view[at : at + wanted.num_bytes]))
    client.carrier.read(source.holder, ranges)


def memory_view(address: int, num_bytes: int) -> memoryview:
    """Writable bytes at an address; whoever owns the memory must keep it."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((reach + 1) * tensor.element_size())
