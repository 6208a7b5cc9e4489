"""What the registry says when it cannot do what was asked."""

from __future__ import annotations

from collections.abc import Iterable

from forge.errors import StoreError, StoreKeyError
from forge.store.ledger import Building, Key
from forge.store.records import Begin


def no_such_rank(wish: Begin) -> StoreError:
    return StoreError(
        f"a rank that publishes {wish.key!r} is not one of the ranks",
        path=f"{wish.key}.publish()",
        value=f"rank {wish.rank} of {wish.world_size}",
        rule="0 <= rank < world_size",
        repair="set RANK and WORLD_SIZE, or say it: Weights(rank=, world_size=)",
    )


def too_late(wish: Begin, number: int, newest: int) -> StoreError:
    return StoreError(
        f"version {number} of {wish.key!r} comes too late: version {newest} is published",
        path=f"{wish.key}.publish(version=)",
        value=number,
        rule=f"versions grow: more than {newest}",
        repair=f"publish version {newest + 1}, or go back first: `await weights.rewind(to={number - 1})`",
    )


def other_world_size(wish: Begin, building: Building) -> StoreError:
    return StoreError(
        f"the ranks that publish version {building.number} of {wish.key!r} disagree about how many they are",
        path=f"{wish.key}.publish()",
        value=f"rank {wish.rank} says world_size={wish.world_size}",
        rule=f"as the first that came: world_size={building.world_size}",
        repair="give all ranks the same world_size",
    )


def rank_twice(wish: Begin, building: Building) -> StoreError:
    return StoreError(
        f"rank {wish.rank} publishes version {building.number} of {wish.key!r} already",
        path=f"{wish.key}.publish()",
        value=f"rank {wish.rank} of {wish.world_size}",
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


def nothing(
    key: Key, number: int | None, *, usable: Iterable[int], near: Iterable[str], under_way: Iterable[Building]
) -> StoreKeyError:
    """There is no such key or version; `usable` versions and `near` keys there are, and some are `under_way`."""
    kind, name = key
    versions, names = sorted(usable), sorted(near)[:8]
    coming = [
        f"version {building.number} has {len(building.parts)} of {building.world_size} rank(s), missing "
        f"{sorted(set(range(building.world_size)) - set(building.parts))}"
        for building in under_way
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
