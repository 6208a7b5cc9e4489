"""What a reader wants: into which memory, and which part of a stored tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge.errors import StoreError
from forge.store.sharding import Piece, Region
from forge.store.tensors import dtype_of, is_plain, local, region_pieces, shards_for, wanted_shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part `index` of `count` of a stored tensor along `dim`, cut as `torch.chunk` cuts: the last may be smaller."""

    dim: int
    index: int
    count: int

    def resolve(self, shape: tuple[int, ...]) -> Region:
        """Return the chunk of a tensor of this shape."""
        if not -len(shape) <= self.dim < len(shape) or not 0 <= self.index < self.count:
            raise StoreError(
                "the chunk is outside its tensor",
                value=self,
                rule=f"0 <= index < count, along one of the dimensions of {list(shape)}",
                repair="Chunk(dim=0, index=rank, count=world_size)",
            )
        dim = self.dim % len(shape)
        step = -(-shape[dim] // self.count)
        start = min(self.index * step, shape[dim])
        extent = min(step, shape[dim] - start)
        offset = tuple(start if axis == dim else 0 for axis in range(len(shape)))
        return Region(offset, tuple(extent if axis == dim else size for axis, size in enumerate(shape)))


@dataclass(frozen=True, slots=True)
class Placed:
    """This rank's shard under a device mesh and placements: `get(key, spec=Placed(mesh, placements))` is a DTensor."""

    mesh: DeviceMesh
    placements: Sequence[Placement]


Spec = Region | Chunk | Placed
"""Which part of a stored tensor is wanted."""


@dataclass(frozen=True, slots=True)
class At:
    """Memory for a part of a stored tensor, in a place of its own.

    `At(tensor, (1024, 0))` is filled with the rectangle that begins at row 1024 and is as large as `tensor`;
    `At(tensor, Chunk(0, rank, 4))` with a chunk; without `where` it is the whole tensor. `of` names the stored tensor
    where that is not the name under which this stands: a list of three can fill one fused tensor, and several can share
    one stored tensor.
    """

    tensor: Tensor
    where: tuple[int, ...] | Region | Chunk = ()
    of: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Memory to fill, and the pieces of the stored tensor that belong in it."""

    name: str
    """Of the stored tensor."""
    label: str
    """Where it stands in what the reader gave, for messages."""
    memory: Tensor
    pieces: tuple[Piece, ...]


def is_place(value: Any) -> bool:
    """Return whether a value says where something is to go: a tensor, an `At`, or a list of those."""
    if isinstance(value, (Tensor, At)):
        return True
    return isinstance(value, list) and bool(value) and all(isinstance(entry, At) for entry in value)


def resolve(
    label: str, place: Any, shapes: Mapping[str, tuple[tuple[int, ...], str]], *, cast: bool = False
) -> list[Target]:
    """Return the targets of one place. `shapes` has the shape and dtype of every stored tensor."""
    entries = place if isinstance(place, list) else [place]
    return [_one(label, entry, shapes, cast=cast) for entry in entries]


def stored_name(label: str, entry: Any) -> str:
    """Return the stored tensor that fills a place."""
    return entry.of if isinstance(entry, At) and entry.of is not None else label


def check_at(label: str, entry: At) -> None:
    """Raise unless an `At` says what to fill and with which part."""
    where = entry.where
    is_part = isinstance(where, (Region, Chunk)) or (isinstance(where, tuple) and _are_whole(where))
    if not isinstance(entry.tensor, Tensor) or not is_part:
        raise StoreError(
            f"{label!r} does not say what to fill, or with which part",
            path=label,
            value=(type(entry.tensor).__name__, entry.where),
            rule="At(tensor, where), where `where` is a tuple of whole numbers, a Region or a Chunk",
            repair="At(tensor, (1024, 0))",
        )


def _one(label: str, entry: Any, shapes: Mapping[str, tuple[tuple[int, ...], str]], *, cast: bool) -> Target:
    name = stored_name(label, entry)
    shape, dtype = shapes[name]
    if isinstance(entry, At):
        tensor = entry.tensor
        check_at(label, entry)
        if entry.where == ():  # a part must say which: else every rank would get the first
            offset = (0,) * len(shape)
            _check_shape(label, tuple(tensor.shape), shape, "the stored tensor")
        elif isinstance(entry.where, tuple):
            offset = entry.where
        else:
            region = _resolved(label, entry.where, shape)
            offset = region.offset
            _check_shape(label, tuple(tensor.shape), region.shape, "its part")
        want = wanted_shards(tensor, shape=shape, offset=offset, name=label)
    else:
        tensor = entry
        want = wanted_shards(tensor, name=label)
        _check_shape(label, want.shape, shape, "the stored tensor")
    if want.dtype != dtype and not cast:
        raise StoreError(
            f"{label!r} has another dtype than what is stored",
            path=label,
            value=want.dtype,
            rule=f"the stored dtype {dtype}",
            repair="give a tensor of that dtype, allow the conversion (cast=True), or publish in another (dtype=)",
        )
    memory = tensor.detach() if is_plain(tensor) else local(tensor, name=label)
    return Target(name, label, memory, want.pieces)


def _check_shape(label: str, found: tuple[int, ...], wanted: tuple[int, ...], what: str) -> None:
    if found != wanted:
        raise StoreError(
            f"{label!r} does not have the shape of {what}",
            path=label,
            value=list(found),
            rule=f"the shape of {what}: {list(wanted)}",
            repair="give a tensor of that shape, or say which part it is: At(tensor, offset)",
        )


def allocate(
    name: str, spec: Spec | None, shape: tuple[int, ...], dtype: str, *, device: torch.device | str = "cpu"
) -> tuple[Tensor, Target]:
    """Allocate memory for a stored tensor or a part of it: what the reader gets, and what to fill."""
    kind = dtype_of(dtype)
    if isinstance(spec, Placed):
        return _sharded(name, spec, shape, kind)
    region = Region.whole(shape) if spec is None else _resolved(name, spec, shape)
    pieces = region_pieces(shape, region, name=name)
    tensor = torch.empty(region.shape, dtype=kind, device=device)
    return tensor, Target(name, name, tensor, pieces)


def _are_whole(numbers: object) -> bool:
    return isinstance(numbers, (tuple, list)) and all(isinstance(number, int) for number in numbers)


def _resolved(name: str, part: Region | Chunk, shape: tuple[int, ...]) -> Region:
    fields = (part.dim, part.index, part.count) if isinstance(part, Chunk) else (part.offset, part.shape)
    if not (_are_whole(fields) if isinstance(part, Chunk) else all(map(_are_whole, fields))):
        raise StoreError(
            f"{name!r}: a part is described by whole numbers",
            path=name,
            value=part,
            rule="Chunk(dim, index, count) of whole numbers, or Region(offset, shape) of tuples of them",
            repair="Chunk(dim=0, index=rank, count=world_size), or Region((0, 0), (2, 4))",
        )
    try:
        return part.resolve(shape) if isinstance(part, Chunk) else Region(tuple(part.offset), tuple(part.shape))
    except StoreError as error:
        error.path = name
        raise


def _sharded(name: str, spec: Placed, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Target]:
    from torch.distributed.tensor import DTensor

    have = shards_for(shape, dtype, spec.mesh, spec.placements)
    extent = [0] * len(shape)
    if have.pieces:
        extent = [
            max(at + size for at, size in zip(column, sizes, strict=True))
            for column, sizes in zip(
                zip(*(piece.at for piece in have.pieces), strict=True),
                zip(*(piece.region.shape for piece in have.pieces), strict=True),
                strict=True,
            )
        ]
    else:  # nothing here: torch keeps the other dimensions as they are
        extent = list(_empty_extent(shape, spec))
    tensor = torch.empty(extent, dtype=dtype, device=spec.mesh.device_type)
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    whole = DTensor.from_local(
        tensor, spec.mesh, list(spec.placements), run_check=False, shape=torch.Size(shape), stride=strides
    )
    return whole, Target(name, name, tensor, have.pieces)


def _empty_extent(shape: tuple[int, ...], spec: Placed) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    extent, _ = compute_local_shape_and_global_offset(shape, spec.mesh, list(spec.placements))
    return tuple(extent)
