"""Writing a rank's part of a version: into a segment, in one pass over the weights, with the proof made on the way."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from forge.errors import StoreError
from forge.runtime.rendezvous import run_id
from forge.store import kernel
from forge.store.carrying import is_spread
from forge.store.client import StoreClient
from forge.store.copy_table import PieceLocations
from forge.store.joining import Contribution, Joiner
from forge.store.proof import pack_digests, sample_seed
from forge.store.records import HEADER, Assignment, Commit, Holder, Layout, Part, SegmentRecord, packing
from forge.store.segments import Segment
from forge.store.snapshot import Memories, Prepared, Table, as_stored, build, copy
from forge.store.tensors import Fingerprint, fingerprint_of, keepalive, shards_of
from forge.store.transports.cuda import DeviceSegment, to_host

_log = logging.getLogger("forge.store")
INLINE = 64 << 10
"""Values smaller than this are kept by the registry itself: a segment each would cost more than it holds."""


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


@dataclass(eq=False)
class Staged:
    """A part of which the snapshot was taken, and which is not yet committed."""

    contribution: Contribution
    assignment: Assignment
    layout: Layout
    record: SegmentRecord
    began: float
    locations: PieceLocations
    segment: Segment | DeviceSegment | None = None
    on_gpu: Tensor | None = None
    """The snapshot, where it still has to go from the GPU to the host."""
    inline: Tensor | None = None
    """The snapshot itself, where it is small."""
    digests: list[int] = field(default_factory=list)
    samples: bytes = b""

    @property
    def is_soon_done(self) -> bool:
        """Whether nothing remains but to tell the registry: no copy, no volume, and nobody else to wait for."""
        return self.on_gpu is None and not self.assignment.volumes and self.contribution.world_size == 1


def check_dtype(path: str, dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise StoreError(
            "tensors are converted to a floating-point dtype",
            path=path,
            value=dtype,
            rule="a floating-point torch.dtype or None",
            repair="dtype=torch.bfloat16",
        )


class Writer:
    """Publishes for one key of one process. Looking at a state dict costs more than copying small tensors: what was
    found is kept for as long as the same tensors come."""

    def __init__(self, client: StoreClient, *, on: str = "auto") -> None:
        self.client, self.on = client, on
        self.snapshots = ThreadPoolExecutor(1, thread_name_prefix="forge-snapshot")
        self.commits = ThreadPoolExecutor(1, thread_name_prefix="forge-commit")
        self._spare: Segment | None = None
        self._staging: Tensor | None = None
        self._staging_is_free = threading.Semaphore(1)
        self._prepared: tuple[tuple[Any, ...], Prepared] | None = None
        self._guard = threading.Lock()
        self._joiner = Joiner(client)

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
        early = self._joiner.begin_early(contribution)
        try:
            with self._guard:
                prepared, fingerprints = self._look_at(tensors, dtype)
        except BaseException:
            if early is not None:
                self._joiner.give_back(early)
            raise
        if early is not None and not self._joiner.fits(prepared.layout):
            self._joiner.give_back(early)  # these are other tensors than last time
            early = None
        assignment = self._joiner.begin(contribution, prepared.layout, early)
        try:
            for event in ready:
                event.synchronize()
            return self._write(contribution, assignment, prepared, Memories(tensors, fingerprints), began)
        except BaseException as error:
            why = f"rank {contribution.rank} could not write its part of {contribution.key!r}: {error}"
            self.client.line.notify("give_up", (assignment.id, why))
            raise

    def withdraw(self) -> None:
        """Wait for other ranks no longer, now and later: what is not begun is given up, what is goes on."""
        self._joiner.withdraw()

    # looking

    def _look_at(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[Prepared, list[Fingerprint]]:
        fingerprints = [fingerprint_of(tensor) for tensor in tensors.values()]
        seen = (dtype, tuple(tensors), fingerprints)
        if self._prepared is not None and self._prepared[0] == seen:
            return self._prepared[1], fingerprints
        layout = Layout.of(
            tuple(tensors), tuple(as_stored(shards_of(t, name=name), dtype) for name, t in tensors.items())
        )
        devices = {tensor.device for tensor in tensors.values()}
        prepared = Prepared(layout, devices, [keepalive(tensor) for tensor in tensors.values()])
        self._prepared = (seen, prepared)
        return prepared, fingerprints

    def _table(
        self, prepared: Prepared, memories: Memories, device: torch.device, written: tuple[int, ...] | None
    ) -> Table:
        table = prepared.tables.get((device, written))
        if table is None:
            packed = packing(prepared.layout, written)
            table = prepared.tables[device, written] = build(prepared.layout, memories.tensors, packed, device)
        return table

    def _gpu(self, devices: set[torch.device], size: int, *, has_volumes: bool) -> tuple[torch.device | None, bool]:
        """The GPU on which the snapshot is taken, if it is on one; and whether it is kept there until it is fetched."""
        gpu = next(iter(devices)) if len(devices) == 1 and next(iter(devices)).type == "cuda" else None
        if self.on == "cuda" and gpu is None:
            raise StoreError(
                "weights that are kept on a GPU must be on one GPU",
                path="Weights(on=)",
                value=sorted(str(device) for device in devices),
                rule='with on="cuda" every tensor that a rank publishes is on the same GPU',
                repair='on="host"',
            )
        if self.on == "cuda" and has_volumes:
            raise StoreError(
                "storage volumes hold data in the memory of hosts",
                path="Weights(on=)",
                value=self.on,
                rule="with volumes, weights go to the host",
                repair='on="host" or on="auto", or start no volumes',
            )
        if gpu is None or (self.on != "cuda" and size - HEADER <= INLINE):
            return None, False
        return gpu, self.on == "cuda" or (self.on == "auto" and not is_spread() and not has_volumes)

    # writing

    def _write(
        self,
        contribution: Contribution,
        assignment: Assignment,
        prepared: Prepared,
        memories: Memories,
        began: float,
    ) -> Staged:
        size = packing(prepared.layout, assignment.written).size
        gpu, is_kept_there = self._gpu(prepared.devices, size, has_volumes=bool(assignment.volumes))
        staging = self._take_staging(size, gpu) if gpu is not None and not is_kept_there else None
        if staging is None and not is_kept_there:
            gpu = None
        record = SegmentRecord(size, secrets.randbits(63) | 1)
        table = self._table(prepared, memories, gpu or torch.device("cpu"), assignment.written)
        staged = Staged(contribution, assignment, prepared.layout, record, began, table.locations, on_gpu=staging)
        if staging is not None:
            memory = staging
        elif gpu is not None:
            segment = self._device_segment(contribution.key, size, gpu, assignment.reuse)
            memory, staged.segment = segment.memory, segment
        elif size - HEADER <= INLINE:
            memory = staged.inline = torch.empty(size, dtype=torch.uint8)
        else:
            host = self._segment(contribution.key, size, assignment.reuse)
            memory, staged.segment = host.flat(), host
        try:
            if staged.segment is not None:
                staged.segment.set_stamp(0)
            staged.digests = copy(table, prepared.layout, memories, memory)
        except BaseException:
            self._let_go(staged)
            raise
        return staged

    def _take_staging(self, size: int, gpu: torch.device) -> Tensor | None:
        """Device memory for a snapshot that goes on to the host in the background. There is one: the next snapshot
        waits until this one has gone. None if the GPU has no room: the snapshot then goes to the host at once."""
        self._staging_is_free.acquire()
        try:
            if self._staging is None or self._staging.numel() < size or self._staging.device != gpu:
                self._staging = None
                self._staging = torch.empty(size, dtype=torch.uint8, device=gpu)
        except torch.OutOfMemoryError:
            self._staging_is_free.release()
            _log.warning(
                "GPU %s has no room to stage %.2f GiB: the snapshot takes as long as the way to the host does",
                gpu,
                size / 2**30,
            )
            return None
        except BaseException:
            self._staging_is_free.release()
            raise
        return self._staging

    def _finish(self, staged: Staged) -> None:
        """What remains of a snapshot: its way from the GPU to the host, its samples, its stamp."""
        size = staged.record.size
        if staged.on_gpu is not None:
            segment = self._segment(staged.contribution.key, size, staged.assignment.reuse)
            staged.segment = segment
            segment.set_stamp(0)
            to_host(staged.on_gpu[HEADER:size], segment, HEADER)
            staged.on_gpu = None
            self._staging_is_free.release()
        memory = staged.inline
        if isinstance(staged.segment, Segment):
            memory = staged.segment.flat()
        if memory is not None:
            seed = sample_seed(staged.contribution.key, staged.assignment.version)
            staged.samples = kernel.sample(memory.data_ptr(), staged.locations, seed=seed)
        if staged.segment is not None:
            staged.segment.set_stamp(staged.record.stamp)

    def _let_go(self, staged: Staged) -> None:
        """Give back what a part that came to nothing had taken."""
        if staged.on_gpu is not None:
            staged.on_gpu = None
            self._staging_is_free.release()
        is_kept = staged.segment is self._spare  # it was handed over whole, and is free for the next part
        if staged.segment is not None and not is_kept and staged.segment.name != staged.assignment.reuse:
            self.client.drop(staged.segment.name)

    def _segment(self, key: str, size: int, reuse: str | None) -> Segment:
        if reuse is not None:
            segment = self.client.segments.get(reuse)
            if segment is not None and segment.size >= size:
                return segment
        with self._guard:
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
        contribution, assignment = staged.contribution, staged.assignment
        try:
            self._finish(staged)
            inline = None if staged.inline is None else staged.inline.numpy().tobytes()
            record = replace(staged.record, holders=self._holders(staged), inline=inline)
            digests = pack_digests(staged.digests)
            part = Part(contribution.rank, staged.layout.id, assignment.written, record, digests, staged.samples)
            key = (contribution.kind, contribution.key)
            commit = Commit(assignment.id, part, contribution.extra)
            version, digest = self.client.line.call("commit", (key, commit))
        except BaseException as error:
            self._give_up(staged, error)
            raise
        took_s = time.perf_counter() - staged.began
        return Published(version, digest, staged.record.size, snapshot_s, took_s)

    def _give_up(self, staged: Staged, error: BaseException) -> None:
        if self.client.line.is_open:
            self.client.line.notify(
                "give_up", (staged.assignment.id, f"rank {staged.contribution.rank} failed: {error}")
            )
        self._let_go(staged)

    def _holders(self, staged: Staged) -> tuple[Holder, ...]:
        """Who gives out the part: this process, or the storage volumes that it is handed to."""
        segment = staged.segment
        if segment is None:
            return ()
        if isinstance(segment, DeviceSegment):
            return self.client.carrier.hold_device(segment)
        holders = self.client.carrier.hold(segment, staged.record, staged.assignment)
        if not any(holder.segment == segment.name for holder in holders):  # handed over whole: free for the next one
            self.recycle(segment)
        return holders

    def recycle(self, segment: Segment) -> None:
        """Keep a segment that only this process had for the next part."""
        with self._guard:
            before, self._spare = self._spare, segment
        if before is not None:
            self.client.segments.drop(before.name)

    def close(self) -> None:
        """Let go of what was kept for the next part."""
        if self._spare is not None:
            self.client.segments.drop(self._spare.name)
            self._spare = None

    def __del__(self) -> None:
        if getattr(self, "_spare", None) is not None:
            self.close()
