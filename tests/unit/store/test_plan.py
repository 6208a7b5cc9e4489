"""Which rectangles are copied, and which are missing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.errors import StoreError
from forge.store.boxes import Box, Piece
from forge.store.plan import Copy, Stored, plan


def stored(*boxes: Box) -> list[Stored]:
    return [Stored(number, 0, box) for number, box in enumerate(boxes)]


def whole(shape: tuple[int, ...]) -> Piece:
    return Piece(Box.whole(shape), (0,) * len(shape))


def points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, end) for start, end in zip(box.offset, box.end, strict=True))))


def test_a_whole_tensor_is_one_copy() -> None:
    assert plan(stored(Box.whole((3, 4))), [whole((3, 4))], target=7) == (
        [Copy(0, 7, (3, 4), (0, 0), (0, 0))],
        [],
    )


def test_a_scalar_is_one_copy() -> None:
    assert plan(stored(Box.whole(())), [whole(())]) == ([Copy(0, 0, (), (), ())], [])


def test_rows_become_columns() -> None:
    rows = stored(Box((0, 0), (2, 4)), Box((2, 0), (2, 4)))
    columns = [Piece(Box((0, 2), (4, 2)), (0, 0))]
    assert plan(rows, columns) == ([Copy(0, 0, (2, 2), (0, 2), (0, 0)), Copy(1, 0, (2, 2), (0, 2), (2, 0))], [])


def test_a_piece_lands_at_its_place_in_the_local_tensor() -> None:
    pieces = [Piece(Box((1,), (2,)), (0,)), Piece(Box((5,), (3,)), (2,))]
    assert plan(stored(Box.whole((8,))), pieces) == ([Copy(0, 0, (2,), (1,), (0,)), Copy(0, 0, (3,), (5,), (2,))], [])


def test_of_replicas_the_first_is_used() -> None:
    halves = [Box((0,), (2,)), Box((2,), (2,))]
    copies, missing = plan(stored(*halves, *halves, *halves), [whole((4,))])
    assert ([copy.stored for copy in copies], missing) == ([0, 1], [])
    copies, missing = plan(stored(Box.whole((4,)), Box.whole((4,))), [whole((4,))])
    assert ([copy.stored for copy in copies], missing) == ([0], [])


def test_what_nobody_stored_is_missing_exactly() -> None:
    copies, missing = plan(stored(Box((1, 1), (1, 1))), [whole((3, 3))])
    assert [copy.shape for copy in copies] == [(1, 1)]
    assert sum(box.numel for box in missing) == 8
    assert set().union(*map(points, missing)) == points(Box.whole((3, 3))) - {(1, 1)}


def test_nothing_stored_means_that_all_is_missing() -> None:
    assert plan([], [whole((3,))]) == ([], [Box.whole((3,))])
    assert plan(stored(Box((0,), (0,))), [whole((3,))]) == ([], [Box.whole((3,))])


def test_nothing_wanted_means_no_copies() -> None:
    empty = Box((0, 0), (0, 4))
    assert plan(stored(Box.whole((3, 4))), []) == ([], [])
    assert plan(stored(empty), [Piece(empty, (0, 0))]) == ([], [])


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0,), (3,)), Box((2,), (3,))],
        [Box((0,), (9,)), Box((1,), (1,)), Box((5,), (2,))],
        [Box((0, 0), (2, 9)), Box((0, 4), (4, 1)), Box((6, 0), (1, 9))],
        [Box((0, 0), (4, 4)), Box((0, 0), (4, 3))],
    ],
)
def test_stored_boxes_that_overlap_are_an_inconsistent_layout(boxes: list[Box]) -> None:
    ndim = len(boxes[0].shape)
    with pytest.raises(StoreError) as caught:
        plan(stored(*boxes), [whole((9,) * ndim)])
    assert "overlap" in caught.value.message
    assert str(boxes[0]) in str(caught.value.value)
    assert caught.value.rule is not None
    assert "identical" in caught.value.rule
    assert caught.value.repair is not None


def test_another_number_of_dimensions_is_an_error() -> None:
    with pytest.raises(StoreError) as caught:
        plan(stored(Box.whole((4,))), [whole((2, 2))])
    assert "different numbers of dimensions" in caught.value.message
    assert "2 dimensions" in str(caught.value.value)
    assert caught.value.repair is not None


def test_many_boxes_on_both_sides() -> None:
    rows = stored(*(Box((64 * row, 0), (64, 4096)) for row in range(64)))
    columns = [Piece(Box((0, 64 * column), (4096, 64)), (0, 0)) for column in range(64)]
    copies, missing = plan(rows, columns)
    assert missing == []
    assert len({(copy.stored, copy.src_at) for copy in copies}) == len(copies) == 64 * 64
    assert {copy.shape for copy in copies} == {(64, 64)}


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[Box], list[Piece]]:
    """Cells of an irregular grid, some of them left out and some twice, in any order; and any pieces."""
    cuts = [sorted({0, 8, *draw(st.lists(st.integers(1, 7), max_size=3))}) for _ in range(2)]
    spans = [list(itertools.pairwise(along)) for along in cuts]
    cells = [
        Box((top, left), (bottom - top, right - left)) for (top, bottom), (left, right) in itertools.product(*spans)
    ]
    chosen = draw(st.lists(st.sampled_from(cells), max_size=2 * len(cells)))
    corner = st.tuples(st.integers(0, 7), st.integers(0, 7))
    pieces = st.builds(
        lambda at, to: Piece(Box(at, tuple(b - a for a, b in zip(at, to, strict=True))), at), corner, corner
    )
    wanted = draw(st.lists(pieces.filter(lambda piece: min(piece.box.shape) >= 0), max_size=3))
    return chosen, wanted


@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(grids())
def test_copies_and_missing_parts_add_up_to_what_is_wanted(case: tuple[list[Box], list[Piece]]) -> None:
    boxes, wanted = case
    have = set().union(*map(points, boxes))
    for piece in wanted:
        copies, missing = plan(stored(*boxes), [piece])
        landed: list[tuple[int, ...]] = []
        for copy in copies:
            source = boxes[copy.stored]
            assert copy.stored == boxes.index(source)
            start = tuple(a + b for a, b in zip(source.offset, copy.src_at, strict=True))
            assert start == copy.dst_at  # pieces of this test lie in the local tensor where they lie in the whole
            landed.extend(points(Box(start, copy.shape)))
        assert sorted(landed) == sorted(points(piece.box) & have)
        assert sum(box.numel for box in missing) == len(points(piece.box) - have)
        assert set().union(*map(points, missing)) == points(piece.box) - have
