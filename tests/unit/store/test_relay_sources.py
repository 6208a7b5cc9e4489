"""Which source a relay reads from: the first that works and is not slow."""

from __future__ import annotations

from forge.store.relay_sources import FIRST_PROBE_S, LONGEST_PAUSE_S, SourceChoice

MIB = 1 << 20


def read(choice: SourceChoice, speeds: dict[int, float], *, num_bytes: int = MIB) -> int | None:
    """Read one chunk; a source of speed 0 refuses it after a second. Return who gave it."""
    source = choice.pick()
    while source is not None and speeds[source] == 0:
        source = choice.refused(source, 1.0)
    if source is not None:
        choice.arrived(source, num_bytes, num_bytes / speeds[source])
    return source


def test_the_nearest_relay_gives_everything() -> None:
    choice = SourceChoice(3, num_relays=2)
    assert [read(choice, {0: 100 * MIB, 1: MIB, 2: MIB}) for _ in range(50)] == [0] * 50


def test_another_is_tried_with_one_chunk_after_a_second_and_then_less_and_less_often() -> None:
    choice = SourceChoice(2, num_relays=1)
    given = [read(choice, {0: 8 * MIB, 1: 15 * MIB}) for _ in range(1000)]
    trials = [number for number, source in enumerate(given) if source == 1]
    pauses = [after - before - 1 for before, after in zip([-1, *trials], trials, strict=False)]
    assert pauses[:5] == [8, 16, 32, 64, 128]
    assert max(pauses) <= LONGEST_PAUSE_S * 8
    assert FIRST_PROBE_S == 1


def test_one_that_is_much_faster_takes_its_place() -> None:
    choice = SourceChoice(3, num_relays=2)
    given = [read(choice, {0: MIB, 1: 5 * MIB, 2: 100 * MIB}) for _ in range(40)]
    assert given[:3] == [0, 1, 1], "after a second, and for good"
    assert given[-10:] == [2] * 10, "and so on, up to those who hold it"
    assert 0 not in given[1:]


def test_those_who_hold_it_are_not_compared() -> None:
    choice = SourceChoice(2, num_relays=0)
    assert {read(choice, {0: 0.1 * MIB, 1: 1000 * MIB}) for _ in range(50)} == {0}


def test_a_chunk_that_a_relay_does_not_get_comes_from_the_next() -> None:
    choice = SourceChoice(3, num_relays=2)
    assert choice.pick() == 0
    assert choice.refused(0, 0.001) == 1
    assert choice.refused(1, 0.001) == 2
    choice.arrived(2, MIB, 0.1)
    assert choice.pick() == 0, "the next chunk may be one that it gets"


def test_a_relay_that_always_refuses_late_loses_its_place() -> None:
    choice = SourceChoice(2, num_relays=1)
    assert [read(choice, {0: 0, 1: MIB}) for _ in range(3)] == [1] * 3
    assert choice.pick() == 1


def test_a_trial_that_is_refused_moves_on() -> None:
    choice = SourceChoice(3, num_relays=2)
    assert [read(choice, {0: MIB, 1: 0, 2: 10 * MIB}) for _ in range(3)] == [0, 2, 2]


def test_one_that_fails_is_used_no_more() -> None:
    choice = SourceChoice(3, num_relays=2)
    assert choice.failed(0) == 1
    assert choice.pick() == 1
    assert choice.failed(1) == 2
    assert choice.failed(1) == 2, "another stream finds it, too"
    assert choice.failed(2) is None
    assert choice.pick() is None
    assert choice.refused(0, 0.1) is None


def test_one_that_fails_while_it_is_tried_leaves_the_other_in_place() -> None:
    choice = SourceChoice(2, num_relays=1)
    assert read(choice, {0: MIB, 1: MIB}) == 0
    assert choice.pick() == 1
    assert choice.failed(1) is None
    assert [read(choice, {0: MIB}) for _ in range(5)] == [0] * 5
