"""Writing a rank's part of a version: into a segment, in one pass over the weights, with the proof made on the way."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forge.errors import StoreError
from forge.store import kernel
from forge.store.boxes import Held
from forge.store.client import StoreClient
from forge.store.layout import dtype_name, dtype_of, held, local
from forge.store.packing import Packed, Packing, itemsize, packing
from forge.store.proof import MODULUS, pack_digests, sample_seed
from forge.store.records import HEADER, Begin, Commit, Holder, Layout, Part, SegmentRecord, Ticket
from forge.store.rects import Places, Rects, byte_offset, row_major
from forge.store.segments import Segment

INLINE = 64 << 10
"""Values smaller than this are kept by the registry itself: a segment each would cost more than it holds."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One rank's part of a version to be."""

    key: str
    kind: str
    version: int | None
    rank: int = 0
    world_size: int = 1
    keep: int = 1
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class Published:
    """A version that readers can see."""

    version: int
    digest: str
    """Of all its tensors together, however they are laid out."""
    num_bytes: int
    """That this rank wrote."""
    snapshot_s: float
    """How long the weights had to stay as they were."""
    total_s: float


@dataclass(frozen=True, slots=True)
class Staged:
    """A part that is written and not yet committed."""

    contribution: Contribution
    ticket: Ticket
    layout: Layout
    segment: Segment | None
    record: SegmentRecord
    digests: bytes
    samples: bytes
    began: float


@dataclass(eq=False)
class _Prepared:
    """A state dict, looked at: its layout, and the tables that copy it. It holds no memory of the user's."""

    layout: Layout
    kept: list[Any]
    """What must stay alive for the fingerprint to mean the same."""
    tables: dict[tuple[int, ...] | None, _Table] = field(default_factory=dict)


@dataclass(eq=False)
class _Table:
    """How to write the pieces of one packing."""

    packing: Packing
    rects: Rects
    """What the kernel copies; one slot for each piece."""
    others: list[Packed]
    """What torch copies, because it converts or comes from a device."""
    digested: Rects
    """Those, as they lie in the segment."""
    places: Places


def ranks_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Which of how many publishing ranks this process is, unless the user has said so."""
    if rank is not None and world_size is not None:
        return rank, world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Writer:
    """Publishes for one key of one process. Looking at a state dict costs more than copying small tensors: what was
    found is kept for as long as the same tensors come."""

    def __init__(self, client: StoreClient, *, on: str = "auto") -> None:
        self.client, self.on = client, on
        self._prepared: tuple[tuple[Any, ...], _Prepared] | None = None
        self._told: str | None = None
        self._guard = threading.Lock()

    def record_stream(self, tensors: Mapping[str, Tensor]) -> Any:
        """Remember what the devices are still to do, in the caller's thread; the snapshot comes after that."""
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        events = []
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return events

    def stage(
        self, contribution: Contribution, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None, ready: Any = ()
    ) -> Staged:
        """Join the version and copy this rank's part of it. When this returns the tensors may change."""
        began = time.perf_counter()
        with self._guard:
            prepared = self._look_at(tensors, dtype)
        ticket = self._begin(contribution, prepared.layout)
        try:
            for event in ready:
                event.synchronize()
            memories = [local(tensor, name=name) for name, tensor in tensors.items()]
            return self._write(contribution, ticket, prepared, memories, began)
        except BaseException as error:
            why = f"rank {contribution.rank} could not write its part of {contribution.key!r}: {error}"
            self.client.line.tell("give_up", (ticket.id, why))
            raise

    def _begin(self, contribution: Contribution, layout: Layout) -> Ticket:
        wish = Begin(
            key=contribution.key,
            kind=contribution.kind,
            version=contribution.version,
            rank=contribution.rank,
            world_size=contribution.world_size,
            layout_id=layout.id,
            layout=None if self._told == layout.id else layout,
            keep=contribution.keep,
        )
        ticket = self.client.begin(wish, layout)
        self._told = layout.id
        return ticket

    # looking

    def _look_at(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> _Prepared:
        mark = (dtype, *(_fingerprint(name, tensor) for name, tensor in tensors.items()))
        if self._prepared is not None and self._prepared[0] == mark:
            return self._prepared[1]
        layout = Layout.of(tuple(tensors), tuple(_as_stored(held(t, name=name), dtype) for name, t in tensors.items()))
        prepared = _Prepared(layout, [getattr(tensor, "_spec", None) for tensor in tensors.values()])
        self._prepared = (mark, prepared)
        return prepared

    def _table(self, prepared: _Prepared, memories: Sequence[Tensor], written: tuple[int, ...] | None) -> _Table:
        table = prepared.tables.get(written)
        if table is None:
            table = prepared.tables[written] = _build(prepared.layout, memories, packing(prepared.layout, written))
        return table

    # writing

    def _write(
        self,
        contribution: Contribution,
        ticket: Ticket,
        prepared: _Prepared,
        memories: Sequence[Tensor],
        began: float,
    ) -> Staged:
        table = self._table(prepared, memories, ticket.written)
        size = table.packing.size
        stamp = secrets.randbits(63) | 1
        segment, memory = None, None
        if size - HEADER <= INLINE:
            memory = torch.empty(size, dtype=torch.uint8)
        else:
            segment = self._segment(contribution.key, size, ticket.reuse)
            segment.set_stamp(0)
            memory = segment.flat()
        digests = _copy(table, prepared.layout, memories, memory)
        seed = sample_seed(contribution.key, ticket.version)
        samples = kernel.sample(memory.data_ptr(), table.places, seed=seed)
        if segment is None:
            inline = memory.numpy().tobytes()
            record = SegmentRecord(size, stamp, inline=inline)
        else:
            segment.set_stamp(stamp)
            record = SegmentRecord(size, stamp)
        return Staged(contribution, ticket, prepared.layout, segment, record, pack_digests(digests), samples, began)

    def _segment(self, key: str, size: int, reuse: str | None) -> Segment:
        if reuse is not None:
            segment = self.client.segments.get(reuse)
            if segment is not None and segment.size >= size:
                return segment
        return self.client.segments.create(key, size)

    # committing

    def commit(self, staged: Staged, *, snapshot_s: float) -> Published:
        """Make the part readable, and wait until the version is complete."""
        contribution, ticket = staged.contribution, staged.ticket
        try:
            holders = self._holders(staged)
            record = SegmentRecord(staged.record.size, staged.record.stamp, holders, staged.record.inline)
            part = Part(contribution.rank, staged.layout.id, ticket.written, record, staged.digests, staged.samples)
            key = (contribution.kind, contribution.key)
            commit = Commit(ticket.id, part, contribution.extra)
            version, digest = self.client.line.call("commit", (key, commit))
        except BaseException as error:
            self._give_up(staged, error)
            raise
        took_s = time.perf_counter() - staged.began
        return Published(version, digest, staged.record.size, snapshot_s, took_s)

    def _give_up(self, staged: Staged, error: BaseException) -> None:
        if self.client.line.is_open:
            self.client.line.tell("give_up", (staged.ticket.id, f"rank {staged.contribution.rank} failed: {error}"))
        if staged.segment is not None and staged.segment.name != staged.ticket.reuse:
            self.client.segments.drop(staged.segment.name)

    def _holders(self, staged: Staged) -> tuple[Holder, ...]:
        """Who gives out the part: this process, or the storage volumes that it is handed to."""
        segment = staged.segment
        if segment is None:
            return ()
        return self.client.carrier.hold(segment, staged.record, staged.ticket.volumes)


def _fingerprint(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """Equal as long as a name stands for the same memory, looked at in the same way."""
    inner = getattr(tensor, "_local_tensor", tensor)
    return (name, inner.data_ptr(), inner.dtype, inner.shape, inner.stride(), id(getattr(tensor, "_spec", None)))


def _as_stored(have: Held, dtype: torch.dtype | None) -> Held:
    if dtype is None or not dtype_of(have.dtype).is_floating_point:
        return have
    return Held(have.shape, dtype_name(dtype), have.pieces)


def _build(layout: Layout, memories: Sequence[Tensor], packed: Packing) -> _Table:
    rects, digested = Rects(num_slots=len(packed.pieces)), Rects(num_slots=len(packed.pieces))
    others: list[Packed] = []
    for slot, entry in enumerate(packed.pieces):
        have, memory = layout.helds[entry.tensor], memories[entry.tensor]
        box, size = entry.piece.box, itemsize(have.dtype)
        image_strides = row_major(have.shape, size)
        image = (slot, byte_offset(box.offset, image_strides), image_strides)
        target = (0, entry.start, row_major(box.shape, size))
        is_same = memory.dtype == dtype_of(have.dtype)
        is_fused = memory.dtype == torch.float32 and have.dtype == "bfloat16"
        if memory.is_cpu and (is_same or is_fused):
            strides = tuple(stride * memory.element_size() for stride in memory.stride())
            source = (entry.tensor, byte_offset(entry.piece.at, strides), strides)
            rects.add(box.shape, itemsize=size, src=source, dst=target, image=image, cast=is_fused)
        else:
            others.append(entry)
            digested.add(box.shape, itemsize=size, src=target, image=image)
    places = Places.of(
        [entry.start for entry in packed.pieces],
        numels=[entry.piece.box.numel for entry in packed.pieces],
        itemsizes=[itemsize(layout.helds[entry.tensor].dtype) for entry in packed.pieces],
    )
    return _Table(packed, rects, others, digested, places)


def _copy(table: _Table, layout: Layout, memories: Sequence[Tensor], memory: Tensor) -> Sequence[int]:
    """Write all pieces; the digest of each."""
    threads = torch.get_num_threads()
    base = [memory.data_ptr()]
    sources = [tensor.data_ptr() for tensor in memories]
    digests = list(kernel.run(table.rects, sources, base, digest=True, num_threads=threads))
    if table.others:
        for entry in table.others:
            view = piece_view(memory, entry.start, entry.piece.box.shape, layout.helds[entry.tensor].dtype)
            view.copy_(part_of(memories[entry.tensor], entry.piece.at, entry.piece.box.shape))
        more = kernel.digest_only(table.digested, base, num_threads=threads)
        digests = [(one + other) % MODULUS for one, other in zip(digests, more, strict=True)]
    return digests


def piece_view(memory: Tensor, start: int, shape: Sequence[int], dtype: str) -> Tensor:
    """A piece of a segment as a tensor."""
    kind = dtype_of(dtype)
    count = 1
    for extent in shape:
        count *= extent
    return memory[start : start + count * kind.itemsize].view(kind).view(tuple(shape))


def part_of(tensor: Tensor, at: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A rectangle of a tensor."""
    for dim, (start, extent) in enumerate(zip(at, shape, strict=True)):
        tensor = tensor.narrow(dim, start, extent)
    return tensor


def check_device(on: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise where weights are to stay on a GPU and are not there."""
    if on == "cuda" and not all(tensor.is_cuda for tensor in tensors.values()):
        raise StoreError(
            "weights that are kept on a GPU must be on one",
            path="Weights(on=)",
            value=on,
            rule='on="cuda" publishes CUDA tensors',
            repair='on="host"',
        )
