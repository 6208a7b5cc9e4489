"""Where one reader gets each part of a version: from memory that it maps, or from another host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forge.errors import StoreError, WeightMismatch
from forge.store.client import StoreClient
from forge.store.records import Holder, Part, Version
from forge.store.segments import Segment
from forge.store.transports.cuda import read_stamp


@dataclass(eq=False)
class Source:
    """One part, opened."""

    part: Part
    holder: Holder | None
    segment: Segment | None = None
    memory: Tensor | None = None
    """The part's bytes, where they can be read in place."""
    is_relayed: bool = False
    """Whether this host's relay gets what the reader needs of it. Then it is read in place, once that is there."""

    @property
    def where(self) -> torch.device | None:
        """The memory in which it can be read in place."""
        if self.is_relayed:
            return torch.device("cpu")
        return None if self.memory is None else self.memory.device

    @property
    def is_remote(self) -> bool:
        """Whether only processes on other hosts hold all of it."""
        return self.memory is None or self.is_relayed

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
                repair="fetch again; if it happens again, report a bug",
            )


def open_source(client: StoreClient, version: Version, part: Part, *, is_private: bool = False) -> Source:
    """Open a part by the best transport. A holder that has gone is passed over for the next."""
    record = part.segment
    if record.inline is not None:
        return Source(part, None, memory=torch.frombuffer(bytearray(record.inline), dtype=torch.uint8))
    tried: list[str] = []
    for holder in holders_in_order(client, record.holders):
        try:
            if holder.transport != "ask":
                return _open(client, part, holder, is_private=is_private)
            part = replace(part, segment=client.data_plane.host_copy(holder, record))  # from a GPU that is out of reach
            return open_source(client, version, part, is_private=is_private)
        except (OSError, StoreError) as error:
            tried.append(f"{holder.describe()} by {holder.transport}: {error}")
    raise StoreError(
        f"rank {part.rank}'s part of version {version.number} of {version.key!r} cannot be reached from here",
        path=version.key,
        value=tried or [f"{holder.describe()} by {holder.transport}" for holder in record.holders],
        rule="a process that holds it answers",
        repair="fetch a newer version, or keep copies: `await ts.setup(volumes=2, copies=2)`",
    )


def holders_in_order(client: StoreClient, holders: Sequence[Holder]) -> list[Holder]:
    """Return the holders that can be reached from here, the best transport first."""
    order = (*client.transports(), "ask")
    usable = [
        holder
        for holder in holders
        if holder.transport in order and (holder.transport not in ("shm", "cuda") or holder.host == client.host)
    ]
    return sorted(usable, key=lambda holder: order.index(holder.transport))


def _open(client: StoreClient, part: Part, holder: Holder, *, is_private: bool) -> Source:
    if holder.transport == "shm":
        segment = client.open(holder, part.segment, is_private=is_private)
        return Source(part, holder, segment, segment.flat())
    if holder.transport == "cuda":
        return Source(part, holder, memory=client.open_device(holder, part.segment))
    return Source(part, holder)
