"""Regions of tensors: what they share, and where they lie."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from forge.errors import StoreError
from forge.store.sharding import Piece, Region, pieces_at


def points(box: Region) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, end) for start, end in zip(box.offset, box.end, strict=True))))


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[Region, Region]:
    ndim = draw(st.integers(0, 3))
    numbers = st.tuples(*[st.integers(0, 5)] * ndim)
    return Region(draw(numbers), draw(numbers)), Region(draw(numbers), draw(numbers))


@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(two_boxes())
def test_the_intersection_is_that_of_the_sets_of_points(boxes: tuple[Region, Region]) -> None:
    one, other = boxes
    shared = one.intersect(other)
    assert (points(shared) if shared else set()) == points(one) & points(other)


def test_a_box_of_a_scalar_has_one_element() -> None:
    scalar = Region.whole(())
    assert (scalar.numel, scalar.end) == (1, ())
    assert scalar.intersect(scalar) == scalar


def test_a_box_knows_where_it_lies() -> None:
    box = Region((2, 3), (4, 5))
    assert (box.numel, box.end) == (20, (6, 8))
    assert box.relative_to(Region((1, 3), (9, 9))) == (1, 0)
    assert Region.whole((4, 5)) == Region((0, 0), (4, 5))


def test_boxes_of_different_dimensions_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        Region.whole((2,)).intersect(Region.whole((2, 2)))


def check_error(error: StoreError, *, message: str, value: str, path: str | None = "w") -> None:
    assert message in error.message
    assert value in str(error.value)
    assert error.path == path
    assert error.rule
    assert error.repair


def runs(placements: list[Placement], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], size: int) -> list[int]:
    """The indices of a vector that a rank holds, in the order of its local tensor."""
    pieces = sorted(pieces_at((size,), placements, mesh_shape, coordinate), key=lambda piece: piece.at)
    return [index for piece in pieces for index in range(piece.region.offset[0], piece.region.end[0])]


def test_an_uneven_shard_may_be_empty() -> None:
    assert [runs([Shard(0)], (4,), (rank,), 5) for rank in range(4)] == [[0, 1], [2, 3], [4], []]
    assert [runs([Shard(-1)], (4,), (rank,), 2) for rank in range(4)] == [[0], [1], [], []]


def test_two_mesh_dimensions_split_from_left_to_right() -> None:
    ranks = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [runs([Shard(0), Shard(0)], (2, 2), rank, 8) for rank in ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_strided_shard_splits_after_the_dimension_to_its_right() -> None:
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    ranks = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [runs(placements, (2, 2), rank, 8) for rank in ranks] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert [runs([Shard(0)] * 2, (2, 2), rank, 8) for rank in ranks] != [[0, 1], [4, 5], [2, 3], [6, 7]]
    # Uneven: 9 rows over tp=2 are 5 and 4, and each of them over dp=4. Read from left to right, row 8 would be tp 0's.
    assert runs(placements, (4, 2), (3, 0), 9) == []
    assert runs(placements, (4, 2), (3, 1), 9) == [8]


def test_an_order_of_splitting_says_the_same_as_strided_shards() -> None:
    for coordinate in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)]:
        strided = pieces_at((9,), [_StridedShard(0, split_factor=2), Shard(0)], (3, 2), coordinate)
        assert pieces_at((9,), [Shard(0), Shard(0)], (3, 2), coordinate, order=((0, (1, 0)),)) == strided


def test_a_strided_shard_that_is_no_order_keeps_parts_of_every_stride() -> None:
    assert pieces_at((8,), [_StridedShard(0, split_factor=4)], (2,), (1,)) == tuple(
        Piece(Region((2 * part + 1,), (1,)), (part,)) for part in range(4)
    )


def test_an_uneven_strided_shard_is_cut_into_parts_first() -> None:
    placements: list[Placement] = [_StridedShard(0, split_factor=2)]
    assert [runs(placements, (4,), (rank,), 9) for rank in range(4)] == [[0, 1, 5], [2, 3, 6], [4, 7], [8]]


def test_neighbouring_runs_are_one_piece() -> None:
    assert pieces_at((8,), [_StridedShard(0, split_factor=2)], (1,), (0,)) == (Piece(Region((0,), (8,)), (0,)),)


def test_several_runs_along_two_dimensions_multiply() -> None:
    placements = [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=2)]
    assert pieces_at((4, 4), placements, (2, 2), (0, 1)) == (
        Piece(Region((0, 1), (1, 1)), (0, 0)),
        Piece(Region((0, 3), (1, 1)), (0, 1)),
        Piece(Region((2, 1), (1, 1)), (1, 0)),
        Piece(Region((2, 3), (1, 1)), (1, 1)),
    )


def test_a_scalar_can_only_be_replicated() -> None:
    assert pieces_at((), [Replicate()], (2,), (1,)) == (Piece(Region((), ()), ()),)
    with pytest.raises(StoreError) as caught:
        pieces_at((), [Shard(0)], (2,), (1,))
    check_error(caught.value, message="dimension that it does not have", value="Shard", path=None)


@dataclass(frozen=True)
class Scattered(Placement):
    """A placement that torch does not have."""


@pytest.mark.parametrize(
    ("placements", "coordinate", "message", "value"),
    [
        ([Shard(2)], (0,), "dimension that it does not have", "Shard(dim=2)"),
        ([Shard(-3)], (0,), "dimension that it does not have", "Shard(dim=-3)"),
        ([Partial()], (0,), "only the terms of a sum", "Partial(sum) on mesh dimension 0"),
        ([Scattered()], (0,), "does not know", "Scattered"),
        ([Shard(0), Shard(0)], (0,), "does not fit its mesh", "2 placements"),
        ([Shard(0)], (2,), "does not fit its mesh", "(2,)"),
    ],
)
def test_placements_that_mean_nothing_are_refused(
    placements: list[Placement], coordinate: tuple[int, ...], message: str, value: str
) -> None:
    with pytest.raises(StoreError) as caught:
        pieces_at((4, 4), placements, (2,), coordinate)
    check_error(caught.value, message=message, value=value, path=None)


def test_an_order_that_leaves_a_split_out_is_refused() -> None:
    with pytest.raises(StoreError) as caught:
        pieces_at((4,), [Shard(0), Shard(0)], (2, 2), (0, 0), order=((0, (1,)),))
    check_error(caught.value, message="order of splitting", value="(1,)", path=None)
