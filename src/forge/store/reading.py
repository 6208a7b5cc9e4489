"""Reading a version: into the reader's memory, or as views of the shared memory itself."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forge.errors import StoreError, WeightMismatch
from forge.store import device_kernel, kernel
from forge.store.catalog import Catalog, CatalogKey, catalog, catalog_key
from forge.store.client import StoreClient
from forge.store.fetch_plan import FetchPlan, make_plan
from forge.store.layout import local
from forge.store.proof import MODULUS, added
from forge.store.records import Lease, Version
from forge.store.segments import when_unmapped
from forge.store.sources import Shadows, Source, open_source, pull
from forge.store.targets import At, Target, allocate, is_place, resolve, stored_name
from forge.store.verifying import (
    Verify,
    check_part,
    check_verify,
    compare_digests,
    compare_samples,
    digest_table,
    only,
    part_of_slot,
    raise_if_any,
)
from forge.store.writing import part_of, piece_view

__all__ = ["Fetched", "Reader", "Verify", "check_verify"]
_MAX_PLANS = 16


@dataclass(eq=False)
class Fetched:
    """A version that was fetched."""

    version: int
    digest: str
    """Of the whole version, however it was laid out: equal to what its publisher got."""
    verified: Verify
    num_bytes: int
    """That were copied; views cost none."""
    seconds: float
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By name, if no memory to fill was given. Where they are views, writing to them changes nobody else's."""
    _release: Callable[[], None] | None = None

    def release(self) -> None:
        """Let the version go now, rather than with the last of `tensors`. They must not be used afterwards."""
        self.tensors.clear()
        if self._release is not None:
            self._release()

    def copy_into(self, into: Mapping[str, Any], *, strict: bool = True, cast: bool = False) -> None:
        """Copy the fetched tensors into memory: between two steps of an engine, after a fetch that overlapped them."""
        shapes = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in self.tensors.items()}
        check_names(f"version {self.version}", shapes, into, strict=strict)
        for label, place in into.items():
            for target in resolve(label, place, shapes, cast=cast):
                whole = self.tensors[target.name]
                for piece in target.pieces:
                    rectangle = part_of(target.memory, piece.at, piece.box.shape)
                    rectangle.copy_(part_of(whole, piece.box.offset, piece.box.shape), non_blocking=True)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()


class Reader:
    """Reads for one key of one process. Plans are kept for as long as versions are laid out alike and the same memory
    is filled."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self._catalogs: OrderedDict[CatalogKey, Catalog] = OrderedDict()
        self._plans: OrderedDict[tuple[Any, ...], tuple[FetchPlan, Any]] = OrderedDict()
        self._shadows = Shadows()
        self._guard = threading.Lock()

    def catalog(self, lease: Lease) -> Catalog:
        key = catalog_key(lease.version.parts)
        with self._guard:
            known = self._catalogs.get(key)
            if known is None:
                known = self._catalogs[key] = catalog(lease)
                if len(self._catalogs) > _MAX_PLANS:
                    self._catalogs.popitem(last=False)
            return known

    # into memory

    def fill(self, lease: Lease, into: Mapping[str, Any], *, verify: Verify, strict: bool, cast: bool) -> Fetched:
        """Copy what the places in `into` want, check it, and let the version go."""
        began = time.perf_counter()
        version = lease.version
        try:
            known = self.catalog(lease)
            sources = [open_source(self.client, version, part) for part in version.parts]
            made = self._plan(lease, known, into, sources, strict=strict, cast=cast)
            self._execute(version, known, made, sources, _memories(into), verify=verify)
        finally:
            self.client.release(lease.id)
        return Fetched(version.number, version.digest, verify, made.num_bytes, time.perf_counter() - began)

    def fill_targets(self, lease: Lease, known: Catalog, targets: list[Target], *, verify: Verify) -> int:
        """Copy into memory that was allocated for this; the lease stays. How many bytes were copied."""
        sources = [open_source(self.client, lease.version, part) for part in lease.version.parts]
        made = make_plan(lease.version.key, known, targets, [source.where for source in sources])
        memories = [target.memory for target in targets]
        self._execute(lease.version, known, made, sources, memories, verify=verify)
        return made.num_bytes

    def _plan(
        self,
        lease: Lease,
        known: Catalog,
        into: Mapping[str, Any],
        sources: Sequence[Source],
        *,
        strict: bool,
        cast: bool,
    ) -> FetchPlan:
        where = tuple(source.where for source in sources)
        mark = (
            catalog_key(lease.version.parts),
            where,
            strict,
            cast,
            tuple(_fingerprint(label, place) for label, place in into.items()),
        )
        with self._guard:
            found = self._plans.get(mark)
        if found is not None:
            return found[0]
        check_names(f"version {lease.version.number} of {lease.version.key!r}", known.shapes, into, strict=strict)
        targets = [target for label, place in into.items() for target in resolve(label, place, known.shapes, cast=cast)]
        made = make_plan(lease.version.key, known, targets, where)
        with self._guard:
            self._plans[mark] = (made, [_kept(place) for place in into.values()])
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return made

    def _execute(
        self,
        version: Version,
        known: Catalog,
        made: FetchPlan,
        sources: Sequence[Source],
        memories: Sequence[Tensor],
        *,
        verify: Verify,
    ) -> None:
        shadows: dict[int, Tensor] = {}
        try:
            for source in sources:
                source.check_stamp(version)
            for index, pulls in made.pulls.items():
                shadow = shadows[index] = self._shadows.take(index, sources[index].part.segment.size)
                pull(self.client, sources[index], pulls, shadow=shadow, targets=memories)
            parts = [source.memory if source.memory is not None else shadows[i] for i, source in enumerate(sources)]
            self._copy(version, known, made, parts, memories, verify=verify)
            for source in sources:
                source.check_stamp(version)
            if verify == "full":
                self._verify_fully(version, known, made, sources, parts, memories)
        finally:
            for index, shadow in shadows.items():
                self._shadows.give_back(index, shadow)

    def _copy(
        self,
        version: Version,
        known: Catalog,
        made: FetchPlan,
        parts: Sequence[Tensor],
        memories: Sequence[Tensor],
        *,
        verify: Verify,
    ) -> None:
        threads = torch.get_num_threads()
        bases = [part.data_ptr() for part in parts]
        targets = [memory.data_ptr() for memory in memories]
        is_cheap = verify == "cheap"
        found = kernel.run(made.rects, bases, targets, digest=is_cheap, num_threads=threads)
        if len(made.device_rects):
            device = next(memory.device for memory in memories if memory.is_cuda)
            sums = run_on_device(made, "device_rects", device, bases, targets, copy=True, digest=is_cheap)
            found = added(found, sums)
        copy_with_torch(made, parts, memories)
        if not is_cheap:
            return
        if len(made.landed):
            more = kernel.digest_only(made.landed, targets, side="dst", num_threads=threads)
            found = added(found, more)
        by_torch = {entry.slot for entry in made.torch_copies}
        times = {slot: count for slot, count in made.whole.items() if slot not in by_torch}
        differ = compare_digests(known, version, found, times)
        sampled = [slot for slot in made.partial if version.parts[part_of_slot(known, slot)].samples]
        differ |= compare_samples(known, version, (made.rects, made.landed), targets, sampled)
        differ |= self._check_sources(version, known, made, parts, by_torch, verify="cheap")
        raise_if_any(version, differ, why="what is copied has the digest, or the sampled elements, that it was given")

    def _check_sources(
        self,
        version: Version,
        known: Catalog,
        made: FetchPlan,
        parts: Sequence[Tensor],
        slots: set[int],
        *,
        verify: Verify,
    ) -> set[str]:
        """Check where pieces came from, for those that cannot be compared where they went: converted, or on a GPU."""
        differ: set[str] = set()
        concerned = {entry.stored.part for entry in made.torch_copies if entry.slot in slots}
        for index in concerned:
            if parts[index].is_cpu and index not in made.pulls:
                wrong = check_part(known, version, index, address=parts[index].data_ptr(), verify=verify)
                differ |= wrong & {known.owner[slot] for slot in slots}
        return differ

    def _verify_fully(
        self,
        version: Version,
        known: Catalog,
        made: FetchPlan,
        sources: Sequence[Source],
        parts: Sequence[Tensor],
        memories: Sequence[Tensor],
    ) -> None:
        """Digest what is in the reader's memory now, and compare; of pieces read in part, check the source as well."""
        threads = torch.get_num_threads()
        targets = [memory.data_ptr() for memory in memories]
        found = [0] * known.num_slots
        for table in (made.rects, made.landed):
            if len(table):
                found = added(found, kernel.digest_only(table, targets, side="dst", num_threads=threads))
        if len(made.device_targets):
            device = next(memory.device for memory in memories if memory.is_cuda)
            found = added(found, run_on_device(made, "device_targets", device, targets, [], copy=False, digest=True))
        converted = digest_torch_copies(made, known, memories, found)
        times = {slot: count for slot, count in made.whole.items() if slot not in converted}
        differ = compare_digests(known, version, found, times)
        partial = set(made.partial) | converted
        for index, source in enumerate(sources):
            first = known.first_slot[index]
            mine = sorted(slot for slot in partial if first <= slot < first + len(source.part.digests) // 8)
            if mine:
                differ |= self._check_partial(version, known, made, source, (index, mine, parts[index]), found)
        raise_if_any(version, differ, why="what is in the reader's memory has the digest that was published")

    def _check_partial(
        self,
        version: Version,
        known: Catalog,
        made: FetchPlan,
        source: Source,
        what: tuple[int, list[int], Tensor],
        found: Sequence[int],
    ) -> set[str]:
        """Of pieces read in part: the source is what was published, and the reader has what the source has."""
        index, slots, memory = what
        table = digest_table(known, index, slots)
        if index in made.pulls:
            assert source.holder is not None
            sums = self.client.carrier.digests(source.holder, table)
        elif memory.is_cpu:
            sums = kernel.digest_only(table, [memory.data_ptr()], num_threads=torch.get_num_threads())
        else:
            return set()
        differ = compare_digests(known, version, sums, dict.fromkeys(slots, 1))
        if memory.is_cpu and len(made.rects):
            bases = [0] * max(made.rects.num_src, index + 1)
            bases[index] = memory.data_ptr()
            rows = only(made.rects, slots)
            same = kernel.digest_only(rows, bases) if len(rows) else [0] * known.num_slots
            landed = only(made.landed, slots)
            if not len(landed):
                differ |= {known.owner[slot] for slot in slots if len(rows) and same[slot] != found[slot]}
        return differ

    # as views

    def views(self, lease: Lease, *, verify: Verify, copy_below: int = 0) -> Fetched:
        """Every tensor of a version: as a view where it lies in mapped memory in one piece, else as a new tensor."""
        began = time.perf_counter()
        version = lease.version
        holding = _Holding(self.client, lease.id)
        try:
            known = self.catalog(lease)
            tensors, missing = self._mapped(version, known, holding, verify=verify, copy_below=copy_below)
            targets = []
            for name in missing:
                entry = known.entries[name]
                tensors[name], target = allocate(name, None, entry.shape, entry.dtype)
                targets.append(target)
            num_bytes = self.fill_targets(lease, known, targets, verify=verify) if targets else 0
        finally:
            holding.done()
        ordered = {name: tensors[name] for name in known.entries}
        took_s = time.perf_counter() - began
        return Fetched(version.number, version.digest, verify, num_bytes, took_s, ordered, holding.release)

    def _mapped(
        self, version: Version, known: Catalog, holding: _Holding, *, verify: Verify, copy_below: int
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Views of what can be viewed, and the names of what cannot."""
        tensors: dict[str, Tensor] = {}
        rest: list[str] = []
        opened: dict[int, Source] = {}
        differ: set[str] = set()
        for name, entry in known.entries.items():
            if len(entry.stored) != 1 or entry.stored[0].box.shape != entry.shape:
                rest.append(name)
                continue
            stored = entry.stored[0]
            if stored.part not in opened:
                source = opened[stored.part] = open_source(
                    self.client, version, version.parts[stored.part], is_private=True
                )
                source.check_stamp(version)
                if source.memory is not None and source.memory.is_cpu and verify != "off":
                    address = source.memory.data_ptr()
                    differ |= check_part(known, version, stored.part, address=address, verify=verify)
            memory = opened[stored.part].memory
            if memory is None or memory.numel() < copy_below:
                rest.append(name)
            else:
                tensors[name] = piece_view(memory, stored.start, entry.shape, entry.dtype)
        for source in opened.values():
            source.check_stamp(version)
            if source.segment is not None:
                holding.until_unmapped(source)
        raise_if_any(version, differ, why="the shared memory holds what was published")
        return tensors, rest


class _Holding:
    """A lease that ends when the last mapping that needs it is gone."""

    def __init__(self, client: StoreClient, lease: int) -> None:
        self._client, self._lease = client, lease
        self._count = 1
        self._guard = threading.RLock()  # a finalizer may interrupt the thread that holds it

    def until_unmapped(self, source: Source) -> None:
        assert source.segment is not None
        with self._guard:
            self._count += 1
        when_unmapped(source.segment, self.done)

    def done(self) -> None:
        with self._guard:
            self._count -= 1
            is_last = self._count == 0
        if is_last:
            self.release()

    def release(self) -> None:
        self._client.release_soon(self._lease)


def run_on_device(
    made: FetchPlan,
    name: str,
    device: torch.device,
    sources: Sequence[int],
    targets: Sequence[int],
    *,
    copy: bool,
    digest: bool,
) -> list[int]:
    """Run one of a plan's tables on the GPU; the table stays there for the next version."""
    table = made.device_tables.get(name)
    if table is None:
        table = made.device_tables[name] = device_kernel.build(getattr(made, name), device)
    return device_kernel.run(table, sources, targets, copy=copy, digest=digest)


def copy_with_torch(made: FetchPlan, parts: Sequence[Tensor], memories: Sequence[Tensor]) -> None:
    """Carry out the copies that convert or that involve a device, all of them under way at once."""
    sources, targets = [], []
    for entry in made.torch_copies:
        stored, copy = entry.stored, entry.copy
        box = piece_view(parts[stored.part], stored.start, stored.box.shape, entry.dtype)
        sources.append(part_of(box, copy.src_at, copy.shape))
        targets.append(part_of(memories[copy.target], copy.dst_at, copy.shape))
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
        if any(tensor.is_cuda for tensor in itertools.chain(sources, targets)):
            torch.cuda.synchronize()


def digest_torch_copies(made: FetchPlan, known: Catalog, memories: Sequence[Tensor], found: list[int]) -> set[int]:
    """Add the digests of what torch copied without converting; the slots of what it converted."""
    from forge.store.boxes import Box
    from forge.store.digest import digest_tensor
    from forge.store.layout import dtype_of

    converted: set[int] = set()
    for entry in made.torch_copies:
        memory = memories[entry.copy.target]
        if memory.dtype != dtype_of(entry.dtype):
            converted.add(entry.slot)
            continue
        rectangle = part_of(memory, entry.copy.dst_at, entry.copy.shape)
        at = tuple(a + b for a, b in zip(entry.stored.box.offset, entry.copy.src_at, strict=True))
        shape = known.entries[known.owner[entry.slot]].shape
        found[entry.slot] = (found[entry.slot] + digest_tensor(rectangle, Box(at, entry.copy.shape), shape)) % MODULUS
    return converted


def _memories(into: Mapping[str, Any]) -> list[Tensor]:
    """The memory of every place, in the order in which their targets are planned."""
    return [
        local(entry.tensor if isinstance(entry, At) else entry, name=label)
        for label, place in into.items()
        for entry in (place if isinstance(place, list) else [place])
    ]


def check_names(what: str, stored: Mapping[str, Any], into: Mapping[str, Any], *, strict: bool) -> None:
    """Raise `WeightMismatch` unless the names agree."""
    wanted: set[str] = set()
    for label, place in into.items():
        if not is_place(place):
            raise StoreError(
                f"{label!r} is no memory to fill",
                path=f"into[{label!r}]",
                value=type(place).__name__,
                rule="a tensor, a DTensor, an At, or a list of Ats",
                repair="give `model.state_dict()`, or a dict from names to tensors",
            )
        wanted |= {stored_name(label, entry) for entry in (place if isinstance(place, list) else [place])}
    unknown = sorted(wanted - set(stored))
    if unknown:
        raise WeightMismatch(
            f"{what} lacks {len(unknown)} tensor(s) that are wanted: {', '.join(unknown[:8])}",
            tensors=unknown,
            value=unknown[:8],
            rule=f"it has {len(stored)} tensors: {', '.join(list(stored)[:4])}, …",
            repair="publish them too, or leave them out of `into`",
        )
    left = sorted(set(stored) - wanted)
    if strict and left:
        raise WeightMismatch(
            f"{what} has tensors that nobody asked for: {', '.join(left[:8])}"
            + (" and others" if len(left) > 8 else ""),
            tensors=left,
            value=left[:8],
            rule="with strict=True everything that was published is fetched, so that nothing stays as it was",
            repair="give memory for them too, or say strict=False",
        )


def _fingerprint(label: str, place: Any) -> tuple[Any, ...]:
    """Equal as long as a label stands for the same memory, looked at in the same way."""
    if isinstance(place, list):
        return (label, *(_fingerprint("", entry) for entry in place))
    if isinstance(place, At):
        return (label, place.where, place.of, _fingerprint("", place.tensor))
    if not isinstance(place, Tensor):
        return (label, id(place))
    inner = getattr(place, "_local_tensor", place)
    return (label, inner.data_ptr(), inner.dtype, inner.shape, inner.stride(), id(getattr(place, "_spec", None)))


def _kept(place: Any) -> Any:
    """What must stay alive for a fingerprint to mean the same."""
    if isinstance(place, list):
        return [_kept(entry) for entry in place]
    return getattr(place.tensor if isinstance(place, At) else place, "_spec", None)
