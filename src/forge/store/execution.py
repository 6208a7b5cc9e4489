"""Carrying out a plan: bytes are pulled and copied, and what arrived is compared with what was published."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge.errors import StoreError
from forge.store import device_kernel, kernel
from forge.store.client import StoreClient
from forge.store.copy_table import SLOT, CopyTable
from forge.store.digest import digest_tensor
from forge.store.fetch_plan import Catalog, FetchPlan, Pull, published_digests
from forge.store.part_sources import Source, holders_in_order
from forge.store.proof import MODULUS, added
from forge.store.records import Version
from forge.store.sharding import Region
from forge.store.targets import At
from forge.store.tensors import LocalTensors, part_of, piece_view
from forge.store.transports import Range
from forge.store.transports.cuda import pin
from forge.store.verification import (
    Verify,
    check_part,
    compare_digests,
    compare_samples,
    digest_table,
    part_of_slot,
    raise_if_any,
)


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


def pull(client: StoreClient, source: Source, pulls: Sequence[Pull], *, shadow: Tensor, targets: LocalTensors) -> None:
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
    for holder in holders_in_order(client, source.part.segment.holders):
        if holder.transport not in ("rdma", "tcp"):
            continue
        try:
            client.data_plane.read(holder, ranges)
            source.holder = holder
            return
        except (OSError, StoreError) as error:
            failures.append(f"{holder.describe()} by {holder.transport}: {error}")
    raise StoreError(
        f"rank {source.part.rank}'s part could not be read: " + "; ".join(failures),
        value=failures,
        rule="a process that holds it answers",
        repair="fetch a newer version, or keep copies: `await ts.setup(volumes=2, copies=2)`",
    )


def memory_view(address: int, num_bytes: int) -> memoryview:
    """Return writable bytes at an address; the owner of the memory must keep it."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def span(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((reach + 1) * tensor.element_size())


PIN_FROM = 1 << 20
"""Segments from this size on are pinned when they are copied to a GPU."""


def target_tensors(into: Mapping[str, Any]) -> LocalTensors:
    """Return the memory that a reader gave, in the order in which it is planned."""
    named: list[tuple[str, Tensor]] = []
    parts: list[object] = []
    for label, place in into.items():
        for entry in place if isinstance(place, list) else (place,):
            tensor, part = (entry.tensor, (entry.where, entry.of)) if isinstance(entry, At) else (entry, None)
            named.append((label, tensor))
            parts.append(part)
    return LocalTensors(named, parts)


@dataclass(eq=False)
class Execution:
    """One run of a plan."""

    client: StoreClient
    version: Version
    known: Catalog
    plan: FetchPlan
    sources: Sequence[Source]
    targets: LocalTensors

    def run(self, shadows: Shadows, *, verify: Verify) -> None:
        """Copy everything, and check it. Raises `WeightMismatch` if it is not what was published."""
        for source in self.sources:
            if source.segment is not None:  # on a GPU this costs a wait, and the second look sees what the first does
                source.check_stamp(self.version)
        taken: dict[int, Tensor] = {}
        try:
            for index, pulls in self.plan.pulls.items():
                shadow = taken[index] = shadows.take(index, self.sources[index].part.segment.size)
                pull(self.client, self.sources[index], pulls, shadow=shadow, targets=self.targets)
            self._parts = [
                taken[i] if source.memory is None else source.memory for i, source in enumerate(self.sources)
            ]
            found = self._copy(is_digested=verify == "cheap")
            for source in self.sources:
                source.check_stamp(self.version)
            if verify != "off":
                raise_if_any(self.version, self._untied(), why="tensors that share memory were published as equal")
            if verify == "cheap":
                self._check_cheaply(found)
            elif verify == "full":
                self._check_fully()
        finally:
            for index, shadow in taken.items():
                shadows.give_back(index, shadow)

    def _copy(self, *, is_digested: bool) -> list[int]:
        """Copy by all three means; return the digests of what the kernels copied."""
        bases, targets = [part.data_ptr() for part in self._parts], self.targets.addresses
        threads = torch.get_num_threads()
        found: list[int] = []
        if len(self.plan.rects) or not len(self.plan.on_device):
            found = kernel.run(self.plan.rects, bases, targets, digest=is_digested, num_threads=threads)
        if len(self.plan.on_device):
            found = added(found, self._on_gpu("on_device", bases, targets, copy=True, digest=is_digested))
        self._copy_with_torch()
        return found

    def _copy_with_torch(self) -> None:
        """Copy what converts, or moves between devices, all of it at once."""
        sources, targets = [], []
        for entry in self.plan.torch_copies:
            stored, copy = entry.stored, entry.copy
            region = piece_view(self._parts[stored.part], stored.start, stored.region.shape, entry.dtype)
            sources.append(part_of(region, copy.src_at, copy.shape))
            targets.append(part_of(self.targets.tensors[copy.target], copy.dst_at, copy.shape))
            source = self.sources[stored.part]
            segment = None if source.is_relayed else source.segment  # pinning would fill what did not come with pages
            if targets[-1].is_cuda and segment is not None and segment.size >= PIN_FROM:
                pin(segment)
        if targets:
            with torch.inference_mode():  # an engine's tensors may be made so, and can then be written only so
                torch._foreach_copy_(targets, sources, non_blocking=True)
            if any(tensor.is_cuda for tensor in itertools.chain(sources, targets)):
                torch.cuda.synchronize()

    def _on_gpu(
        self, name: str, sources: Sequence[int], targets: Sequence[int], *, copy: bool, digest: bool = True
    ) -> list[int]:
        """Run one of the plan's tables on the GPU, where it stays for the next version."""
        table = self.plan.device_tables.get(name)
        if table is None:
            rects = self.plan.on_device.reversed() if name == "targets" else getattr(self.plan, name)
            gpu = next(tensor.device for _, tensor in self.targets.named if tensor.is_cuda)
            table = self.plan.device_tables[name] = device_kernel.build(rects, gpu)
        return device_kernel.run(table, sources, targets, copy=copy, digest=digest)

    def _landed(self) -> list[int]:
        """Return the digests of what came into the targets by other means than the kernels."""
        found: list[int] = []
        if len(self.plan.landed):
            threads = torch.get_num_threads()
            found = kernel.digest_only(self.plan.landed, self.targets.addresses, side="dst", num_threads=threads)
        if len(self.plan.landed_on_device):
            found = added(found, self._on_gpu("landed_on_device", self.targets.addresses, [], copy=False))
        return found

    def _untied(self) -> set[str]:
        """Return tensors that went to the same memory as others, and were published with other values than those."""
        if not self.plan.tied:
            return set()
        published, entries = published_digests(self.version.parts), self.known.entries

        def digest(name: str) -> int:
            return sum(published[slot] for slot in entries[name].slots) % MODULUS

        pairs = ((one, other) for one, other in self.plan.tied if entries[one].dtype == entries[other].dtype)
        return {name for pair in pairs if digest(pair[0]) != digest(pair[1]) for name in pair}

    # cheap

    def _check_cheaply(self, found: Sequence[int]) -> None:
        landed = self._landed()
        found = added(found, landed) if landed else found
        unproven = {entry.slot for entry in self.plan.torch_copies if entry.proof != "table"}
        times = {slot: count for slot, count in self.plan.whole.items() if slot not in unproven}
        differ = compare_digests(self.known, self.version, found, times)
        partial = {row[SLOT] for table in self.plan.partial.values() for row in table.each()}
        tables = (self.plan.rects, self.plan.landed)
        differ |= compare_samples(self.known, self.version, tables, self.targets.addresses, partial)
        differ |= self._sampled_sources(unproven)
        raise_if_any(self.version, differ, why="what is copied has the digest, or the sampled elements, that it had")

    def _sampled_sources(self, slots: set[int]) -> set[str]:
        """Check samples at the source, for what was converted and cannot be compared in the targets."""
        differ: set[str] = set()
        for index in {entry.stored.part for entry in self.plan.torch_copies if entry.slot in slots}:
            memory = self._parts[index]
            if self.sources[index].is_remote:
                pulled = {slot for slot in slots & set(self.plan.whole) if part_of_slot(self.known, slot) == index}
                sums = kernel.digest_only(digest_table(self.known, index, pulled), [memory.data_ptr()])
                differ |= compare_digests(self.known, self.version, sums, dict.fromkeys(pulled, 1))
            elif memory.is_cpu:
                wrong = check_part(self.known, self.version, index, address=memory.data_ptr(), verify="cheap")
                differ |= wrong & {self.known.owner[slot] for slot in slots}
        return differ

    # full

    def _check_fully(self) -> None:
        """Digest what is in the targets now and compare it with what was published; where a piece was read in part,
        with the same part of its source, which is compared with what was published as a whole."""
        found = self._in_targets()
        converted = {entry.slot for entry in self.plan.torch_copies if entry.proof == "none"}
        times = {slot: count for slot, count in self.plan.whole.items() if slot not in converted}
        differ = compare_digests(self.known, self.version, found, times)
        for index in range(len(self.sources)):
            table = self.plan.partial.get(index)
            partial = {row[SLOT] for row in table.each()} if table is not None else set()
            concerned = (
                partial | {entry.slot for entry in self.plan.torch_copies if entry.stored.part == index} & converted
            )
            if not concerned:
                continue
            whole = self._at_source(index, digest_table(self.known, index, concerned))
            differ |= compare_digests(self.known, self.version, whole, dict.fromkeys(concerned, 1))
            if table is not None and partial - converted:
                same = self._at_source(index, table)
                differ |= {self.known.owner[slot] for slot in partial - converted if same[slot] != found[slot]}
            if self.sources[index].is_remote:
                differ |= self._pulled_right(index, concerned & converted)
        raise_if_any(self.version, differ, why="what is in the reader's memory has the digest that was published")

    def _pulled_right(self, index: int, slots: set[int]) -> set[str]:
        """Compare what came from another host, and was then converted, with what its holder has."""
        differ = self._sampled_sources(slots)
        table = self.plan.partial.get(index)
        if table is not None and slots - set(self.plan.whole):
            there, here = self._at_source(index, table), kernel.digest_only(table, [self._parts[index].data_ptr()])
            differ |= {self.known.owner[slot] for slot in slots if there[slot] != here[slot]}
        return differ

    def _in_targets(self) -> list[int]:
        """Return the digests of all that is in the targets, except what was converted."""
        threads = torch.get_num_threads()
        found = kernel.digest_only(self.plan.rects, self.targets.addresses, side="dst", num_threads=threads)
        landed = self._landed()
        found = added(found, landed) if landed else found
        if len(self.plan.on_device):
            found = added(found, self._on_gpu("targets", self.targets.addresses, [], copy=False))
        for entry in self.plan.torch_copies:
            if entry.proof == "tensor":
                rectangle = part_of(self.targets.tensors[entry.copy.target], entry.copy.dst_at, entry.copy.shape)
                at = tuple(a + b for a, b in zip(entry.stored.region.offset, entry.copy.src_at, strict=True))
                shape = self.known.entries[self.known.owner[entry.slot]].shape
                digest = digest_tensor(rectangle, Region(at, entry.copy.shape), shape)
                found[entry.slot] = (found[entry.slot] + digest) % MODULUS
        return found

    def _at_source(self, index: int, table: CopyTable) -> list[int]:
        """Return the digests of a part's rectangles where the part is held; the part is source 0 of the table."""
        source, memory = self.sources[index], self._parts[index]
        if source.is_remote:
            return self.client.data_plane.digests(source, table)
        if memory.is_cpu:
            return kernel.digest_only(table, [memory.data_ptr()], num_threads=torch.get_num_threads())
        if device_kernel.has_words(table):
            return device_kernel.run(device_kernel.build(table, memory.device), [memory.data_ptr()], [], copy=False)
        copied = memory.cpu()
        return kernel.digest_only(table, [copied.data_ptr()])
