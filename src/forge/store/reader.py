"""Reading a version: into the reader's memory, or as views of the shared memory itself."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forge.errors import StoreError, WeightMismatch
from forge.store.client import StoreClient
from forge.store.distribution import OpenedParts, read_version
from forge.store.execution import Execution, Shadows, target_tensors
from forge.store.fetch_plan import Catalog, CatalogKey, FetchPlan, catalog_key, make_plan, read_catalog
from forge.store.part_sources import open_source
from forge.store.records import Lease, Relay
from forge.store.targets import At, Target, allocate, check_at, is_place, resolve, stored_name
from forge.store.tensors import LocalTensors, part_of, piece_view
from forge.store.transports.cuda import alias
from forge.store.verification import (
    Verify,
    check_part,
    check_part_on_device,
    check_slots,
    check_verify,
    raise_if_any,
)

__all__ = ["Fetched", "Reader", "Verify", "check_verify"]
_MAX_PLANS = 4


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
    """By name, if no memory to fill was given. Where they are views, writing to them changes no other reader's data."""
    num_received: int = 0
    """Bytes that came from other hosts because of this fetch. Other readers on this host need not fetch them again."""
    relay: Relay | None = None
    """The process of this host through which it was read; None if it was read directly."""
    _release: Callable[[], None] | None = None

    def release(self) -> None:
        """Let the version go now, rather than with the last of `tensors`. They must not be used afterwards."""
        self.tensors.clear()
        if self._release is not None:
            self._release()

    def copy_into(self, into: Mapping[str, Any] | torch.nn.Module, *, strict: bool = True, cast: bool = False) -> None:
        """Copy the fetched tensors into memory: between two steps of an engine, after a fetch that overlapped them.
        What does not fit raises before anything is copied."""
        into = into.state_dict() if isinstance(into, torch.nn.Module) else into
        check_into(into)
        shapes = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in self.tensors.items()}
        check_names(f"version {self.version}", shapes, into, strict=strict)
        targets = [target for label, place in into.items() for target in resolve(label, place, shapes, cast=cast)]
        with torch.inference_mode():  # an engine's tensors may be made so, and can then be written only so
            for target in targets:
                whole = self.tensors[target.name]
                for piece in target.pieces:
                    rectangle = part_of(target.memory, piece.at, piece.region.shape)
                    rectangle.copy_(part_of(whole, piece.region.offset, piece.region.shape), non_blocking=True)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()


class Reader:
    """Reads for one key of one process. Plans are kept for as long as versions are laid out alike and the same memory
    is filled."""

    def __init__(self, client: StoreClient, *, is_shared: bool = False) -> None:
        """Make a reader. With `is_shared`, other readers of this host are likely to want the same."""
        self.client, self._is_shared = client, is_shared
        self._catalogs: OrderedDict[CatalogKey, Catalog] = OrderedDict()
        self._plans: deque[tuple[tuple[Any, ...], FetchPlan, list[Any]]] = deque(maxlen=_MAX_PLANS)
        self._shadows = Shadows()
        self._guard = threading.Lock()

    def catalog(self, lease: Lease) -> Catalog:
        key = catalog_key(lease.version.parts)
        with self._guard:
            known = self._catalogs.get(key)
            if known is None:
                with _uncollected():
                    known = self._catalogs[key] = read_catalog(lease)
                if len(self._catalogs) > _MAX_PLANS:
                    self._catalogs.popitem(last=False)
            return known

    # into memory

    def fill(
        self,
        lease: Lease,
        into: Mapping[str, Any],
        *,
        verify: Verify,
        strict: bool,
        cast: bool,
        targets: LocalTensors | None = None,
    ) -> Fetched:
        """Copy what the places in `into` want, check it, and let the version go. `targets` are those of `into`, if
        it was verified before."""
        began = time.perf_counter()
        version = lease.version

        def attempt(parts: OpenedParts) -> Fetched:
            made = self._plan(parts, known, into, memories, strict=strict, cast=cast)
            self._execute(parts, known, made, memories, verify=verify)
            fetched = Fetched(version.number, version.digest, verify, made.num_bytes, time.perf_counter() - began)
            fetched.num_received, fetched.relay = parts.num_received, parts.relay
            return fetched

        try:
            check_into(into)
            memories = targets or target_tensors(into)
            known = self.catalog(lease)
            return read_version(self.client, lease, attempt, is_shared=self._is_shared)
        finally:
            self.client.release(lease.id)

    def fill_targets(self, lease: Lease, known: Catalog, targets: list[Target], *, verify: Verify) -> int:
        """Copy into memory that was allocated for this, and return how many bytes were copied. The lease stays."""
        return self._fill_targets(OpenedParts(self.client, lease), known, targets, verify=verify)

    def _fill_targets(self, parts: OpenedParts, known: Catalog, targets: list[Target], *, verify: Verify) -> int:
        made = make_plan(parts.version.key, known, targets, [source.where for source in parts.sources])
        memories = LocalTensors([(target.label, target.memory) for target in targets])
        self._execute(parts, known, made, memories, verify=verify)
        return made.num_bytes

    def _execute(
        self, parts: OpenedParts, known: Catalog, made: FetchPlan, targets: LocalTensors, *, verify: Verify
    ) -> None:
        parts.bring(made.needed)
        parts.num_received += made.num_pulled
        Execution(self.client, parts.version, known, made, parts.sources, targets).run(self._shadows, verify=verify)

    def _plan(
        self,
        parts: OpenedParts,
        known: Catalog,
        into: Mapping[str, Any],
        targets: LocalTensors,
        *,
        strict: bool,
        cast: bool,
    ) -> FetchPlan:
        version, where = parts.version, [source.where for source in parts.sources]
        seen = (catalog_key(version.parts), tuple(where), strict, cast, targets.key)
        with self._guard:
            for known_mark, made, _ in self._plans:
                if known_mark == seen:
                    return made
        check_names(f"version {version.number} of {version.key!r}", known.shapes, into, strict=strict)
        with _uncollected():
            wanted = [
                target for label, place in into.items() for target in resolve(label, place, known.shapes, cast=cast)
            ]
            made = make_plan(version.key, known, wanted, where)
        with self._guard:
            self._plans.appendleft((seen, made, targets.kept))
        return made

    # as views

    def views(self, lease: Lease, *, verify: Verify, copy_below: int = 0) -> Fetched:
        """Return every tensor of a version: as a view where it lies mapped in one piece, else as a new tensor."""
        began = time.perf_counter()
        holding = _Holding(self.client, lease.id)

        def attempt(parts: OpenedParts) -> Fetched:
            tensors, missing = self._mapped(parts, known, holding, verify=verify, copy_below=copy_below)
            targets = []
            for name in missing:
                entry = known.entries[name]
                tensors[name], target = allocate(name, None, entry.shape, entry.dtype)
                targets.append(target)
            num_bytes = self._fill_targets(parts, known, targets, verify=verify) if targets else 0
            ordered = {name: tensors[name] for name in known.entries}
            took_s = time.perf_counter() - began
            fetched = Fetched(parts.version.number, parts.version.digest, verify, num_bytes, took_s, ordered)
            fetched.num_received, fetched.relay = parts.num_received, parts.relay
            fetched._release = holding.release
            return fetched

        try:
            known = self.catalog(lease)
            return read_version(self.client, lease, attempt, is_shared=self._is_shared)
        finally:
            holding.done()

    def _mapped(
        self, parts: OpenedParts, known: Catalog, holding: _Holding, *, verify: Verify, copy_below: int
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Return views of what can be viewed, and the names of what cannot."""
        parts.bring(known.viewable_bytes)
        tensors: dict[str, Tensor] = {}
        opened: dict[int, Tensor | None] = {}
        differ: set[str] = set()
        for name, entry in known.viewable.items():
            stored = entry.stored[0]
            if stored.part not in opened:
                opened[stored.part] = self._memory_for_views(parts, stored.part, holding)
                memory = opened[stored.part]
                if memory is not None and verify != "off":
                    differ |= self._check_memory(parts, known, stored.part, memory, verify=verify)
            memory = opened[stored.part]
            if memory is not None and memory.numel() >= copy_below:
                tensors[name] = piece_view(memory, stored.start, entry.shape, entry.dtype)
        raise_if_any(parts.version, differ, why="the shared memory holds what was published")
        return tensors, [name for name in known.entries if name not in tensors]

    def _memory_for_views(self, parts: OpenedParts, index: int, holding: _Holding) -> Tensor | None:
        """Return the memory of a part, whose lease lasts as long as anything looks at it; None if it is not here."""
        version = parts.version
        if parts.sources[index].is_relayed:
            segment = parts.open_private(index)
            holding.until_gone(segment.map)
            return segment.flat()
        source = open_source(self.client, version, version.parts[index], is_private=True)
        source.check_stamp(version)
        if source.segment is not None:
            holding.until_gone(source.segment.map)
            return source.memory
        if source.memory is not None and source.memory.is_cuda:
            memory, owner = alias(source.memory)
            holding.until_gone(owner)
            return memory
        return source.memory

    def _check_memory(
        self, parts: OpenedParts, known: Catalog, index: int, memory: Tensor, *, verify: Verify
    ) -> set[str]:
        """Return the tensors of a part that are not in its memory as they were published."""
        version, source = parts.version, parts.sources[index]
        if memory.is_cuda:
            return check_part_on_device(known, version, index, memory)
        if version.parts[index].segment.inline is None:
            # through the mapping that lasts: its pages are there, and touching new ones would cost more than all else
            memory = memory if source.memory is None else source.memory
        if source.is_relayed:  # all of what came from another host is digested
            return check_slots(known, version, index, known.viewable_slots(index), address=memory.data_ptr())
        return check_part(known, version, index, address=memory.data_ptr(), verify=verify)


class _Holding:
    """A lease that ends when the last mapping that needs it is gone."""

    def __init__(self, client: StoreClient, lease: int) -> None:
        self._client, self._lease = client, lease
        self._count = 1
        self._guard = threading.RLock()  # a finalizer may interrupt the thread that holds it

    def until_gone(self, owner: object) -> None:
        """Keep the lease while this lives: the mapping, or what stands for device memory, behind a reader's tensors."""
        with self._guard:
            self._count += 1
        weakref.finalize(owner, self.done)

    def done(self) -> None:
        with self._guard:
            self._count -= 1
            is_last = self._count == 0
        if is_last:
            self.release()

    def release(self) -> None:
        self._client.release_soon(self._lease)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause garbage collection: plans are many small objects without cycles. Looking for cycles, again and again as
    they are made, would take half of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check_into(into: object) -> None:
    """Raise unless this is a dict of places; each `At` among them must say what it means."""
    if not isinstance(into, Mapping):
        raise StoreError(
            "there is no memory to fill",
            path="fetch(into)",
            value=type(into).__name__,
            rule="a dict from names to tensors, DTensors, Ats or lists of Ats",
            repair="fetch(model.state_dict())",
        )
    for label, place in into.items():
        for entry in place if isinstance(place, list) else [place]:
            if isinstance(entry, At):
                check_at(label, entry)


def check_names(what: str, stored: Mapping[str, Any], into: Mapping[str, Any], *, strict: bool) -> None:
    """Raise `WeightMismatch` unless the names agree."""
    wanted: set[str] = set()
    for label, place in into.items():
        if not is_place(place):
            raise StoreError(
                f"{label!r} is not memory that can be filled",
                path=f"into[{label!r}]",
                value=type(place).__name__,
                rule="a tensor, a DTensor, an At, or a list of Ats",
                repair="give `model.state_dict()`, or a dict from names to tensors",
            )
        wanted |= {stored_name(label, entry) for entry in (place if isinstance(place, list) else [place])}
    unknown = sorted(wanted - set(stored))
    if unknown:
        is_one = "" in stored or "" in unknown  # a value that is a tensor itself has no name
        raise WeightMismatch(
            f"{what} lacks {len(unknown)} tensor(s) that are wanted: {', '.join(map(repr, unknown[:8]))}",
            tensors=unknown,
            path="into",
            value=unknown[:8],
            rule=f"it is {_contents(stored)}",
            repair="give a tensor for a tensor, and a dict for a dict"
            if is_one
            else "publish them too, or leave them out of `into`",
        )
    left = sorted(set(stored) - wanted)
    if strict and left:
        raise WeightMismatch(
            f"{what} has tensors that `into` does not name: {', '.join(left[:8])}"
            + (" and others" if len(left) > 8 else ""),
            tensors=left,
            path="into",
            value=left[:8],
            rule="with strict=True everything that was published is fetched, so that no tensor keeps its old value",
            repair="give memory for them too, or say strict=False",
        )


def _contents(stored: Mapping[str, Any]) -> str:
    """Return what a version or value has, in words."""
    if "" in stored:
        return "one tensor, without a name"
    return f"{len(stored)} tensor(s): {', '.join(list(stored)[:4])}" + (", …" if len(stored) > 4 else "")
