"""What a tensor is to the store: its global shape, its dtype, which regions this process holds, and its memory.

Only tensors whose elements lie in plain memory can be stored. Everything else is rejected here, by name and with the
repair, before a byte is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from forge.errors import StoreError
from forge.store.sharding import Piece, Region, TensorShards, pieces_at

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
import math
from typing import Any

_PLAIN: Final = (Tensor, torch.nn.Parameter)
_DTYPES: Final[dict[str, torch.dtype]] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_QUANTIZED: Final = frozenset(name for name in _DTYPES if name.startswith(("qint", "quint")))
_NAMES: Final[dict[torch.dtype, str]] = {value: name for name, value in _DTYPES.items() if name not in _QUANTIZED}


def dtype_name(dtype: torch.dtype, *, path: str | None = None) -> str:
    """Return the name under which the store knows an element type, such as "bfloat16".

    Every type of which an element is a fixed number of bytes has one; packed types (`float4_e2m1fn_x2`) count what one
    byte holds as one element, as torch does.
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise _quantized(str(dtype), path)
    return name


def dtype_of(name: str) -> torch.dtype:
    """Return the element type of that name. It is the inverse of `dtype_name`."""
    if name in _QUANTIZED:
        raise _quantized(name, None)
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise StoreError(
            "This version of torch has no such element type.",
            value=name,
            rule="an element type is named as in torch, without 'torch.': bfloat16, float8_e4m3fn, int8, ...",
            repair="Use the same version of torch where tensors are published and where they are fetched.",
        )
    return dtype


def _quantized(value: str, path: str | None) -> StoreError:
    return StoreError(
        "A quantized tensor cannot be stored: its scales are not in its elements.",
        path=path,
        value=value,
        rule="an element means the same wherever it is read",
        repair="Store tensor.int_repr() and the scales under keys of their own, or tensor.dequantize().",
    )


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is no more than that: no DTensor, and no other kind that wraps or computes."""
    return type(tensor) in _PLAIN


def shards_of(tensor: Tensor | DTensor, *, name: str = "") -> TensorShards:
    """Return what this process holds of a tensor; `name` is what errors call it.

    A plain tensor is held whole. A DTensor is held as its placements say, in any order and combination; a rank outside
    of its mesh, or one that got an empty shard, holds no pieces. Raises `StoreError` for a tensor without memory of its
    own (sparse, meta, nested, fake, ...) and for one whose elements are not yet final (`Partial`).
    """
    if type(tensor) in _PLAIN:
        _check_memory(tensor, name)
        shape = tuple(tensor.shape)
        return TensorShards(shape, dtype_name(tensor.dtype, path=name or None), _whole(shape))
    sharded = _as_dtensor(tensor)
    if sharded is None:
        plain = local(tensor, name=name)
        shape = tuple(plain.shape)
        return TensorShards(shape, dtype_name(plain.dtype, path=name or None), _whole(shape))
    shape = tuple(sharded.shape)
    pieces = _dtensor_pieces(sharded, name)
    mine = local(sharded, name=name)
    _check_extent(sharded, pieces, mine, name)
    return TensorShards(shape, dtype_name(mine.dtype, path=name or None), pieces)


def local(tensor: Tensor | DTensor, *, name: str = "") -> Tensor:
    """Return the memory behind a tensor: a plain, detached `torch.Tensor` that shares it.

    Of a DTensor it is the local tensor, after any collective that still fills it.
    """
    if type(tensor) not in _PLAIN:
        sharded = _as_dtensor(tensor)
        tensor = _unwrap(tensor if sharded is None else sharded._local_tensor, name)
    _check_memory(tensor, name)
    return tensor.detach()


def wanted_shards(
    target: Tensor | DTensor, *, shape: Sequence[int] | None = None, offset: Sequence[int] | None = None, name: str = ""
) -> TensorShards:
    """Return what a destination wants of a stored tensor; its pieces say where each region goes in `local(target)`.

    Without `shape` the target is the whole tensor (of which a DTensor has its shards here). With `shape` and `offset`
    the target, plain or DTensor, stands for the rectangle of the stored tensor, `shape` large, that begins at `offset`.
    """
    have = shards_of(target, name=name)
    mine = target if type(target) in _PLAIN else local(target, name=name)  # a plain one has just been looked at
    if _overlaps(mine):
        raise StoreError(
            "A destination has elements that share memory.",
            path=name or None,
            value=f"shape {tuple(mine.shape)}, strides {tuple(mine.stride())}",
            rule="each element of a destination has memory of its own",
            repair="Give a tensor that was not expanded, for example tensor.contiguous().",
        )
    if shape is None and offset is None:
        return have
    whole = tuple(have.shape if shape is None else shape)
    start = tuple((0,) * len(whole) if offset is None else offset)
    region_pieces(whole, Region(start, have.shape), name=name)
    return TensorShards(whole, have.dtype, tuple(_moved(piece, start) for piece in have.pieces))


def _overlaps(tensor: Tensor) -> bool:
    """Return whether two elements of a tensor have the same memory."""
    if tensor.is_contiguous():
        return False
    reach = 0
    walk = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    for step, size in walk:
        if step <= reach:  # very rare: compare all
            places = sum(
                (torch.arange(size).mul_(step).view(-1, *[1] * dim) for dim, (step, size) in enumerate(walk)),
                start=torch.zeros((), dtype=torch.int64),
            )
            return bool(places.unique().numel() != places.numel())
        reach += step * (size - 1)
    return False


def region_pieces(shape: Sequence[int], region: Region, *, name: str = "") -> tuple[Piece, ...]:
    """Return the piece that fills a tensor of the region's size. Raise unless the region lies inside `shape`."""
    ndim, offset, extent = len(shape), region.offset, region.shape
    fits = len(offset) == ndim == len(extent) and all(
        start >= 0 and size >= 0 and start + size <= total
        for start, size, total in zip(offset, extent, shape, strict=True)
    )
    if not fits:
        raise StoreError(
            "A slice does not lie inside of its tensor.",
            path=name or None,
            value=f"offset {offset}, extent {extent}",
            rule=f"0 <= offset and offset + extent <= {tuple(shape)}, in each of {ndim} dimensions",
            repair="Give one offset and one extent per dimension of the stored tensor.",
        )
    return () if 0 in extent else (Piece(region, (0,) * ndim),)


def shards_for(
    shape: Sequence[int], dtype: torch.dtype, mesh: DeviceMesh, placements: Sequence[Placement]
) -> TensorShards:
    """Return what this rank would hold of a DTensor with that mesh and those placements. There need not be one."""
    whole = tuple(shape)
    coordinate = mesh.get_coordinate()
    pieces = () if coordinate is None else pieces_at(whole, placements, tuple(mesh.shape), coordinate)
    return TensorShards(whole, dtype_name(dtype), pieces)


@lru_cache(maxsize=65536)
def _whole(shape: tuple[int, ...]) -> tuple[Piece, ...]:
    return () if 0 in shape else (Piece(Region.whole(shape), (0,) * len(shape)),)


def _moved(piece: Piece, by: tuple[int, ...]) -> Piece:
    return Piece(
        Region(tuple(a + b for a, b in zip(piece.region.offset, by, strict=True)), piece.region.shape), piece.at
    )


def _as_dtensor(tensor: Tensor) -> DTensor | None:
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def _dtensor_pieces(tensor: DTensor, name: str) -> tuple[Piece, ...]:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    mesh_shape = tuple(tensor.device_mesh.shape)
    try:
        return pieces_at(tensor.shape, tensor.placements, mesh_shape, coordinate, order=tensor._spec.shard_order)
    except StoreError as error:
        error.path = name or None
        raise


def _check_extent(tensor: DTensor, pieces: tuple[Piece, ...], mine: Tensor, name: str) -> None:
    """Raise for a hand-made DTensor that claims a shape that its local tensors do not add up to."""
    ends = [tuple(a + b for a, b in zip(piece.at, piece.region.shape, strict=True)) for piece in pieces]
    extent = tuple(map(max, zip(*ends, strict=True))) if ends else ()
    if extent == tuple(mine.shape) if pieces else mine.numel() == 0:
        return
    raise StoreError(
        "A DTensor's local tensor does not have the shape that its placements say.",
        path=name or None,
        value=f"local shape {tuple(mine.shape)} of a tensor of shape {tuple(tensor.shape)}, {tensor.placements}",
        rule=f"this rank's part is {extent or 'empty'}",
        repair="Make it with distribute_tensor(), or give shape= and stride= to DTensor.from_local().",
    )


def _unwrap(tensor: Tensor, name: str) -> Tensor:
    """Return the plain tensor inside of a subclass, if it is nothing but that."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    kind = type(tensor)
    if kind in _PLAIN:
        return tensor
    is_lazy = isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)
    if is_lazy or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise StoreError(
            "A tensor has no plain memory.",
            path=name or None,
            value=f"{kind.__module__}.{kind.__qualname__}",
            rule="a stored tensor is a torch.Tensor, an nn.Parameter or a DTensor of such",
            repair="Initialize the module first." if is_lazy else "Store the tensors that it is made of.",
        )
    return tensor.as_subclass(Tensor)


def _check_memory(tensor: Tensor, name: str) -> None:
    """Raise unless the elements of a plain tensor lie in memory as they are."""
    why = None
    if tensor.layout is not torch.strided:
        why = (f"layout {tensor.layout}", "Store its indices and values, or tensor.to_dense().")
    elif tensor.is_nested:
        why = ("nested", "Store its parts, or tensor.to_padded_tensor(...).")
    elif tensor.is_meta:
        why = ("device meta", "Materialize it first, for example with module.to_empty(device=...).")
    elif tensor.is_quantized:
        raise _quantized(str(tensor.dtype), name or None)
    elif tensor.is_conj() or tensor.is_neg():
        why = ("a lazily conjugated or negated view", "Use tensor.resolve_conj().resolve_neg().")
    elif not _has_storage(tensor):
        why = ("no storage behind its shape", "Store it while its memory is allocated (not resized to 0, not traced).")
    if why is not None:
        raise StoreError(
            "A tensor has no plain memory.",
            path=name or None,
            value=why[0],
            rule="the elements of a stored tensor lie in strided memory of its own",
            repair=why[1],
        )


def _has_storage(tensor: Tensor) -> bool:
    shape = tensor.shape
    if 0 in shape:
        return True
    try:
        storage = tensor.untyped_storage()
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # what tensors under a transform say
        return False
    if tensor.is_contiguous():
        last = tensor.storage_offset() + tensor.numel() - 1
    else:
        reach = ((size - 1) * stride for size, stride in zip(shape, tensor.stride(), strict=True))
        last = tensor.storage_offset() + sum(reach)
    return bool(address) and bool(storage.nbytes() >= (last + 1) * tensor.itemsize)


def piece_view(memory: Tensor, start: int, shape: Sequence[int], dtype: str) -> Tensor:
    """Return a piece of a segment as a tensor."""
    kind = dtype_of(dtype)
    return memory[start : start + math.prod(shape) * kind.itemsize].view(kind).view(tuple(shape))


def part_of(tensor: Tensor, at: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a rectangle of a tensor."""
    for dim, (start, extent) in enumerate(zip(at, shape, strict=True)):
        tensor = tensor.narrow(dim, start, extent)
    return tensor


Fingerprint = tuple[Any, ...]
"""The address first, then what else must be the same. An address of None: look again every time."""


def fingerprint_of(tensor: Tensor) -> Fingerprint:
    """Return a value that is equal as long as a tensor is the same memory, viewed in the same way."""
    if type(tensor) in _PLAIN:
        if not _is_memory(tensor):
            return None, object()
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    inner: Any = getattr(tensor, "_local_tensor", None)
    if type(inner) in _PLAIN and _is_memory(inner):
        return inner.data_ptr(), inner.dtype, inner.shape, inner.stride(), id(tensor._spec)
    return None, object()


def _is_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are what lies at its address."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and not tensor.is_conj() and not tensor.is_neg()


def keepalive(tensor: Tensor) -> Any:
    """Return what must stay alive for a fingerprint to mean the same."""
    return getattr(tensor, "_spec", None) if type(tensor) not in _PLAIN else None


class LocalTensors:
    """Named tensors whose memory is read or written: their addresses, which are often known without looking at them
    again, and, if that is needed, their plain memory."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], parts: Sequence[object] = ()) -> None:
        self.named = named
        self._fingerprints = [fingerprint_of(tensor) for _, tensor in named]
        self.key = ([name for name, _ in named], parts, self._fingerprints)
        """Equal as long as the same memory comes again, for the same `parts`."""

    @property
    def kept(self) -> list[Any]:
        """What must stay alive for the key to mean the same."""
        return [keepalive(tensor) for _, tensor in self.named]

    @cached_property
    def tensors(self) -> list[Tensor]:
        return [local(tensor, name=name) for name, tensor in self.named]

    @cached_property
    def addresses(self) -> list[int]:
        known = [fingerprint[0] for fingerprint in self._fingerprints]
        return [tensor.data_ptr() for tensor in self.tensors] if None in known else known
