"""Snapshots: a rank's part of a state dict, packed into memory in one pass that also makes the digests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forge.store import kernel
from forge.store.copy_table import CopyTable, PieceLocations, byte_offset, row_major
from forge.store.device_kernel import DeviceTable, are_words
from forge.store.device_kernel import build as build_on_device
from forge.store.device_kernel import run as run_on_device
from forge.store.digest import digest_tensor
from forge.store.proof import MODULUS, added
from forge.store.records import Layout, Packed, Packing, itemsize
from forge.store.sharding import TensorShards
from forge.store.tensors import LocalTensors, dtype_name, dtype_of, part_of, piece_view


@dataclass(eq=False)
class Prepared:
    """A state dict, looked at: its layout, and the tables that copy it. It holds no memory of the user's."""

    layout: Layout
    devices: set[torch.device]
    kept: list[Any]
    """What must stay alive for the fingerprint to mean the same."""
    tables: dict[tuple[torch.device, tuple[int, ...] | None], Table] = field(default_factory=dict)


@dataclass(eq=False)
class Table:
    """How to write the pieces of one packing."""

    packing: Packing
    rects: CopyTable
    """What the kernel copies; one slot for each piece."""
    others: list[Packed]
    """What torch copies, because it converts, or moves between devices."""
    digested: CopyTable
    """Those, as they lie in the segment."""
    locations: PieceLocations
    on_device: tuple[DeviceTable, ...] = ()
    """What the GPU's kernel copies, and what it converts."""


def as_stored(have: TensorShards, dtype: torch.dtype | None) -> TensorShards:
    if dtype is None or not dtype_of(have.dtype).is_floating_point:
        return have
    return TensorShards(have.shape, dtype_name(dtype), have.pieces)


def build(layout: Layout, memories: Sequence[Tensor], packed: Packing, device: torch.device) -> Table:
    rects, digested, copied, converted = (CopyTable(num_slots=len(packed.pieces)) for _ in range(4))
    others: list[Packed] = []
    for slot, entry in enumerate(packed.pieces):
        have, memory = layout.shards[entry.tensor], memories[entry.tensor]
        region, size = entry.piece.region, itemsize(have.dtype)
        image_strides = row_major(have.shape, size)
        image = (slot, byte_offset(region.offset, image_strides), image_strides)
        target = (0, entry.start, row_major(region.shape, size))
        is_same = memory.dtype == dtype_of(have.dtype)
        is_fused = memory.dtype == torch.float32 and have.dtype == "bfloat16"
        strides = tuple(stride * memory.element_size() for stride in memory.stride())
        source = (entry.tensor, byte_offset(entry.piece.at, strides), strides)
        if memory.is_cpu and device.type == "cpu" and (is_same or is_fused):
            rects.add(region.shape, itemsize=size, src=source, dst=target, image=image, cast=is_fused)
        elif (
            memory.device == device
            and (is_same or is_fused)
            and are_words(region.shape, itemsize=size, walks=(source, target, image), is_cast=is_fused)
        ):
            table = converted if is_fused else copied
            table.add(region.shape, itemsize=size, src=source, dst=target, image=image, cast=is_fused)
        else:
            others.append(entry)
            digested.add(region.shape, itemsize=size, src=target, image=image)
    locations = PieceLocations.of(
        [entry.start for entry in packed.pieces],
        numels=[entry.piece.region.numel for entry in packed.pieces],
        itemsizes=[itemsize(layout.shards[entry.tensor].dtype) for entry in packed.pieces],
    )
    blocks = tuple(build_on_device(table, device) for table in (copied, converted) if len(table))
    return Table(packed, rects, others, digested, locations, blocks)


def copy(table: Table, layout: Layout, memories: LocalTensors, memory: Tensor) -> list[int]:
    """Write all pieces; return the digest of each."""
    threads = torch.get_num_threads()
    base = [memory.data_ptr()]
    sources = memories.addresses
    digests: list[int] = []
    for blocks in table.on_device:
        digests = added(digests, run_on_device(blocks, sources, base))
    if len(table.rects) or not digests:
        digests = added(digests, kernel.run(table.rects, sources, base, digest=True, num_threads=threads))
    if not table.others:
        return digests
    for entry in table.others:
        view = piece_view(memory, entry.start, entry.piece.region.shape, layout.shards[entry.tensor].dtype)
        view.copy_(part_of(memories.tensors[entry.tensor], entry.piece.at, entry.piece.region.shape), non_blocking=True)
    if memory.is_cuda or any(tensor.is_cuda for tensor in memories.tensors):  # never wake a GPU that is not used
        torch.cuda.synchronize()
    if memory.is_cpu:
        return added(digests, kernel.digest_only(table.digested, base, num_threads=threads))
    slots = {entry.number: slot for slot, entry in enumerate(table.packing.pieces)}
    for entry in table.others:
        have, region = layout.shards[entry.tensor], entry.piece.region
        view = piece_view(memory, entry.start, region.shape, have.dtype)
        digests[slots[entry.number]] += digest_tensor(view, region, have.shape)
    return [digest % MODULUS for digest in digests]
