"""Which rank writes what: every part of every tensor is stored once, however many ranks hold it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from forge.errors import StoreError
from forge.store.boxes import Box, Held
from forge.store.packing import itemsize
from forge.store.records import Layout

Copies = dict[Box, list[tuple[int, int]]]
"""For each box, who has it: rank, and the number of the piece in that rank's layout."""


def share_out(key: str, layouts: Sequence[Layout]) -> list[tuple[int, ...] | None]:
    """For each rank the numbers of the pieces that it is to write; None means all that it has.

    Where several ranks hold the same box, the one with the least to write so far gets it. Raises if the ranks disagree
    about a tensor, or if some part of one is held by nobody.
    """
    if len(layouts) == 1:
        for name, held in zip(layouts[0].names, layouts[0].helds, strict=True):
            check_whole(key, name, held, [piece.box for piece in held.pieces])
        return [None]
    tensors = _collect(key, layouts)
    load = [0] * len(layouts)
    chosen: list[list[int]] = [[] for _ in layouts]
    for name, (held, copies) in tensors.items():
        check_whole(key, name, held, list(copies))
        for box, holders in copies.items():
            rank, number = min(holders, key=lambda holder: load[holder[0]])
            load[rank] += box.numel * itemsize(held.dtype)
            chosen[rank].append(number)
    return [tuple(sorted(numbers)) for numbers in chosen]


def _collect(key: str, layouts: Sequence[Layout]) -> dict[str, tuple[Held, Copies]]:
    tensors: dict[str, tuple[Held, Copies]] = {}
    for rank, layout in enumerate(layouts):
        number = 0
        for name, held in zip(layout.names, layout.helds, strict=True):
            first, copies = tensors.setdefault(name, (held, {}))
            if (first.shape, first.dtype) != (held.shape, held.dtype):
                raise StoreError(
                    f"the ranks that publish {key!r} disagree about {name!r}",
                    path=f"{key}/{name}",
                    value=f"{list(held.shape)} {held.dtype} on rank {rank}",
                    rule=f"as on the first rank that has it: {list(first.shape)} {first.dtype}",
                    repair="publish the same model from every rank; shards of one tensor must be DTensors",
                )
            for piece in held.pieces:
                copies.setdefault(piece.box, []).append((rank, number))
                number += 1
    return tensors


def _overlaps(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """The pairs that share elements. Only boxes that meet along the dimension that tells them apart best are compared:
    there may be one for each of many ranks, and this runs on the controller's loop."""
    full = [box for box in boxes if 0 not in box.shape]
    if len(full) < 2:
        return
    dims = range(len(full[0].shape))
    dim = max(dims, key=lambda dim: len({box.offset[dim] for box in full}), default=None)
    reach: list[Box] = []
    for box in full if dim is None else sorted(full, key=lambda box: box.offset[dim]):
        if dim is not None:
            reach = [other for other in reach if other.offset[dim] + other.shape[dim] > box.offset[dim]]
        yield from ((other, box) for other in reach if other.intersect(box) is not None)
        reach.append(box)


def check_whole(key: str, name: str, held: Held, boxes: Sequence[Box]) -> None:
    """Raise unless the boxes cover the tensor, each element once."""
    total = math.prod(held.shape)
    covered = sum(box.numel for box in boxes)
    for one, other in _overlaps(boxes):
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
            value=[(box.offset, box.shape) for box in boxes],
            rule=f"together the ranks hold all of {list(held.shape)}",
            repair="publish from every rank of the device mesh, with world_size as large as the mesh",
        )
