"""Writing a rank's part of a version: into a segment, in one pass over the weights, with the proof made on the way."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forge.errors import StoreError
from forge.runtime.meeting import run_id
from forge.store import kernel
from forge.store.boxes import Held
from forge.store.carrying import is_spread
from forge.store.client import StoreClient
from forge.store.device_kernel import DeviceTable, are_words
from forge.store.device_kernel import build as build_on_device
from forge.store.device_kernel import run as run_on_device
from forge.store.digest import digest_tensor
from forge.store.layout import dtype_name, dtype_of, held, local
from forge.store.packing import Packed, Packing, itemsize, packing
from forge.store.proof import MODULUS, added, pack_digests, sample_seed
from forge.store.records import HEADER, Begin, Commit, Holder, Layout, Part, SegmentRecord, Ticket
from forge.store.rects import Places, Rects, byte_offset, row_major
from forge.store.segments import Segment
from forge.store.transports.cuda import DeviceSegment
from forge.store.views import part_of, piece_view

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
    timeout_s: float | None = None


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
    segment: Segment | DeviceSegment | None
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
    tables: dict[tuple[torch.device, tuple[int, ...] | None], _Table] = field(default_factory=dict)


@dataclass(eq=False)
class _Table:
    """How to write the pieces of one packing."""

    packing: Packing
    rects: Rects
    """What the kernel copies; one slot for each piece."""
    others: list[Packed]
    """What torch copies, because it converts, or moves between devices."""
    digested: Rects
    """Those, as they lie in the segment."""
    places: Places
    on_device: DeviceTable | None = None
    """What the GPU's kernel copies."""


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
        self.snapshots = ThreadPoolExecutor(1, thread_name_prefix="forge-snapshot")
        self.commits = ThreadPoolExecutor(1, thread_name_prefix="forge-commit")
        self._spare: Segment | None = None
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
            timeout_s=contribution.timeout_s,
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

    def _table(
        self, prepared: _Prepared, memories: Sequence[Tensor], device: torch.device, written: tuple[int, ...] | None
    ) -> _Table:
        table = prepared.tables.get((device, written))
        if table is None:
            packed = packing(prepared.layout, written)
            table = prepared.tables[device, written] = _build(prepared.layout, memories, packed, device)
        return table

    def _device(self, memories: Sequence[Tensor], size: int) -> torch.device:
        """Where the part is kept until it is fetched."""
        devices = {memory.device for memory in memories}
        is_on_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
        if self.on == "cuda" and not is_on_gpu:
            raise StoreError(
                "weights that are kept on a GPU must be on one GPU",
                path="Weights(on=)",
                value=sorted(str(device) for device in devices),
                rule='with on="cuda" every tensor that a rank publishes is on the same GPU',
                repair='on="host"',
            )
        if not is_on_gpu or self.on == "host" or (self.on == "auto" and (is_spread() or size <= HEADER + INLINE)):
            return torch.device("cpu")
        return next(iter(devices))

    # writing

    def _write(
        self,
        contribution: Contribution,
        ticket: Ticket,
        prepared: _Prepared,
        memories: Sequence[Tensor],
        began: float,
    ) -> Staged:
        size = packing(prepared.layout, ticket.written).size
        device = self._device(memories, size)
        table = self._table(prepared, memories, device, ticket.written)
        stamp = secrets.randbits(63) | 1
        segment: Segment | DeviceSegment | None = None
        if device.type == "cpu" and size - HEADER <= INLINE:
            memory = torch.empty(size, dtype=torch.uint8)
        elif device.type == "cpu":
            segment = self._segment(contribution.key, size, ticket.reuse)
            memory = segment.flat()
        else:
            segment = self._device_segment(contribution.key, size, device, ticket.reuse)
            memory = segment.memory
        if segment is not None:
            segment.set_stamp(0)
        digests = _copy(table, prepared.layout, memories, memory)
        samples = b""
        if memory.is_cpu:
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
        spare, self._spare = self._spare, None
        if spare is not None and size <= spare.size <= 2 * size:
            return spare
        if spare is not None:
            self.client.segments.drop(spare.name)
        return self.client.segments.create(key, size)

    def _device_segment(self, key: str, size: int, device: torch.device, reuse: str | None) -> DeviceSegment:
        known = self.client.device_segments.get(reuse) if reuse is not None else None
        if known is not None and known.size >= size and known.device == device.index:
            return known
        made = DeviceSegment(run_id(), key, size, device=device.index)
        self.client.device_segments[made.name] = made
        return made

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
            self.client.drop(staged.segment.name)

    def _holders(self, staged: Staged) -> tuple[Holder, ...]:
        """Who gives out the part: this process, or the storage volumes that it is handed to."""
        segment = staged.segment
        if segment is None:
            return ()
        if isinstance(segment, DeviceSegment):
            return self.client.carrier.hold_device(segment)
        holders = self.client.carrier.hold(segment, staged.record, staged.ticket.volumes)
        if not any(holder.segment == segment.name for holder in holders):  # handed over whole: free for the next one
            self.recycle(segment)
        return holders

    def recycle(self, segment: Segment) -> None:
        """Keep a segment that only this process had for the next part."""
        if self._spare is not None:
            self.client.segments.drop(self._spare.name)
        self._spare = segment

    def close(self) -> None:
        """Let go of what was kept for the next part."""
        if self._spare is not None:
            self.client.segments.drop(self._spare.name)
            self._spare = None


def _fingerprint(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """Equal as long as a name stands for the same memory, looked at in the same way."""
    inner = getattr(tensor, "_local_tensor", tensor)
    return (name, inner.data_ptr(), inner.dtype, inner.shape, inner.stride(), id(getattr(tensor, "_spec", None)))


def _as_stored(have: Held, dtype: torch.dtype | None) -> Held:
    if dtype is None or not dtype_of(have.dtype).is_floating_point:
        return have
    return Held(have.shape, dtype_name(dtype), have.pieces)


def _build(layout: Layout, memories: Sequence[Tensor], packed: Packing, device: torch.device) -> _Table:
    rects, digested, on_device = (Rects(num_slots=len(packed.pieces)) for _ in range(3))
    others: list[Packed] = []
    for slot, entry in enumerate(packed.pieces):
        have, memory = layout.helds[entry.tensor], memories[entry.tensor]
        box, size = entry.piece.box, itemsize(have.dtype)
        image_strides = row_major(have.shape, size)
        image = (slot, byte_offset(box.offset, image_strides), image_strides)
        target = (0, entry.start, row_major(box.shape, size))
        is_same = memory.dtype == dtype_of(have.dtype)
        is_fused = memory.dtype == torch.float32 and have.dtype == "bfloat16"
        strides = tuple(stride * memory.element_size() for stride in memory.stride())
        source = (entry.tensor, byte_offset(entry.piece.at, strides), strides)
        if memory.is_cpu and device.type == "cpu" and (is_same or is_fused):
            rects.add(box.shape, itemsize=size, src=source, dst=target, image=image, cast=is_fused)
        elif memory.device == device and is_same and are_words(box.shape, itemsize=size, walks=(source, target, image)):
            on_device.add(box.shape, itemsize=size, src=source, dst=target, image=image)
        else:
            others.append(entry)
            digested.add(box.shape, itemsize=size, src=target, image=image)
    places = Places.of(
        [entry.start for entry in packed.pieces],
        numels=[entry.piece.box.numel for entry in packed.pieces],
        itemsizes=[itemsize(layout.helds[entry.tensor].dtype) for entry in packed.pieces],
    )
    blocks = build_on_device(on_device, device) if len(on_device) else None
    return _Table(packed, rects, others, digested, places, blocks)


def _copy(table: _Table, layout: Layout, memories: Sequence[Tensor], memory: Tensor) -> list[int]:
    """Write all pieces; the digest of each."""
    threads = torch.get_num_threads()
    base = [memory.data_ptr()]
    sources = [tensor.data_ptr() for tensor in memories]
    digests = list(kernel.run(table.rects, sources, base, digest=True, num_threads=threads))
    if table.on_device is not None:
        digests = added(digests, run_on_device(table.on_device, sources, base))
    if not table.others:
        return digests
    for entry in table.others:
        view = piece_view(memory, entry.start, entry.piece.box.shape, layout.helds[entry.tensor].dtype)
        view.copy_(part_of(memories[entry.tensor], entry.piece.at, entry.piece.box.shape), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if memory.is_cpu:
        return added(digests, kernel.digest_only(table.digested, base, num_threads=threads))
    slots = {entry.number: slot for slot, entry in enumerate(table.packing.pieces)}
    for entry in table.others:
        have, box = layout.helds[entry.tensor], entry.piece.box
        view = piece_view(memory, entry.start, box.shape, have.dtype)
        digests[slots[entry.number]] += digest_tensor(view, box, have.shape)
    return [digest % MODULUS for digest in digests]
