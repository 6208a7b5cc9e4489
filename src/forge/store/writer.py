"""Writing a rank's part of a version: into a segment, in one pass over the weights, with the proof made on the way."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from forge.errors import StoreError
from forge.runtime.rendezvous import ConnectionFailure, run_id
from forge.store import kernel
from forge.store.client import StoreClient
from forge.store.copy_table import PieceLocations
from forge.store.data_plane import is_spread
from forge.store.proof import pack_digests, sample_seed
from forge.store.records import HEADER, Assignment, Begin, Commit, Holder, Layout, Part, SegmentRecord, packing
from forge.store.segments import Segment
from forge.store.snapshot import Prepared, Table, as_stored, build, copy
from forge.store.tensors import LocalTensors, shards_of
from forge.store.transports.cuda import DeviceSegment, to_host

_log = logging.getLogger("forge.store")
INLINE = 64 << 10
"""Values smaller than this are kept by the registry itself: a segment each would cost more than it holds."""


def ranks_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return which of how many publishing ranks this process is, unless the user has said so."""
    if rank is not None and world_size is not None:
        return rank, world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


_joiners: weakref.WeakSet[Joiner] = weakref.WeakSet()


def _withdraw_all() -> None:
    """Stop waiting for other ranks when the process ends: waiting would keep it from that."""
    for joiner in list(_joiners):
        joiner.withdraw()


# Python waits for threads before it calls what `atexit` has: this comes before both.
getattr(threading, "_register_atexit", atexit.register)(_withdraw_all)


class Joiner:
    """Asks the registry for assignments, for one key of one process. The layout is told once, as long as it stays."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._told: str | None = None
        self._token = ""
        self._joining: Future[Assignment] | None = None
        self._is_withdrawn = False
        self._is_joining = threading.Lock()
        _joiners.add(self)

    def fits(self, layout: Layout) -> bool:
        """Return whether this is the layout that the registry was told, which `begin_early` relies on."""
        return self._told == layout.id

    def begin_early(self, request: Begin) -> Future[Assignment] | None:
        """Request an assignment before the tensors are looked at, if they are likely those of last time. Never where
        other ranks take part, who would have to begin again if they are not."""
        if self._told is None or request.world_size > 1:
            return None
        return self._client.line.request("begin", replace(request, layout_id=self._told))

    def give_back(self, early: Future[Assignment]) -> None:
        assignment = early.result()
        if not assignment.needs_layout:
            self._client.line.call("give_up", (assignment.id, "the state dict has changed its layout"))

    def begin(self, request: Begin, layout: Layout, early: Future[Assignment] | None) -> Assignment:
        """Return this rank's assignment, once every rank has joined."""
        if early is not None:
            assignment = early.result()
            if not assignment.needs_layout:
                return assignment
        known = None if self._told == layout.id and early is None else layout
        self._token = secrets.token_hex(8)
        request = replace(request, layout_id=layout.id, layout=known, token=self._token)
        assignment = self._join(request)
        if assignment.needs_layout:
            assignment = self._join(replace(request, layout=layout))
        self._told = layout.id
        return assignment

    def _join(self, request: Begin) -> Assignment:
        """Join a version; waits until every rank has, or until this one withdraws."""
        try:
            with self._is_joining:
                if self._is_withdrawn:
                    raise CancelledError
                self._joining = self._client.line.request("begin", request)
            return self._joining.result()
        except CancelledError:
            raise StoreError(
                f"rank {request.rank} gave up before all ranks had begun to publish {request.key!r}",
                path=request.key,
                value=f"rank {request.rank} of {request.world_size}",
                rule=f"all {request.world_size} ranks publish",
                repair="publish again, from every rank",
            ) from None
        finally:
            self._joining = None

    def withdraw(self) -> None:
        """Stop waiting for other ranks: drop versions that have not begun, continue those that have."""
        with self._is_joining:
            self._is_withdrawn = True
            joining = self._joining
        if joining is not None and joining.cancel() and self._client.line.is_open:
            with contextlib.suppress(ConnectionFailure):  # it has just ended
                self._client.line.notify("withdraw", self._token)  # the answer may have been on its way


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

    request: Begin
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
        """Whether nothing remains but to tell the registry: no copy, no volume, and no other rank to wait for."""
        return self.on_gpu is None and not self.assignment.volumes and self.request.world_size == 1


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
        """Record what the devices are still to do, in the caller's thread; the snapshot comes after that."""
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        events = []
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return events

    def stage(
        self, request: Begin, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None, ready: Any = ()
    ) -> Staged:
        """Join the version and copy this rank's part of it. When this returns the tensors may change."""
        began = time.perf_counter()
        early = self._joiner.begin_early(request)
        try:
            with self._guard:
                prepared, memories = self._look_at(tensors, dtype)
        except BaseException:
            if early is not None:
                self._joiner.give_back(early)
            raise
        if early is not None and not self._joiner.fits(prepared.layout):
            self._joiner.give_back(early)  # these are other tensors than last time
            early = None
        assignment = self._joiner.begin(request, prepared.layout, early)
        try:
            for event in ready:
                event.synchronize()
            return self._write(request, assignment, prepared, memories, began)
        except BaseException as error:
            why = f"rank {request.rank} could not write its part of {request.key!r}: {error}"
            self.client.line.notify("give_up", (assignment.id, why))
            raise

    def withdraw(self) -> None:
        """Stop waiting for other ranks: drop versions that have not begun, continue those that have."""
        self._joiner.withdraw()

    # looking

    def _look_at(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[Prepared, LocalTensors]:
        memories = LocalTensors(list(tensors.items()))
        seen = (dtype, memories.key)
        if self._prepared is None or self._prepared[0] != seen:
            shards = tuple(as_stored(shards_of(tensor, name=name), dtype) for name, tensor in tensors.items())
            devices = {tensor.device for tensor in tensors.values()}
            self._prepared = (seen, Prepared(Layout.of(tuple(tensors), shards), devices, memories.kept))
        return self._prepared[1], memories

    def _table(
        self, prepared: Prepared, memories: LocalTensors, device: torch.device, written: tuple[int, ...] | None
    ) -> Table:
        table = prepared.tables.get((device, written))
        if table is None:
            packed = packing(prepared.layout, written)
            table = prepared.tables[device, written] = build(prepared.layout, memories.tensors, packed, device)
        return table

    def _gpu(self, devices: set[torch.device], size: int, *, has_volumes: bool) -> tuple[torch.device | None, bool]:
        """Return the GPU on which the snapshot is taken, if any, and whether it stays there until it is fetched."""
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
        request: Begin,
        assignment: Assignment,
        prepared: Prepared,
        memories: LocalTensors,
        began: float,
    ) -> Staged:
        size = packing(prepared.layout, assignment.written).size
        gpu, is_kept_there = self._gpu(prepared.devices, size, has_volumes=bool(assignment.volumes))
        staging = self._take_staging(size, gpu) if gpu is not None and not is_kept_there else None
        if staging is None and not is_kept_there:
            gpu = None
        record = SegmentRecord(size, secrets.randbits(63) | 1)
        table = self._table(prepared, memories, gpu or torch.device("cpu"), assignment.written)
        staged = Staged(request, assignment, prepared.layout, record, began, table.locations, on_gpu=staging)
        if staging is not None:
            memory = staging
        elif gpu is not None:
            segment = self._device_segment(request.key, size, gpu, assignment.reuse)
            memory, staged.segment = segment.memory, segment
        elif size - HEADER <= INLINE:
            memory = staged.inline = torch.empty(size, dtype=torch.uint8)
        else:
            host = self._segment(request.key, size, assignment.reuse)
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
        """Take the device memory for a snapshot that moves to the host in the background. The next snapshot
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
        """Finish a snapshot: move it from the GPU to the host, take its samples, set its stamp."""
        size = staged.record.size
        if staged.on_gpu is not None:
            segment = self._segment(staged.request.key, size, staged.assignment.reuse)
            staged.segment = segment
            segment.set_stamp(0)
            to_host(staged.on_gpu[HEADER:size], segment, HEADER)
            staged.on_gpu = None
            self._staging_is_free.release()
        memory = staged.inline
        if isinstance(staged.segment, Segment):
            memory = staged.segment.flat()
        if memory is not None:
            seed = sample_seed(staged.request.key, staged.assignment.version)
            staged.samples = kernel.sample(memory.data_ptr(), staged.locations, seed=seed)
        if staged.segment is not None:
            staged.segment.set_stamp(staged.record.stamp)

    def _let_go(self, staged: Staged) -> None:
        """Release what an abandoned part had taken."""
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

    def commit(self, staged: Staged, *, snapshot_s: float, extra: bytes = b"") -> Published:
        """Make the part readable, and wait until the version is complete."""
        request, assignment = staged.request, staged.assignment
        try:
            self._finish(staged)
            inline = None if staged.inline is None else staged.inline.numpy().tobytes()
            record = replace(staged.record, holders=self._holders(staged), inline=inline)
            digests = pack_digests(staged.digests)
            part = Part(request.rank, staged.layout.id, assignment.written, record, digests, staged.samples)
            key = (request.kind, request.key)
            commit = Commit(assignment.id, part, extra)
            version, digest = self.client.line.call("commit", (key, commit))
        except BaseException as error:
            self._give_up(staged, error)
            raise
        took_s = time.perf_counter() - staged.began
        return Published(version, digest, staged.record.size, snapshot_s, took_s)

    def _give_up(self, staged: Staged, error: BaseException) -> None:
        if self.client.line.is_open:
            self.client.line.notify("give_up", (staged.assignment.id, f"rank {staged.request.rank} failed: {error}"))
        self._let_go(staged)

    def _holders(self, staged: Staged) -> tuple[Holder, ...]:
        """Return who serves the part: this process, or the storage volumes that it is handed to."""
        segment = staged.segment
        if segment is None:
            return ()
        if isinstance(segment, DeviceSegment):
            return self.client.data_plane.hold_device(segment)
        holders = self.client.data_plane.hold(segment, staged.record, staged.assignment)
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
