"""The parts of a version as a reader gets at them: memory that is mapped here, or a process to ask for bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from forge.errors import StoreError, WeightMismatch
from forge.store.client import StoreClient
from forge.store.fetch_plan import Pull
from forge.store.records import Holder, Part, Version
from forge.store.segments import Segment
from forge.store.transports.base import Range
from forge.store.transports.cuda import read_stamp


@dataclass(eq=False)
class Source:
    """One part, opened."""

    part: Part
    holder: Holder | None
    segment: Segment | None = None
    memory: Tensor | None = None
    """The part's bytes, where they can be read in place."""

    @property
    def where(self) -> torch.device | None:
        """The memory in which it can be read in place."""
        return None if self.memory is None else self.memory.device

    def check_stamp(self, version: Version) -> None:
        """Raise unless the segment still holds this version: a lease promises it, and this makes sure."""
        stamp = self.part.segment.stamp
        if self.segment is not None:
            stamp = self.segment.stamp
        elif self.memory is not None and self.memory.is_cuda:
            stamp = read_stamp(self.memory)
        if stamp != self.part.segment.stamp:
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
    for holder in _in_order(client, record.holders):
        try:
            if holder.way != "ask":
                return _open(client, part, holder, is_private=is_private)
            part = replace(part, segment=client.carrier.host_copy(holder, record))  # from a GPU that is out of reach
            return open_source(client, version, part, is_private=is_private)
        except (OSError, StoreError) as error:
            tried.append(f"{holder.describe()} by {holder.way}: {error}")
    raise StoreError(
        f"rank {part.rank}'s part of version {version.number} of {version.key!r} cannot be reached from here",
        path=version.key,
        value=tried or [f"{holder.describe()} by {holder.way}" for holder in record.holders],
        rule="a process that holds it answers",
        repair="fetch a newer version, or keep copies: `await ts.setup(volumes=2, copies=2)`",
    )


def _in_order(client: StoreClient, holders: Sequence[Holder]) -> list[Holder]:
    """Who can be asked from here, the best way first."""
    order = (*client.ways(), "ask")
    usable = [
        holder
        for holder in holders
        if holder.way in order and (holder.way not in ("shm", "cuda") or holder.host == client.host)
    ]
    return sorted(usable, key=lambda holder: order.index(holder.way))


def _open(client: StoreClient, part: Part, holder: Holder, *, is_private: bool) -> Source:
    if holder.way == "shm":
        segment = client.open(holder, part.segment, is_private=is_private)
        return Source(part, holder, segment, segment.flat())
    if holder.way == "cuda":
        return Source(part, holder, memory=client.open_device(holder, part.segment))
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


class HasTensors(Protocol):
    """Memory to fill, as tensors."""

    @property
    def tensors(self) -> list[Tensor]: ...


def pull(client: StoreClient, source: Source, pulls: Sequence[Pull], *, shadow: Tensor, targets: HasTensors) -> None:
    """Fetch bytes of a part from a process that holds it; if that one is lost, from the next."""
    ranges: list[Range] = []
    base = memory_view(shadow.data_ptr(), shadow.numel())
    direct = {wanted.target for wanted in pulls} - {-1}
    views = {index: memory_view(targets.tensors[index].data_ptr(), span(targets.tensors[index])) for index in direct}
    for wanted in pulls:
        view = base if wanted.target < 0 else views[wanted.target]
        at = wanted.offset if wanted.target < 0 else wanted.at
        ranges.append((wanted.offset, view[at : at + wanted.num_bytes]))
    failures: list[str] = []
    for holder in _in_order(client, source.part.segment.holders):
        if holder.way not in ("rdma", "tcp"):
            continue
        try:
            client.carrier.read(holder, ranges)
            source.holder = holder
            return
        except (OSError, StoreError) as error:
            failures.append(f"{holder.describe()} by {holder.way}: {error}")
    raise StoreError(
        f"rank {source.part.rank}'s part could not be read: " + "; ".join(failures),
        value=failures,
        rule="a process that holds it answers",
        repair="fetch a newer version, or keep copies: `await ts.setup(volumes=2, copies=2)`",
    )


def memory_view(address: int, num_bytes: int) -> memoryview:
    """Writable bytes at an address; whoever owns the memory must keep it."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((reach + 1) * tensor.element_size())
