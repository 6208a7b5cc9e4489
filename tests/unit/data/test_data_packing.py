"""Rows are full, hold every item once, and keep items near their place."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import Packer


def pack(lengths: list[int], *, capacity: int, lookahead: int, packing: bool = True) -> list[list[int]]:
    items = iter(enumerate(lengths))
    packer = Packer(lambda: next(items, None), capacity=capacity, lookahead=lookahead, packing=packing)
    rows = []
    while row := packer.next_row():
        assert len(packer.waiting()) <= lookahead
        rows.append(row)
    return rows


LENGTHS = st.lists(st.integers(1, 16), max_size=60)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths=LENGTHS, lookahead=st.integers(1, 12), packing=st.booleans())
def test_nothing_is_lost_repeated_or_carried_far(lengths: list[int], lookahead: int, packing: bool) -> None:
    rows = pack(lengths, capacity=16, lookahead=lookahead, packing=packing)
    flat = [item for row in rows for item in row]
    assert sorted(flat) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in row) <= 16 for row in rows)
    for place, item in enumerate(flat):
        assert item - place < lookahead
    for number, row in enumerate(rows):
        assert row[0] == min(item for later in rows[number:] for item in later)  # the oldest begins a row
    if not packing:
        assert rows == [[item] for item in range(len(lengths))]


def test_the_longest_that_fits_is_taken_and_of_equals_the_oldest() -> None:
    assert pack([6, 2, 4, 3, 4, 1], capacity=10, lookahead=6) == [[0, 2], [1, 4, 3, 5]]
    assert pack([6, 2, 4, 3, 4, 1], capacity=10, lookahead=2) == [[0, 2], [1, 4, 3, 5]]
    assert pack([6, 5, 4], capacity=10, lookahead=1) == [[0], [1, 2]]


def test_a_look_ahead_fills_rows_well() -> None:
    draw = random.Random(0)
    lengths = [min(2048, int(draw.lognormvariate(5.5, 0.9)) + 8) for _ in range(4000)]
    rows = pack(lengths, capacity=2048, lookahead=256)
    assert sum(lengths) / (2048 * len(rows)) > 0.99
    near = pack(lengths, capacity=2048, lookahead=1)
    assert sum(lengths) / (2048 * len(near)) < 0.92
