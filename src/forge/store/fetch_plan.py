"""How to fill a reader's memory from the parts of a version: made once, and used for every version laid out alike.

A part whose memory is mapped here is read in place. Of a part on another host only the bytes that are wanted are
pulled: straight into the reader's memory where they lie there in one run, else to their own offsets in a shadow of the
segment, of which untouched pages cost nothing. From there on both are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forge.errors import WeightMismatch
from forge.store.boxes import Box
from forge.store.catalog import Catalog, Entry
from forge.store.device_kernel import DeviceTable, are_words
from forge.store.layout import dtype_of
from forge.store.packing import itemsize
from forge.store.plan import Copy, Stored, plan
from forge.store.rects import Rects, byte_offset, row_major
from forge.store.targets import Target


@dataclass(frozen=True, slots=True)
class TorchCopy:
    """A rectangle that torch copies, because it converts or a device is involved."""

    slot: int
    stored: Stored
    dtype: str
    copy: Copy


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
    """Tables for one catalogue, one set of targets, and one choice of which parts are mapped."""

    rects: Rects
    """Copies by the kernel, from the parts (or their shadows) to the targets, whose memory is given to each run."""
    landed: Rects
    """Rectangles that are pulled straight into targets; source and destination as in `rects`."""
    device_rects: Rects
    """Copies by the GPU's kernel, from the parts to the targets."""
    device_targets: Rects
    """The targets of those, to be digested."""
    torch_copies: list[TorchCopy]
    pulls: dict[int, list[Pull]]
    """For each part that is not mapped, what to fetch of it."""
    whole: dict[int, int] = field(default_factory=dict)
    """Slots that are read whole, and how often."""
    partial: list[int] = field(default_factory=list)
    """Slots of which a part is read."""
    num_bytes: int = 0
    device_tables: dict[str, DeviceTable] = field(default_factory=dict)


def make_plan(key: str, catalog: Catalog, targets: list[Target], where: Sequence[torch.device | None]) -> FetchPlan:
    """Plan all copies; `where` says for each part in which memory it can be read in place, if in any."""
    tables = [Rects(num_slots=catalog.num_slots) for _ in range(4)]
    pulls: dict[int, list[Pull]] = {part: [] for part, device in enumerate(where) if device is None}
    made = FetchPlan(tables[0], tables[1], tables[2], tables[3], [], pulls)
    read: dict[int, list[tuple[int, Box]]] = {}
    for number, target in enumerate(targets):
        entry = catalog.entries[target.name]
        copies, missing = plan(entry.stored, target.pieces, target=number)
        if missing:
            raise WeightMismatch(
                f"a part of {target.name!r} is in no segment of {key!r}",
                tensors=[target.name],
                path=f"{key}/{target.name}",
                value=missing,
                rule="every element that is wanted was published",
                repair="publish from every rank of the device mesh",
            )
        for copy in copies:
            slot = entry.slots[copy.stored]
            read.setdefault(slot, []).append((number, Box(copy.src_at, copy.shape)))
            _add(made, entry, slot, copy, target.memory, where[entry.stored[copy.stored].part])
    for slot, boxes in read.items():
        times = _times_whole(boxes, int(catalog.places.numels[slot]))
        if times:
            made.whole[slot] = times
        else:
            made.partial.append(slot)
    return made


def _add(made: FetchPlan, entry: Entry, slot: int, copy: Copy, memory: Tensor, where: torch.device | None) -> None:
    size = itemsize(entry.dtype)
    stored = entry.stored[copy.stored]
    pulls = made.pulls.get(stored.part)
    num_bytes = Box(copy.src_at, copy.shape).numel * size
    made.num_bytes += num_bytes
    strides = tuple(stride * size for stride in memory.stride())
    inner = row_major(stored.box.shape, size)
    whole = row_major(entry.shape, size)
    image_at = [a + b for a, b in zip(stored.box.offset, copy.src_at, strict=True)]
    source = (stored.part, stored.start + byte_offset(copy.src_at, inner), inner)
    target = (copy.target, byte_offset(copy.dst_at, strides), strides)
    image = (slot, byte_offset(image_at, whole), whole)
    has_kernel = memory.dtype == dtype_of(entry.dtype) and memory.device == (where or torch.device("cpu"))
    if has_kernel and memory.is_cuda and are_words(copy.shape, itemsize=size, walks=(source, target, image)):
        made.device_rects.add(copy.shape, itemsize=size, src=source, dst=target, image=image)
        made.device_targets.add(copy.shape, itemsize=size, src=target, image=image)
        return
    if not has_kernel or memory.is_cuda:
        made.torch_copies.append(TorchCopy(slot, stored, entry.dtype, copy))
        if pulls is not None:
            pulls.extend(_runs(stored, copy, size))
        return
    table = made.rects
    if pulls is not None and _is_run(copy.shape, strides, size) and _is_run(copy.shape, inner, size):
        pulls.append(Pull(source[1], num_bytes, copy.target, target[1]))
        table = made.landed
    elif pulls is not None:
        pulls.extend(_runs(stored, copy, size))
    table.add(copy.shape, itemsize=size, src=source, dst=target, image=image)


def _is_run(shape: Sequence[int], strides: Sequence[int], size: int) -> bool:
    """Whether a rectangle is one run of bytes."""
    step = size
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1:
            if stride != step:
                return False
            step *= extent
    return True


def _runs(stored: Stored, copy: Copy, size: int) -> Iterator[Pull]:
    """The runs of bytes of which a rectangle consists inside its stored box."""
    strides = row_major(stored.box.shape, size)
    inner, run = len(copy.shape), size
    while inner > 0:  # dimensions that are read whole belong to the run, and so does the last one that is not
        inner -= 1
        run *= copy.shape[inner]
        if copy.shape[inner] != stored.box.shape[inner]:
            break
    first = stored.start + byte_offset(copy.src_at, strides)
    for at in itertools.product(*(range(extent) for extent in copy.shape[:inner])):
        yield Pull(first + byte_offset(at, strides[:inner]), run)


def _times_whole(boxes: list[tuple[int, Box]], numel: int) -> int:
    """How often the rectangles cover their piece, if each of its elements is covered equally often; else 0."""
    total = sum(box.numel for _, box in boxes)
    if total == numel and _are_disjoint([box for _, box in boxes]):
        return 1
    per_target: dict[int, int] = {}
    for target, box in boxes:  # those of one target are disjoint
        per_target[target] = per_target.get(target, 0) + box.numel
    return len(per_target) if all(count == numel for count in per_target.values()) else 0


def _are_disjoint(boxes: list[Box]) -> bool:
    return all(one.intersect(other) is None for one, other in itertools.combinations(boxes, 2))
