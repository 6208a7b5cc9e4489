"""The state that the registry keeps, its errors, and the assignment of pieces to the ranks that write them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from forge.errors import StoreError, StoreKeyError
from forge.store.records import Begin, Holder, Layout, Part, Relay, Version, itemsize
from forge.store.sharding import Region, TensorShards

Key = tuple[str, str]
"""Kind and name."""
SPARES = 1
"""How many free segments a process keeps for the next version of a key."""


class RegistryListener(Protocol):
    """Carries the registry's decisions to the processes that they concern."""

    def changed(self, key: Key) -> None:
        """Wake those who wait for something to happen to this key."""

    def drop(self, session: int, segment: str) -> None:
        """Tell a process that it need not keep the segment any longer."""


@dataclass(eq=False)
class PendingVersion:
    """A version that is being written."""

    key: Key
    number: int
    world_size: int
    keep: int
    group: str = ""
    writers: dict[int, RankWriter] = field(default_factory=dict)
    assigned: list[tuple[int, ...] | None] | None = None
    parts: dict[int, Part] = field(default_factory=dict)
    extra: bytes = b""
    failure: StoreError | None = None
    version: Version | None = None
    """Once it is complete."""


@dataclass(eq=False)
class RankWriter:
    """One rank of a version that is being written."""

    assignment: int
    session: int
    rank: int
    layout: str
    pending: PendingVersion
    token: str = ""
    reuse: SpareSegment | None = None
    volumes: tuple[Holder, ...] = ()
    has_pieces: bool = False


@dataclass(frozen=True, slots=True)
class SpareSegment:
    """A segment that can be written again, and the sessions that may have mapped it."""

    name: str
    size: int
    openers: frozenset[int]


@dataclass(frozen=True, slots=True)
class RelayMemory:
    """Memory of a relay, and the sessions that may have mapped it."""

    relay: Relay
    openers: set[int]


@dataclass(eq=False)
class VersionRelays:
    """The relays of a version: the processes through which readers on other hosts get it."""

    order: list[Relay] = field(default_factory=list)
    """In the order in which they began."""
    openers: dict[int, set[int]] = field(default_factory=dict)
    """For the memory of each, the sessions that may have mapped it."""
    failed: set[int] = field(default_factory=set)
    """Sessions that are not to relay it any more: they have ended, or readers could not get it through them."""
    leases: set[int] = field(default_factory=set)
    """Leases of the readers that use them."""


@dataclass(eq=False)
class StoredVersion:
    """A complete version."""

    version: Version
    owners: dict[int, int]
    """The session that wrote each rank's part."""
    leases: set[int] = field(default_factory=set)
    openers: set[int] = field(default_factory=set)
    """Sessions that may have mapped its segments."""
    is_retired: bool = False
    """Nobody new gets it; it goes with its last reader."""
    has_spare: bool = True
    """Whether its memory stays for the next version. With keep=1 it does not: that needs twice the memory for good."""
    losses: dict[int, str] = field(default_factory=dict)
    """For each rank whose part lost a copy, who held that."""
    pins: set[int] = field(default_factory=set)
    """Leases that keep it readable under its pinned name, whatever `keep` says."""
    original: int | None = None
    """The lease on the version whose memory this is, where pinning gave that memory a second name."""
    relays: VersionRelays = field(default_factory=VersionRelays)
    """The same for all names of one memory."""


def no_such_rank(request: Begin) -> StoreError:
    return StoreError(
        f"a rank that publishes {request.key!r} is not one of the ranks",
        path=f"{request.key}.publish()",
        value=f"rank {request.rank} of {request.world_size}",
        rule="0 <= rank < world_size",
        repair="set RANK and WORLD_SIZE, or say it: Weights(rank=, world_size=)",
    )


def too_late(request: Begin, number: int, newest: int) -> StoreError:
    return StoreError(
        f"version {number} of {request.key!r} is too old: version {newest} is already published",
        path=f"{request.key}.publish(version=)",
        value=number,
        rule=f"versions grow: more than {newest}",
        repair=f"publish version {newest + 1}, or go back first: `await weights.rewind(to={number - 1})`",
    )


def other_world_size(request: Begin, pending: PendingVersion) -> StoreError:
    return StoreError(
        f"the ranks that publish version {pending.number} of {request.key!r} disagree about how many they are",
        path=f"{request.key}.publish()",
        value=f"rank {request.rank} says world_size={request.world_size}",
        rule=f"the same as the first rank's: world_size={pending.world_size}",
        repair="give all ranks the same world_size",
    )


def rank_twice(request: Begin, pending: PendingVersion) -> StoreError:
    return StoreError(
        f"rank {request.rank} publishes version {pending.number} of {request.key!r} already",
        path=f"{request.key}.publish()",
        value=f"rank {request.rank} of {request.world_size}",
        rule="each rank publishes a version once",
        repair="await the first publication, use another version, or give each process its own rank=",
    )


def lost(key: Key, number: int, rank: int, *, held_by: str) -> StoreError:
    return StoreError(
        f"version {number} of {key[1]!r} is lost: the only copy of rank {rank}'s part was held by {held_by}, which has "
        "ended",
        path=key[1],
        value=number,
        rule="the data outlives its publisher on the controller's host, or on storage volumes",
        repair="publish again; to survive this, keep copies: `await ts.setup(volumes=2, copies=2)`",
    )


def not_found(
    key: Key, number: int | None, *, usable: Iterable[int], near: Iterable[str], under_way: Iterable[PendingVersion]
) -> StoreKeyError:
    """Return the error for a key or version that does not exist; the others say what does."""
    kind, name = key
    versions, names = sorted(usable), sorted(near)[:8]
    coming = [
        f"version {pending.number} has {len(pending.parts)} of {pending.world_size} rank(s), missing "
        f"{sorted(set(range(pending.world_size)) - set(pending.parts))}"
        for pending in under_way
    ]
    there = f"published versions: {versions}" if versions else f"{'weights' if kind == 'weights' else 'keys'}: {names}"
    if kind == "weights":
        repair = "publish it, or wait for it: `await weights.wait(at_least=...)`"
    else:
        repair = "put it first, or wait for it: `ts.get(key, wait_s=...)`"
    return StoreKeyError(
        f"the store has no {name if number is None else f'{name} version {number}'!r}",
        path=name,
        value=number if number is not None else "latest",
        rule=there + (f"; under way: {'; '.join(coming)}" if coming else ""),
        repair=repair,
    )


Copies = dict[Region, list[tuple[int, int]]]
"""For each region, who has it: rank, and the number of the piece in that rank's layout."""


@lru_cache(maxsize=64)
def assign_pieces(key: str, layouts: tuple[Layout, ...]) -> list[tuple[int, ...] | None]:
    """Return for each rank the numbers of the pieces that it is to write; None means all that it has.

    Where several ranks hold the same region, the one with the least to write so far gets it. Raises if the ranks
    disagree about a tensor, or if no rank holds some part of one.
    """
    if len(layouts) == 1:
        for name, shards in zip(layouts[0].names, layouts[0].shards, strict=True):
            check_whole(key, name, shards, [piece.region for piece in shards.pieces])
        return [None]
    tensors = _collect(key, layouts)
    load = [0] * len(layouts)
    chosen: list[list[int]] = [[] for _ in layouts]
    for name, (shards, copies) in tensors.items():
        check_whole(key, name, shards, list(copies))
        for region, holders in copies.items():
            rank, number = min(holders, key=lambda holder: load[holder[0]])
            load[rank] += region.numel * itemsize(shards.dtype)
            chosen[rank].append(number)
    return [tuple(sorted(numbers)) for numbers in chosen]


def _collect(key: str, layouts: Sequence[Layout]) -> dict[str, tuple[TensorShards, Copies]]:
    tensors: dict[str, tuple[TensorShards, Copies]] = {}
    for rank, layout in enumerate(layouts):
        number = 0
        for name, shards in zip(layout.names, layout.shards, strict=True):
            first, copies = tensors.setdefault(name, (shards, {}))
            if (first.shape, first.dtype) != (shards.shape, shards.dtype):
                raise StoreError(
                    f"the ranks that publish {key!r} disagree about {name!r}",
                    path=f"{key}/{name}",
                    value=f"{list(shards.shape)} {shards.dtype} on rank {rank}",
                    rule=f"as on the first rank that has it: {list(first.shape)} {first.dtype}",
                    repair="publish the same model from every rank; shards of one tensor must be DTensors",
                )
            for piece in shards.pieces:
                copies.setdefault(piece.region, []).append((rank, number))
                number += 1
    return tensors


def _overlaps(regions: Sequence[Region]) -> Iterator[tuple[Region, Region]]:
    """Yield the pairs that share elements. Only regions that meet along the dimension in which they differ most are
    compared: there may be one for each of many ranks, and this runs on the controller's loop."""
    full = [region for region in regions if 0 not in region.shape]
    if len(full) < 2:
        return
    dims = range(len(full[0].shape))
    dim = max(dims, key=lambda dim: len({region.offset[dim] for region in full}), default=None)
    reach: list[Region] = []
    for region in full if dim is None else sorted(full, key=lambda region: region.offset[dim]):
        if dim is not None:
            reach = [other for other in reach if other.offset[dim] + other.shape[dim] > region.offset[dim]]
        yield from ((other, region) for other in reach if other.intersect(region) is not None)
        reach.append(region)


def check_whole(key: str, name: str, shards: TensorShards, regions: Sequence[Region]) -> None:
    """Raise unless the regions cover the tensor, each element once."""
    total = math.prod(shards.shape)
    covered = sum(region.numel for region in regions)
    for one, other in _overlaps(regions):
        raise StoreError(
            f"parts of {name!r} overlap",
            path=f"{key}/{name}",
            value=f"{one} and {other}",
            rule="two ranks hold either the same part of a tensor or different ones",
            repair="publish from ranks of one device mesh",
        )
    if covered != total:
        raise StoreError(
            f"{name!r} is not whole: {covered} of {total} elements are held by the ranks that publish",
            path=f"{key}/{name}",
            value=[(region.offset, region.shape) for region in regions],
            rule=f"together the ranks hold all of {list(shards.shape)}",
            repair="publish from every rank of the device mesh, with world_size as large as the mesh",
        )
