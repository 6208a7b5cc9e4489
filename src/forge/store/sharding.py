"""Which regions of a tensor a rank holds: geometry, and the replay of a DTensor's placements.

Placements say how an index range is split, one mesh dimension after the other. Here that splitting is replayed on runs
of indices, per tensor dimension, and the runs that are left are multiplied out to regions. Nothing is read and no rank
is asked: every rank computes its own part, and a test can compute everybody's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from forge.errors import StoreError

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a tensor: where it begins, and how large it is."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Region) -> Region | None:
        """Return what both cover; None if that is nothing."""
        start: list[int] = []
        shape: list[int] = []
        for a, a_size, b, b_size in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            low = a if a > b else b
            high = min(a + a_size, b + b_size)
            if high <= low:
                return None
            start.append(low)
            shape.append(high - low)
        return Region(tuple(start), tuple(shape))

    def relative_to(self, other: Region) -> tuple[int, ...]:
        """Return where this region begins, counted from the beginning of the other."""
        return tuple(a - b for a, b in zip(self.offset, other.offset, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of the global tensor, and where it lies in the local tensor of the rank that holds it."""

    region: Region
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorShards:
    """What one rank holds of one tensor."""

    shape: tuple[int, ...]
    """The shape of the whole tensor, over all ranks."""
    dtype: str
    pieces: tuple[Piece, ...]
    """Empty where this rank holds nothing of it."""


Run = tuple[int, int]
"""(start, length) of consecutive indices."""
ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]
"""For each sharded tensor dimension, the mesh dimensions that split it, first one first."""


def pieces_at(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    *,
    order: ShardOrder | None = None,
) -> tuple[Piece, ...]:
    """Return what the rank at that coordinate of a mesh holds, as regions with their places in its local tensor.

    `order` is a DTensor's own order of splitting, where it has one. Without it, placements are read as torch's
    `full_tensor()` reads them: `_StridedShard`s whose factors are sizes of mesh dimensions further to the right mean
    "split after those" (as FSDP2 over tensor parallelism does); other placements split from left to right.
    """
    return _pieces(tuple(shape), tuple(placements), tuple(mesh_shape), tuple(coordinate), order)


@lru_cache(maxsize=65536)
def _pieces(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    order: ShardOrder | None,
) -> tuple[Piece, ...]:
    inside = len(placements) == len(mesh_shape) == len(coordinate) and all(
        0 <= at < size for at, size in zip(coordinate, mesh_shape, strict=True)
    )
    if not inside:
        raise StoreError(
            "A layout does not fit its mesh.",
            value=f"{len(placements)} placements, coordinate {coordinate}",
            rule=f"there is one placement and one coordinate for each dimension of the mesh {mesh_shape}",
            repair="Give as many placements as the mesh has dimensions.",
        )
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for mesh_dim, dim, factor in _splits(_factors(len(shape), placements), mesh_shape, order):
        runs[dim] = _split(runs[dim], factor, mesh_shape[mesh_dim], coordinate[mesh_dim])
    return tuple(_product(runs))


def _factors(ndim: int, placements: tuple[Placement, ...]) -> dict[int, tuple[int, int]]:
    """Return for each mesh dimension that splits the tensor dimension and the split factor (1 unless strided)."""
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

    factors: dict[int, tuple[int, int]] = {}
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, Partial):
            raise StoreError(
                "A DTensor with a Partial placement has no elements yet, only the terms of a sum.",
                value=f"{placement!r} on mesh dimension {mesh_dim} of {placements}",
                rule="every placement is Replicate or Shard",
                repair="Reduce it first: tensor.redistribute(placements=[...]) to Replicate() or Shard(dim).",
            )
        if not isinstance(placement, (Shard, _StridedShard)):
            raise StoreError(
                "A DTensor has a placement that the store does not know.",
                value=f"{placement!r} on mesh dimension {mesh_dim}",
                rule="every placement is Replicate or Shard",
                repair="Redistribute the tensor to Replicate() or Shard(dim) first.",
            )
        if not -ndim <= placement.dim < ndim:
            raise StoreError(
                "A DTensor is sharded along a dimension that it does not have.",
                value=f"{placement!r} on mesh dimension {mesh_dim}",
                rule=f"the tensor has {ndim} dimensions",
                repair="Shard it along one of its dimensions, or use Replicate().",
            )
        factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
        factors[mesh_dim] = (placement.dim % ndim, int(factor))
    return factors


def _splits(
    factors: dict[int, tuple[int, int]], mesh_shape: tuple[int, ...], order: ShardOrder | None
) -> list[tuple[int, int, int]]:
    """Return the splits to replay, in order: mesh dimension, tensor dimension, split factor."""
    if order is not None:
        sequence = [mesh_dim for _, mesh_dims in order for mesh_dim in mesh_dims]
        if sorted(sequence) != sorted(factors):
            raise StoreError(
                "An order of splitting does not fit the placements.",
                value=order,
                rule=f"it names each of the mesh dimensions {sorted(factors)} that split the tensor once",
                repair="Leave the order out, or take it from the DTensor itself.",
            )
        return [(mesh_dim, *factors[mesh_dim]) for mesh_dim in sequence]
    if any(factor != 1 for _, factor in factors.values()):
        decoded = _decoded(factors, mesh_shape)
        if decoded is not None:
            return [(mesh_dim, dim, 1) for dim, mesh_dims in decoded for mesh_dim in mesh_dims]
    return [(mesh_dim, *factors[mesh_dim]) for mesh_dim in sorted(factors)]


def _decoded(factors: dict[int, tuple[int, int]], mesh_shape: tuple[int, ...]) -> ShardOrder | None:
    """Return the order of plain splits that strided ones stand for; None if a factor stands for something else.

    A factor is the number of shards that were there before: the product of the sizes of those mesh dimensions that
    split earlier although they come later in the mesh. FSDP2's uneven shards come out right only when read this way.
    """
    order: dict[int, list[int]] = {}
    for mesh_dim in sorted(factors, reverse=True):
        dim, factor = factors[mesh_dim]
        earlier = order.setdefault(dim, [])
        before = list(itertools.accumulate((mesh_shape[other] for other in earlier), lambda a, b: a * b, initial=1))
        if factor not in before:
            return None
        earlier.insert(before.index(factor), mesh_dim)
    return tuple((dim, tuple(mesh_dims)) for dim, mesh_dims in sorted(order.items()))


def _split(runs: list[Run], factor: int, num_chunks: int, chunk: int) -> list[Run]:
    """Cut what the runs list into `factor` parts and each of these into chunks; keep one chunk of every part."""
    total = sum(length for _, length in runs)
    part_size = -(-total // factor)
    kept: list[Run] = []
    for part_start in range(0, total, max(part_size, 1)):
        part_end = min(part_start + part_size, total)
        size = -(-(part_end - part_start) // num_chunks)
        start = part_start + size * chunk
        kept.extend(_cut(runs, start, min(start + size, part_end)))
    return _joined(kept)


def _cut(runs: list[Run], start: int, end: int) -> Iterator[Run]:
    """Yield the part of the runs from position `start` to position `end`, both counted along the runs."""
    position = 0
    for first, length in runs:
        low, high = max(start, position), min(end, position + length)
        if low < high:
            yield first + low - position, high - low
        position += length


def _joined(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _product(runs: list[list[Run]]) -> Iterator[Piece]:
    """Yield every combination of one run per dimension, with its place in the local tensor."""
    placed: list[list[tuple[int, int, int]]] = []
    for along in runs:
        ends = itertools.accumulate((length for _, length in along), initial=0)
        placed.append([(start, length, at) for (start, length), at in zip(along, ends, strict=False) if length])
    for combination in itertools.product(*placed):
        offset, extent, at = zip(*combination, strict=True) if combination else ((), (), ())
        yield Piece(Region(offset, extent), at)
