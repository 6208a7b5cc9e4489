"""Rows: the paths of a tree of turns, in which every delivered token counts once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forge.envs.trace import Turn, path_to, rows_of
from forge.types import VersionSpan


def turn(index: int, parent: int | None, context=(1,), sampled=(2,), *, is_delivered: bool = True) -> Turn:
    logprobs = (-0.5,) * len(sampled)
    spans = (VersionSpan(0, 0, len(sampled)),)
    return Turn(
        *(index, parent, parent, (), (), tuple(context), tuple(sampled), logprobs, None, "", "stop", spans, 0),
        is_delivered=is_delivered,
    )


def test_one_path_is_one_row():
    turns = [turn(0, None, (1, 2), (3, 4)), turn(1, 0, (5,), (6,))]
    (row,) = rows_of(turns)
    assert row.token_ids == (1, 2, 3, 4, 5, 6)
    assert len(row) == 6
    spans = [(start, end, each.index, counts) for start, end, each, counts in row.sampled_spans()]
    assert spans == [(2, 4, 0, True), (5, 6, 1, True)]


def test_a_turn_that_branches_share_counts_in_the_first():
    turns = [turn(0, None), turn(1, 0), turn(2, 0), turn(3, None)]
    rows = rows_of(turns)
    assert [[each.index for each in row.turns] for row in rows] == [[0, 1], [0, 2], [3]]
    assert [row.counted for row in rows] == [(True, True), (False, True), (True,)]


def test_what_was_not_delivered_or_is_empty_counts_for_nothing():
    assert rows_of([turn(0, None, is_delivered=False)]) == []
    assert rows_of([turn(0, None, sampled=())]) == []
    (row,) = rows_of([turn(0, None, is_delivered=False), turn(1, 0)])
    assert row.counted == (False, True)
    (row,) = rows_of([turn(0, None), turn(1, 0, is_delivered=False), turn(2, 0), turn(3, 2, sampled=())])
    assert ([each.index for each in row.turns], row.counted) == ([0, 2], (True, True))
    assert path_to([], None) == []


@given(parents=st.lists(st.integers(-1, 6), max_size=8), lost=st.sets(st.integers(0, 7)))
def test_every_delivered_token_counts_exactly_once(parents, lost):
    turns = []
    for index, parent in enumerate(parents):
        place = None if parent < 0 or parent >= index else parent
        turns.append(turn(index, place, (index,), (100 + index, 200 + index), is_delivered=index not in lost))
    rows = rows_of(turns)
    counted = [each.index for row in rows for _, _, each, counts in row.sampled_spans() if counts]
    assert sorted(counted) == [each.index for each in turns if each.is_delivered]
    for row in rows:
        for start, end, each, _ in row.sampled_spans():
            assert row.token_ids[start:end] == each.token_ids
