"""What a version contains: its tensors, and where in which part each piece of them lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from forge.store.device_kernel import DeviceTable
from forge.store.packing import itemsize, packing
from forge.store.plan import Stored
from forge.store.proof import unpack_digests
from forge.store.records import Layout, Lease, Part
from forge.store.rects import Places


@dataclass(slots=True)
class Entry:
    """One tensor of a version."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: list[Stored] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """For each stored box its number among all pieces of the version."""


@dataclass(eq=False)
class Catalog:
    """All tensors of a version. The same for all versions that are laid out alike."""

    entries: dict[str, Entry]
    num_slots: int
    owner: list[str]
    """For each slot the name of its tensor."""
    first_slot: list[int]
    """For each part the slot of its first piece."""
    places: Places
    device_tables: dict[int, DeviceTable] = field(default_factory=dict)
    """For each part that is on a GPU, how it is digested there."""

    @cached_property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {name: (entry.shape, entry.dtype) for name, entry in self.entries.items()}


CatalogKey = tuple[tuple[str, tuple[int, ...] | None], ...]


def catalog_key(parts: tuple[Part, ...]) -> CatalogKey:
    return tuple((part.layout, part.written) for part in parts)


def catalog(lease: Lease) -> Catalog:
    """Read the layouts of a leased version."""
    entries: dict[str, Entry] = {}
    owner: list[str] = []
    first_slot: list[int] = []
    starts: list[int] = []
    numels: list[int] = []
    itemsizes: list[int] = []
    numbers: list[int] = []
    for index, part in enumerate(lease.version.parts):
        layout: Layout = lease.layouts[part.layout]
        for name, held in zip(layout.names, layout.helds, strict=True):
            if name not in entries:
                entries[name] = Entry(name, held.shape, held.dtype)
        first_slot.append(len(owner))
        for number, packed in enumerate(packing(layout, part.written).pieces):
            entry = entries[layout.names[packed.tensor]]
            entry.stored.append(Stored(index, packed.start, packed.piece.box))
            entry.slots.append(len(owner))
            owner.append(entry.name)
            starts.append(packed.start)
            numels.append(packed.piece.box.numel)
            itemsizes.append(itemsize(entry.dtype))
            numbers.append(number)
    places = Places.of(starts, numels=numels, itemsizes=itemsizes, numbers=numbers)
    return Catalog(entries, len(owner), owner, first_slot, places)


def published_digests(parts: tuple[Part, ...]) -> list[int]:
    """For each slot the digest that its publisher gave it."""
    return [digest for part in parts for digest in unpack_digests(part.digests)]
