"""Carrying out a plan: bytes are pulled and copied, and what arrived is compared with what was published."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from forge.store import device_kernel, kernel
from forge.store.boxes import Box
from forge.store.catalog import Catalog, published_digests
from forge.store.client import StoreClient
from forge.store.digest import digest_tensor
from forge.store.fetch_plan import FetchPlan
from forge.store.layout import local
from forge.store.marks import Mark, addresses, kept_for, mark_of
from forge.store.proof import MODULUS, added
from forge.store.records import Version
from forge.store.rects import SLOT, Rects
from forge.store.sources import Shadows, Source, pull
from forge.store.targets import At
from forge.store.transports.cuda import pin
from forge.store.verifying import (
    Verify,
    check_part,
    compare_digests,
    compare_samples,
    digest_table,
    part_of_slot,
    raise_if_any,
)
from forge.store.views import part_of, piece_view

PIN_FROM = 1 << 20
"""Segments from this size on are pinned when they are copied to a GPU."""


class Targets:
    """The memory that a reader gave: where it is, which is often known, and, if it is asked for, as plain tensors. In
    the order in which it was planned."""

    def __init__(self, into: Mapping[str, Any]) -> None:
        self._places: list[tuple[str, Tensor]] = []
        self.marks: list[Mark] = []
        """By which the same memory is recognised when it comes again."""
        for label, place in into.items():
            for entry in place if isinstance(place, list) else (place,):
                tensor, where = (entry.tensor, (entry.where, entry.of)) if isinstance(entry, At) else (entry, None)
                mark = mark_of(tensor) if isinstance(tensor, Tensor) else (None, object())
                self._places.append((label, tensor))
                self.marks.append((mark[0], label, where, mark[1:]))

    @property
    def kept(self) -> list[Any]:
        """What must stay alive for the marks to mean the same."""
        return [kept_for(tensor) for _, tensor in self._places]

    @cached_property
    def tensors(self) -> list[Tensor]:
        return [local(tensor, name=label) for label, tensor in self._places]

    @cached_property
    def addresses(self) -> list[int]:
        known = addresses(self.marks)
        return known if known is not None else [tensor.data_ptr() for tensor in self.tensors]

    @property
    def gpu(self) -> torch.device:
        """The GPU on which some of it is."""
        return next(tensor.device for _, tensor in self._places if tensor.is_cuda)


@dataclass(eq=False)
class Execution:
    """One run of a plan."""

    client: StoreClient
    version: Version
    known: Catalog
    plan: FetchPlan
    sources: Sequence[Source]
    targets: Targets

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
        """Copy by all three means; the digests of what the kernels copied."""
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
        """The copies that convert, or that move between devices, all of them under way at once."""
        sources, targets = [], []
        for entry in self.plan.torch_copies:
            stored, copy = entry.stored, entry.copy
            box = piece_view(self._parts[stored.part], stored.start, stored.box.shape, entry.dtype)
            sources.append(part_of(box, copy.src_at, copy.shape))
            targets.append(part_of(self.targets.tensors[copy.target], copy.dst_at, copy.shape))
            segment = self.sources[stored.part].segment
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
            device = self.targets.gpu
            rects: Rects = getattr(self.plan, name)
            table = self.plan.device_tables[name] = device_kernel.build(rects, device)
        return device_kernel.run(table, sources, targets, copy=copy, digest=digest)

    def _landed(self) -> list[int]:
        """Digests of what came into the targets by other means than the kernels."""
        found: list[int] = []
        if len(self.plan.landed):
            threads = torch.get_num_threads()
            found = kernel.digest_only(self.plan.landed, self.targets.addresses, side="dst", num_threads=threads)
        if len(self.plan.landed_on_device):
            found = added(found, self._on_gpu("landed_on_device", self.targets.addresses, [], copy=False))
        return found

    def _untied(self) -> set[str]:
        """Tensors that went to the same memory as others, and were published with other values than those."""
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
        """What cannot be compared where it went, since it was converted: samples of where it came from."""
        differ: set[str] = set()
        for index in {entry.stored.part for entry in self.plan.torch_copies if entry.slot in slots}:
            memory = self._parts[index]
            if index in self.plan.pulls:
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
            if index in self.plan.pulls:
                differ |= self._pulled_right(index, concerned & converted)
        raise_if_any(self.version, differ, why="what is in the reader's memory has the digest that was published")

    def _pulled_right(self, index: int, slots: set[int]) -> set[str]:
        """Of what was pulled and then converted: what lies in the shadow is what its holder has."""
        differ = self._sampled_sources(slots)
        table = self.plan.partial.get(index)
        if table is not None and slots - set(self.plan.whole):
            there, here = self._at_source(index, table), kernel.digest_only(table, [self._parts[index].data_ptr()])
            differ |= {self.known.owner[slot] for slot in slots if there[slot] != here[slot]}
        return differ

    def _in_targets(self) -> list[int]:
        """Digests of all that is in the targets, except what was converted."""
        threads = torch.get_num_threads()
        found = kernel.digest_only(self.plan.rects, self.targets.addresses, side="dst", num_threads=threads)
        landed = self._landed()
        found = added(found, landed) if landed else found
        if len(self.plan.on_device):
            found = added(found, self._on_device_targets())
        for entry in self.plan.torch_copies:
            if entry.proof == "tensor":
                rectangle = part_of(self.targets.tensors[entry.copy.target], entry.copy.dst_at, entry.copy.shape)
                at = tuple(a + b for a, b in zip(entry.stored.box.offset, entry.copy.src_at, strict=True))
                shape = self.known.entries[self.known.owner[entry.slot]].shape
                digest = digest_tensor(rectangle, Box(at, entry.copy.shape), shape)
                found[entry.slot] = (found[entry.slot] + digest) % MODULUS
        return found

    def _on_device_targets(self) -> list[int]:
        table = self.plan.device_tables.get("targets")
        if table is None:
            device = self.targets.gpu
            table = self.plan.device_tables["targets"] = device_kernel.build(self.plan.on_device.reversed(), device)
        return device_kernel.run(table, self.targets.addresses, [], copy=False)

    def _at_source(self, index: int, table: Rects) -> list[int]:
        """Digests of a part's rectangles where the part is held; the part is source 0 of the table."""
        source, memory = self.sources[index], self._parts[index]
        if index in self.plan.pulls:
            return self.client.carrier.digests(source, table)
        if memory.is_cpu:
            return kernel.digest_only(table, [memory.data_ptr()], num_threads=torch.get_num_threads())
        if device_kernel.has_words(table):
            return device_kernel.run(device_kernel.build(table, memory.device), [memory.data_ptr()], [], copy=False)
        copied = memory.cpu()
        return kernel.digest_only(table, [copied.data_ptr()])
