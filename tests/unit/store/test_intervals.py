"""Sets of byte ranges, compared with sets of bytes."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from forge.store.copy_table import CopyTable, row_major
from forge.store.intervals import GAP, Intervals, runs_of, source_runs, union_of

END = 60


def drawn(draw: random.Random) -> tuple[Intervals, set[int]]:
    ranges = [(draw.randrange(END), draw.randrange(8)) for _ in range(draw.randrange(7))]
    return Intervals.of(ranges), {byte for start, size in ranges for byte in range(start, start + size)}


def bytes_of(intervals: Intervals) -> set[int]:
    return {byte for start, size in intervals for byte in range(start, start + size)}


@pytest.mark.parametrize("seed", range(200))
def test_they_are_sets(seed: int) -> None:
    draw = random.Random(seed)
    (one, mine), (other, theirs) = drawn(draw), drawn(draw)
    for found, expected in ((one | other, mine | theirs), (one - other, mine - theirs), (one, mine)):
        assert bytes_of(found) == expected
        assert found.num_bytes == len(expected)
        assert (found.starts < found.ends).all()
        assert (found.starts[1:] >= found.ends[:-1]).all()
    assert one.covers(other) == (theirs <= mine)
    assert pickle.loads(pickle.dumps(one)) == one
    assert (one | other) == (other | one)


def test_a_union_has_no_seams() -> None:
    assert list(Intervals.of([(0, 4), (4, 4), (12, 1)])) == [(0, 8), (12, 1)]
    assert list(Intervals.of([(0, 4), (7, 1)], gap=4)) == [(0, 8)]
    assert list(Intervals.of([(0, 4), (8, 1)], gap=4)) == [(0, 4), (8, 1)]
    assert repr(Intervals.of([(0, 4), (8, 1)])) == "Intervals(0+4, 8+1)"


def test_an_empty_set_is_in_every_set() -> None:
    empty = Intervals.empty()
    assert empty.covers(empty)
    assert not empty.covers(Intervals.of([(0, 1)]))
    assert (empty | empty).num_bytes == len(empty - Intervals.of([(0, 9)])) == 0


@pytest.mark.parametrize(
    ("shape", "whole"),
    [((3, 5), (7, 5)), ((3, 4), (7, 5)), ((2, 1, 3), (4, 1, 6)), ((), ()), ((0, 5), (7, 5)), ((6,), (9,))],
)
def test_the_runs_of_a_rectangle_are_the_bytes_of_its_elements(shape: tuple[int, ...], whole: tuple[int, ...]) -> None:
    memory = np.arange(int(np.prod(whole)) * 4).reshape(*whole, 4)
    expected = set(memory[tuple(slice(extent) for extent in shape)].ravel().tolist())
    starts, ends = runs_of(0, shape, row_major(whole, 4), size=4)
    assert {byte for start, end in zip(starts, ends, strict=True) for byte in range(start, end)} == expected
    table = CopyTable()
    table.add(shape, itemsize=4, src=(0, 0, row_major(whole, 4)))
    assert [column.tolist() for column in source_runs(table.row(0))] == [starts.tolist(), ends.tolist()]


def test_the_padding_between_pieces_is_part_of_their_union() -> None:
    runs = [runs_of(start, (10,), (4,), size=4) for start in (0, GAP, 2 * GAP + 40)]
    assert list(union_of(runs)) == [(0, GAP + 40), (2 * GAP + 40, 40)]
    assert len(union_of([])) == 0
