"""Rectangles: what they share, what is left, and where they lie."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.store.boxes import Box


def points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, end) for start, end in zip(box.offset, box.end, strict=True))))


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[Box, Box]:
    ndim = draw(st.integers(0, 3))
    numbers = st.tuples(*[st.integers(0, 5)] * ndim)
    return Box(draw(numbers), draw(numbers)), Box(draw(numbers), draw(numbers))


@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(two_boxes())
def test_intersect_and_minus_are_those_of_the_sets_of_points(boxes: tuple[Box, Box]) -> None:
    one, other = boxes
    shared = one.intersect(other)
    assert (points(shared) if shared else set()) == points(one) & points(other)
    left = one.minus(other)
    assert all(box.numel for box in left)
    assert sum(box.numel for box in left) == len(points(one) - points(other))
    assert set().union(*map(points, left)) == points(one) - points(other)


def test_a_box_of_a_scalar_has_one_element() -> None:
    scalar = Box.whole(())
    assert (scalar.numel, scalar.end) == (1, ())
    assert scalar.intersect(scalar) == scalar
    assert scalar.minus(scalar) == []


def test_a_box_knows_where_it_lies() -> None:
    box = Box((2, 3), (4, 5))
    assert (box.numel, box.end) == (20, (6, 8))
    assert box.relative_to(Box((1, 3), (9, 9))) == (1, 0)
    assert Box.whole((4, 5)) == Box((0, 0), (4, 5))


def test_boxes_of_different_dimensions_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        Box.whole((2,)).intersect(Box.whole((2, 2)))
