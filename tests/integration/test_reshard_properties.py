"""Every element arrives: random layouts on both sides, simulated for many ranks and with real DTensors on four."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtensor_ranks import MeshRanks, Part, PlacementCode, Ranks, full_value, placements_of, raw
from forge.store.fetch_plan import Copy, Stored, plan_copies
from forge.store.records import itemsize
from forge.store.sharding import Piece, Region, pieces_at
from forge.store.tensors import dtype_name

settings.register_profile("store", derandomize=True, deadline=None, database=None)
FIXED = settings.get_profile("store")


@dataclass(frozen=True)
class Layout:
    """A mesh, what each of its dimensions does, and the order in which they split the tensor."""

    mesh_shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    """The tensor dimension that each mesh dimension splits, or None for a replica."""
    order: tuple[int, ...]

    def codes(self, ndim: int) -> list[PlacementCode]:
        return [self._code(mesh_dim, ndim) for mesh_dim in range(len(self.mesh_shape))]

    def _code(self, mesh_dim: int, ndim: int) -> PlacementCode:
        dim = self.dims[mesh_dim]
        if dim is None:
            return "R", 0, 0
        earlier = self.order[: self.order.index(mesh_dim)]
        same = [other for other in earlier if other > mesh_dim and self.splits(other, ndim) == dim % ndim]
        factor = math.prod(self.mesh_shape[other] for other in same)
        return ("S", dim, 0) if factor == 1 else ("SS", dim, factor)

    def splits(self, mesh_dim: int, ndim: int) -> int | None:
        dim = self.dims[mesh_dim]
        return None if dim is None else dim % ndim

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self.mesh_shape))

    def local(self, full: Tensor, coordinate: Sequence[int]) -> Tensor:
        """What a rank holds, said by torch.chunk alone."""
        for mesh_dim in self.order:
            dim = self.dims[mesh_dim]
            if dim is not None:
                chunks = torch.chunk(full, self.mesh_shape[mesh_dim], dim)
                full = chunks[coordinate[mesh_dim]] if coordinate[mesh_dim] < len(chunks) else full.narrow(dim, 0, 0)
        return full

    def pieces(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[Piece, ...]:
        return pieces_at(shape, placements_of(self.codes(len(shape))), self.mesh_shape, coordinate)


def layouts(ndim: int) -> st.SearchStrategy[Layout]:
    meshes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple).filter(lambda mesh: math.prod(mesh) <= 8)
    dims = st.none() | st.integers(-ndim, ndim - 1) if ndim else st.none()
    return meshes.flatmap(
        lambda mesh: st.builds(
            Layout, st.just(mesh), st.tuples(*[dims] * len(mesh)), st.permutations(range(len(mesh))).map(tuple)
        )
    )


@st.composite
def reshards(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, Layout]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    return shape, draw(layouts(len(shape))), draw(layouts(len(shape)))


def at(tensor: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def store_once(rank: int, local: Tensor, pieces: Sequence[Piece], stored: list[Stored], data: list[Tensor]) -> None:
    """Add the pieces that no earlier rank has: the store keeps one of several replicas."""
    known: set[Region] = {item.region for item in stored}
    for piece in pieces:
        if piece.region not in known:
            stored.append(Stored(rank, 0, piece.region))
            data.append(at(local, piece.at, piece.region.shape))


def carry_out(copies: Sequence[Copy], stored: Sequence[Tensor], destination: Tensor) -> int:
    """Do what the plan says; return how many elements moved."""
    for copy in copies:
        at(destination, copy.dst_at, copy.shape)[...] = at(stored[copy.stored], copy.src_at, copy.shape)
    return sum(math.prod(copy.shape) for copy in copies)


def check_pieces(full: Tensor, local: Tensor, pieces: Sequence[Piece]) -> None:
    """The pieces tile the local tensor, and each of them has the elements of its box."""
    filled = torch.full_like(local, -1)
    for piece in pieces:
        at(filled, piece.at, piece.region.shape)[...] = at(full, piece.region.offset, piece.region.shape)
    assert torch.equal(filled, local)
    assert sum(piece.region.numel for piece in pieces) == local.numel()


@settings(FIXED, max_examples=250)
@given(reshards())
def test_a_plan_between_any_two_layouts_moves_each_wanted_element_once(
    case: tuple[tuple[int, ...], Layout, Layout],
) -> None:
    shape, source, target = case
    full = torch.arange(math.prod(shape)).reshape(shape)
    stored: list[Stored] = []
    data: list[Tensor] = []
    for rank, coordinate in enumerate(source.coordinates()):
        local = source.local(full, coordinate)
        pieces = source.pieces(shape, coordinate)
        check_pieces(full, local, pieces)
        store_once(rank, local, pieces, stored, data)
    for coordinate in target.coordinates():
        expected = target.local(full, coordinate)
        destination = torch.full_like(expected, -1)
        copies, num_missing = plan_copies(stored, target.pieces(shape, coordinate))
        assert num_missing == 0
        assert carry_out(copies, data, destination) == expected.numel()
        assert torch.equal(destination, expected)


@pytest.mark.parametrize("mesh_shape", [(2, 2, 2), (4, 2), (2, 4), (2, 1, 3)])
def test_one_dimension_may_be_split_in_every_order(mesh_shape: tuple[int, ...]) -> None:
    for order, size in itertools.product(itertools.permutations(range(len(mesh_shape))), (1, 5, 8, 9, 24)):
        layout = Layout(mesh_shape, (0,) * len(mesh_shape), order)
        full = torch.arange(size)
        for coordinate in layout.coordinates():
            check_pieces(full, layout.local(full, coordinate), layout.pieces((size,), coordinate))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    four = Ranks(tmp_path_factory.mktemp("ranks"))
    try:
        yield four
    finally:
        four.close()


# Ranks ascend along each dimension: on other meshes full_tensor() itself gives wrong elements here (torch 2.13, gloo).
MESHES: list[MeshRanks] = [(0, 1, 2, 3), (0, 2), (0, 1, 3), ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0,), (1,), (2,))]
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "int8", "uint16", "int64", "complex32"]


@st.composite
def real_layouts(draw: st.DrawFn, ndim: int) -> tuple[MeshRanks, list[PlacementCode]]:
    mesh = draw(st.sampled_from(MESHES))
    mesh_shape = tuple(torch.tensor(mesh).shape)
    dims = st.none() | st.integers(0, ndim - 1) if ndim else st.none()
    layout = Layout(
        mesh_shape,
        draw(st.tuples(*[dims] * len(mesh_shape))),
        tuple(draw(st.permutations(range(len(mesh_shape))))),
    )
    return mesh, layout.codes(ndim)


@st.composite
def real_reshards(draw: st.DrawFn) -> tuple[tuple[int, ...], str, list[tuple[MeshRanks, list[PlacementCode]]]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    sides = [draw(real_layouts(len(shape))), draw(real_layouts(len(shape)))]
    return shape, draw(st.sampled_from(DTYPES)), sides


def as_bytes(data: bytes, shape: Sequence[int], dtype: str) -> Tensor:
    """A tensor with one more dimension, the bytes of an element: equal means equal to the bit."""
    size = itemsize(dtype)
    return torch.tensor(list(data), dtype=torch.int16).reshape(*shape, size)


def check_parts(parts: Sequence[Part], full: Tensor, dtype: str) -> None:
    """What ranks say of a DTensor agrees with what torch put into it, and with what torch reads back."""
    for part in parts:
        assert (part.held.shape, part.held.dtype) == (tuple(full.shape), dtype)
        if part.full is None:
            assert part.held.pieces == ()
            continue
        assert part.full == raw(full)
        whole = as_bytes(raw(full), full.shape, dtype)
        mine = as_bytes(part.data, part.shape, dtype)
        filled = torch.full_like(mine, -1)
        for piece in part.held.pieces:
            at(filled, piece.at, piece.region.shape)[...] = at(whole, piece.region.offset, piece.region.shape)
        assert torch.equal(filled, mine)
        assert sum(piece.region.numel for piece in part.held.pieces) == math.prod(part.shape)


def check_reshard(sources: Sequence[Part], targets: Sequence[Part]) -> None:
    """Bytes that only the sources' local tensors hold, moved by the plan, give the targets' local tensors."""
    dtype = sources[0].held.dtype
    stored: list[Stored] = []
    data: list[Tensor] = []
    for rank, part in enumerate(sources):
        local = as_bytes(part.data, part.shape, dtype)
        store_once(rank, local, part.held.pieces, stored, data)
    for part in targets:
        expected = as_bytes(part.data, part.shape, dtype)
        destination = torch.full_like(expected, -1)
        copies, num_missing = plan_copies(stored, part.held.pieces)
        assert num_missing == 0
        assert carry_out(copies, data, destination) == math.prod(part.shape)
        assert torch.equal(destination, expected)


@settings(FIXED, max_examples=150)
@given(case=real_reshards())
def test_real_dtensors_reshard_as_full_tensor_says(
    ranks: Ranks, case: tuple[tuple[int, ...], str, list[tuple[MeshRanks, list[PlacementCode]]]]
) -> None:
    shape, dtype, sides = case
    parts = [ranks.call("distribute", shape, dtype, mesh, codes) for mesh, codes in sides]
    for side in parts:
        check_parts(side, full_value(shape, dtype), dtype)
    check_reshard(parts[0], parts[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [8, 9, 5, 3])
@pytest.mark.parametrize("mesh", [((0, 1), (2, 3)), (((0, 1), (2, 3)),), (((0,), (1,)), ((2,), (3,)))])
def test_fsdp2_over_tensor_parallelism_holds_what_it_says(
    ranks: Ranks, mesh: MeshRanks, width: int, dtype: str
) -> None:
    check_model(ranks, mesh, width, dtype=dtype, shard_dim=0)


def test_fsdp2_that_shards_the_columns_of_a_column_parallel_layer(ranks: Ranks) -> None:
    check_model(ranks, ((0, 1), (2, 3)), 8, dtype="float32", shard_dim=1)


def check_model(ranks: Ranks, mesh: MeshRanks, width: int, *, dtype: str, shard_dim: int) -> None:
    shapes = {"0.weight": (width, 6), "0.bias": (width,), "1.weight": (4, width), "1.bias": (4,)}
    models = ranks.call("fsdp_over_tp", mesh, width, dtype, shard_dim)
    for name, shape in shapes.items():
        parts = [model[name] for model in models]
        check_parts(parts, full_value(shape, dtype), dtype)
        targets = ranks.call("distribute", shape, dtype, (0, 1, 2, 3), [("S", 0, 0)])
        check_reshard(parts, targets)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("size", [8, 9, 3])
def test_a_dtensor_with_an_order_of_its_own(ranks: Ranks, order: tuple[int, int], size: int) -> None:
    check_parts(ranks.call("ordered", (size, 2), order), full_value((size, 2), "float32"), "float32")


@pytest.mark.parametrize(("shape", "dim"), [((4, 8), 1), ((3, 8, 2), 1), ((8, 3), 0)])
def test_a_flattened_view_of_a_sharded_tensor(ranks: Ranks, shape: tuple[int, ...], dim: int) -> None:
    parts = ranks.call("flatten", shape, dim)
    check_parts(parts, full_value(shape, "float32").flatten(), "float32")


def test_the_sample_of_types_is_known() -> None:
    assert [dtype_name(full_value((2,), dtype).dtype) for dtype in DTYPES] == DTYPES
