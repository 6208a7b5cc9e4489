"""How to fill a reader's memory from the parts of a version: made once, and used for every version laid out alike.

A part whose memory is mapped here is read in place. Of a part on another host only the bytes that are wanted are
pulled: straight into the reader's memory where they lie there in one run, else to their own offsets in a shadow of the
segment, of which untouched pages cost nothing. From there on both are the same.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from forge.errors import StoreError, WeightMismatch
from forge.store.copy_table import SRC_BASE, CopyTable, PieceLocations, Walk, byte_offset, row_major
from forge.store.device_kernel import DeviceTable, are_words
from forge.store.intervals import GAP, Intervals, runs_of, source_runs, union_of
from forge.store.proof import unpack_digests
from forge.store.records import Layout, Lease, Part, itemsize, packing
from forge.store.sharding import Piece, Region
from forge.store.targets import Target
from forge.store.tensors import dtype_of


@dataclass(frozen=True, slots=True)
class Stored:
    """A region of a tensor as it lies in a segment: row-major and contiguous."""

    part: int
    """Which segment."""
    start: int
    """Where it begins in the segment, in bytes."""
    region: Region


@dataclass(frozen=True, slots=True)
class Copy:
    """One rectangle to copy."""

    stored: int
    """Which of the stored regions it comes from, as a position in their list."""
    target: int
    """Which destination tensor it goes to."""
    shape: tuple[int, ...]
    src_at: tuple[int, ...]
    """Where it begins inside of the stored region."""
    dst_at: tuple[int, ...]
    """Where it begins inside of the local destination tensor."""


def plan_copies(stored: Sequence[Stored], wanted: Sequence[Piece], *, target: int = 0) -> tuple[list[Copy], int]:
    """Return the copies that fill the wanted pieces of one tensor, and how many wanted elements are not stored.

    Only what a piece needs is copied, each element once. Stored regions are disjoint: the registry has checked that.
    """
    copies: list[Copy] = []
    num_missing = 0
    index: _StoredIndex | None = None
    for piece in wanted:
        region, at = piece.region, piece.at
        if len(stored) == 1 and stored[0].region == region:
            copies.append(Copy(0, target, region.shape, (0,) * len(at), at))
            continue
        index = index or _StoredIndex(stored, len(at))
        num_missing += region.numel
        for number, shared in index.overlapping(region):
            lands = tuple([a - b + c for a, b, c in zip(shared.offset, region.offset, at, strict=True)])
            copies.append(Copy(number, target, shared.shape, shared.relative_to(stored[number].region), lands))
            num_missing -= shared.numel
    return copies, num_missing


class _StoredIndex:
    """The stored regions of one tensor, sorted along the dimension in which they differ most."""

    def __init__(self, stored: Sequence[Stored], ndim: int) -> None:
        regions = [item.region for item in stored]
        self._dim = max(range(ndim), key=lambda dim: len({r.offset[dim] for r in regions})) if len(regions) > 1 else -1
        self._rows = sorted(((*self._span(region), number) for number, region in enumerate(regions)))
        self._regions = regions
        self._starts = [start for start, _, _ in self._rows]
        # Regions differ in length, so their ends need not be sorted; the furthest end so far is.
        self._reach = list(accumulate((end for _, end, _ in self._rows), max))

    def overlapping(self, region: Region) -> Iterator[tuple[int, Region]]:
        """Yield the number of each stored region that shares elements with this one, and what they share."""
        start, end = self._span(region)
        for _, _, number in self._rows[bisect_right(self._reach, start) : bisect_left(self._starts, end)]:
            shared = self._regions[number].intersect(region)
            if shared is not None:
                yield number, shared

    def _span(self, region: Region) -> tuple[int, int]:
        """Return the extent of a region along the sorted dimension; the same for all when there is none."""
        if self._dim < 0:
            return 0, 1
        start = region.offset[self._dim]
        return start, start + region.shape[self._dim]


@dataclass(slots=True)
class Entry:
    """One tensor of a version."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: list[Stored] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """For each stored region its number among all pieces of the version."""


@dataclass(eq=False)
class Catalog:
    """All tensors of a version. The same for all versions that are laid out alike."""

    entries: dict[str, Entry]
    num_slots: int
    owner: list[str]
    """For each slot the name of its tensor."""
    first_slot: list[int]
    """For each part the slot of its first piece."""
    locations: PieceLocations
    device_tables: dict[int, DeviceTable] = field(default_factory=dict)
    """For each part that is on a GPU, how it is digested there."""

    @cached_property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {name: (entry.shape, entry.dtype) for name, entry in self.entries.items()}

    @cached_property
    def viewable(self) -> dict[str, Entry]:
        """The tensors that are stored in one piece, and so can be viewed where they lie."""
        return {
            name: entry
            for name, entry in self.entries.items()
            if len(entry.stored) == 1 and entry.stored[0].region.shape == entry.shape
        }

    def viewable_slots(self, part: int) -> list[int]:
        """Return the slots of a part that are whole tensors."""
        return [entry.slots[0] for entry in self.viewable.values() if entry.stored[0].part == part]

    def viewable_bytes(self, part: int) -> Intervals:
        """Return where the whole tensors of a part lie in it."""
        slots = self.viewable_slots(part)
        starts, sizes = self.locations.starts[slots], self.locations.numels[slots] * self.locations.itemsizes[slots]
        return Intervals.joined(starts, starts + sizes, gap=GAP)


CatalogKey = tuple[tuple[str, tuple[int, ...] | None], ...]


def catalog_key(parts: tuple[Part, ...]) -> CatalogKey:
    return tuple((part.layout, part.written) for part in parts)


def read_catalog(lease: Lease) -> Catalog:
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
        for name, shards in zip(layout.names, layout.shards, strict=True):
            if name not in entries:
                entries[name] = Entry(name, shards.shape, shards.dtype)
        first_slot.append(len(owner))
        for number, packed in enumerate(packing(layout, part.written).pieces):
            entry = entries[layout.names[packed.tensor]]
            entry.stored.append(Stored(index, packed.start, packed.piece.region))
            entry.slots.append(len(owner))
            owner.append(entry.name)
            starts.append(packed.start)
            numels.append(packed.piece.region.numel)
            itemsizes.append(itemsize(entry.dtype))
            numbers.append(number)
    locations = PieceLocations.of(starts, numels=numels, itemsizes=itemsizes, numbers=numbers)
    return Catalog(entries, len(owner), owner, first_slot, locations)


def published_digests(parts: tuple[Part, ...]) -> list[int]:
    """Return for each slot the digest that its publisher gave it."""
    return [digest for part in parts for digest in unpack_digests(part.digests)]


@dataclass(frozen=True, slots=True)
class TorchCopy:
    """A rectangle that torch copies, because it converts, or because it moves between devices."""

    slot: int
    stored: Stored
    dtype: str
    copy: Copy
    proof: Literal["table", "tensor", "none"]
    """How what arrived is digested: by one of the plan's tables, by itself, or not at all, since it was converted."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A run of bytes that must be fetched from a part: to the same offset of its shadow, or straight to a target."""

    offset: int
    num_bytes: int
    target: int = -1
    at: int = 0
    """Byte offset in the target's memory."""


@dataclass(eq=False)
class FetchPlan:
    """Tables for one catalogue, one set of targets, and one choice of where each part can be read.

    A table's sources are the parts and its destinations the targets, whose addresses are given to each run.
    """

    num_slots: int
    rects: CopyTable = field(default_factory=CopyTable)
    """Copies by the kernel, from the parts or their shadows."""
    landed: CopyTable = field(default_factory=CopyTable)
    """What comes into targets on the host by other means."""
    on_device: CopyTable = field(default_factory=CopyTable)
    """Copies by the GPU's kernel."""
    landed_on_device: CopyTable = field(default_factory=CopyTable)
    """What comes into targets on the GPU by other means; here the targets are the sources."""
    torch_copies: list[TorchCopy] = field(default_factory=list)
    pulls: dict[int, list[Pull]] = field(default_factory=dict)
    """For each part that is not mapped, what to fetch of it."""
    whole: dict[int, int] = field(default_factory=dict)
    """Slots that are read whole, and how often."""
    partial: dict[int, CopyTable] = field(default_factory=dict)
    """For each part, what is read of pieces that are not read whole, as it lies in the part, which is source 0."""
    tied: list[tuple[str, str]] = field(default_factory=list)
    """Tensors that go to one and the same memory, as tied weights do, and so must have equal values."""
    num_bytes: int = 0
    device_tables: dict[str, DeviceTable] = field(default_factory=dict)
    _needed: dict[int, Intervals] = field(default_factory=dict)

    @cached_property
    def num_pulled(self) -> int:
        """Bytes that are pulled from other hosts."""
        return sum(pull.num_bytes for pulls in self.pulls.values() for pull in pulls)

    def needed(self, part: int) -> Intervals:
        """Return which bytes are copied of a part that is read in place."""
        if part not in self._needed:
            runs = [source_runs(row) for row in self.rects.each() if row[SRC_BASE] == part]
            for entry in self.torch_copies:
                if entry.stored.part == part:
                    size = itemsize(entry.dtype)
                    strides = row_major(entry.stored.region.shape, size)
                    start = entry.stored.start + byte_offset(entry.copy.src_at, strides)
                    runs.append(runs_of(start, entry.copy.shape, strides, size=size))
            self._needed[part] = union_of(runs)
        return self._needed[part]


def make_plan(key: str, catalog: Catalog, targets: list[Target], where: Sequence[torch.device | None]) -> FetchPlan:
    """Plan all copies; `where` says for each part in which memory it can be read in place, if in any."""
    made = FetchPlan(catalog.num_slots)
    for table in (made.rects, made.landed, made.on_device, made.landed_on_device):
        table.num_slots = catalog.num_slots
    made.pulls = {part: [] for part, device in enumerate(where) if device is None}
    made.tied = _tied(targets)
    read: dict[int, list[tuple[int, Region]]] = {}
    for number, target in enumerate(targets):
        entry = catalog.entries[target.name]
        copies, num_missing = plan_copies(entry.stored, target.pieces, target=number)
        if num_missing:
            raise WeightMismatch(
                f"a part of {target.name!r} is in no segment of {key!r}",
                tensors=[target.name],
                path=f"{key}/{target.name}",
                value=f"{num_missing} elements",
                rule="every element that is wanted was published",
                repair="publish from every rank of the device mesh",
            )
        for copy in copies:
            slot = entry.slots[copy.stored]
            read.setdefault(slot, []).append((number, Region(copy.src_at, copy.shape)))
            _add(made, entry, slot, copy, target.memory, where[entry.stored[copy.stored].part])
    for slot, regions in read.items():
        times = _times_whole(regions, int(catalog.locations.numels[slot]))
        if times:
            made.whole[slot] = times
        else:
            _note_partial(made, catalog, slot, [region for _, region in regions])
    return made


def _tied(targets: Sequence[Target]) -> list[tuple[str, str]]:
    """Return the pairs of tensors that go to the same memory. Raise where different parts would go there."""
    tied: list[tuple[str, str]] = []
    last: tuple[int, int, Target] | None = None
    dense = [t for t in targets if t.pieces and t.memory.is_contiguous()]
    for target in sorted(dense, key=lambda target: target.memory.data_ptr()):
        start = target.memory.data_ptr()
        end = start + target.memory.numel() * target.memory.element_size()
        if last is not None and start < last[1]:
            _check_same(last[2], target)
            if last[2].name != target.name:
                tied.append((last[2].name, target.name))
        if last is None or end > last[1]:
            last = (start, end, target)
    return tied


def _check_same(one: Target, other: Target) -> None:
    def place(target: Target) -> tuple[object, ...]:
        return target.memory.data_ptr(), target.memory.shape, target.memory.dtype, target.pieces

    if place(one) != place(other):
        raise StoreError(
            f"{one.label!r} and {other.label!r} share memory, but hold different parts",
            path=other.label,
            value=f"{list(other.memory.shape)} at the memory of {one.label!r}, {list(one.memory.shape)}",
            rule="two places overlap only where they are the same memory for the same part, as tied weights are",
            repair="give each its own memory",
        )


def _note_partial(made: FetchPlan, catalog: Catalog, slot: int, regions: list[Region]) -> None:
    entry = catalog.entries[catalog.owner[slot]]
    stored = entry.stored[entry.slots.index(slot)]
    table = made.partial.setdefault(stored.part, CopyTable(num_slots=catalog.num_slots))
    for region in regions:
        source, image = _walks(entry, stored, slot, region.offset)
        table.add(region.shape, itemsize=itemsize(entry.dtype), src=(0, *source[1:]), image=image)


def _walks(entry: Entry, stored: Stored, slot: int, at: Sequence[int]) -> tuple[Walk, Walk]:
    """Return the walks through the part and through the whole tensor, for a rectangle `at` in its stored region."""
    size = itemsize(entry.dtype)
    inner, whole = row_major(stored.region.shape, size), row_major(entry.shape, size)
    image_at = [a + b for a, b in zip(stored.region.offset, at, strict=True)]
    source = (stored.part, stored.start + byte_offset(at, inner), inner)
    return source, (slot, byte_offset(image_at, whole), whole)


def _add(made: FetchPlan, entry: Entry, slot: int, copy: Copy, memory: Tensor, where: torch.device | None) -> None:
    size, stored = itemsize(entry.dtype), entry.stored[copy.stored]
    made.num_bytes += Region(copy.src_at, copy.shape).numel * size
    source, image = _walks(entry, stored, slot, copy.src_at)
    strides = tuple(stride * memory.element_size() for stride in memory.stride())
    target = (copy.target, byte_offset(copy.dst_at, strides), strides)
    is_same = memory.dtype == dtype_of(entry.dtype)
    are_whole_words = memory.is_cuda and are_words(copy.shape, itemsize=size, walks=(source, target, image))
    if is_same and memory.is_cpu and (where is None or where.type == "cpu"):
        _add_on_host(made, copy, size, (source, target, image))
    elif is_same and memory.device == where and are_whole_words:
        made.on_device.add(copy.shape, itemsize=size, src=source, dst=target, image=image)
    else:
        proof: Literal["table", "tensor", "none"] = "none"
        if is_same and memory.is_cpu:
            made.landed.add(copy.shape, itemsize=size, src=source, dst=target, image=image)
            proof = "table"
        elif is_same and are_whole_words:
            made.landed_on_device.add(copy.shape, itemsize=size, src=target, image=image)
            proof = "table"
        elif is_same:
            proof = "tensor"
        made.torch_copies.append(TorchCopy(slot, stored, entry.dtype, copy, proof))
        if stored.part in made.pulls:
            made.pulls[stored.part].extend(_runs(source, copy.shape, size))


def _add_on_host(made: FetchPlan, copy: Copy, size: int, walks: tuple[Walk, Walk, Walk]) -> None:
    """Plan a copy to the host: from mapped memory, or over the network, straight into a target that is one run."""
    source, target, image = walks
    pulls = made.pulls.get(source[0])
    table = made.rects
    if pulls is not None and _is_run(copy.shape, target[2], size) and _is_run(copy.shape, source[2], size):
        pulls.append(Pull(source[1], Region(copy.src_at, copy.shape).numel * size, copy.target, target[1]))
        table = made.landed
    elif pulls is not None:
        pulls.extend(_runs(source, copy.shape, size))
    table.add(copy.shape, itemsize=size, src=source, dst=target, image=image)


def _is_run(shape: Sequence[int], strides: Sequence[int], size: int) -> bool:
    """Return whether a rectangle is one run of bytes."""
    step = size
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1:
            if stride != step:
                return False
            step *= extent
    return True


def _runs(source: Walk, shape: Sequence[int], size: int) -> Iterator[Pull]:
    """Return the runs of bytes of which a rectangle consists in its part."""
    _, first, strides = source
    inner, run = len(shape), size
    while inner > 0 and (strides[inner - 1] == run or shape[inner - 1] == 1):  # dimensions without a gap belong to it
        inner -= 1
        run *= shape[inner]
    for at in itertools.product(*(range(extent) for extent in shape[:inner])):
        yield Pull(first + byte_offset(at, strides[:inner]), run)


def _times_whole(regions: list[tuple[int, Region]], numel: int) -> int:
    """Return how often the rectangles cover their piece, if each element is covered equally often; else 0."""
    total = sum(region.numel for _, region in regions)
    if total == numel and _are_disjoint([region for _, region in regions]):
        return 1
    per_target: dict[int, int] = {}
    for target, region in regions:  # those of one target are disjoint
        per_target[target] = per_target.get(target, 0) + region.numel
    return len(per_target) if all(count == numel for count in per_target.values()) else 0


def _are_disjoint(regions: list[Region]) -> bool:
    return all(one.intersect(other) is None for one, other in itertools.combinations(regions, 2))
