"""Calls that wait for a server, on a thread of their own."""

from __future__ import annotations

import threading

import pytest

from forge.observe.background import MAX_WAITING, Background
from forge.observe.log import MetricsLog, flat_values
from forge.observe.sink import Table
from forge.testing import ListSink


def submit_many(background: Background, count: int) -> None:
    for _ in range(count):
        background.submit(lambda: None)


def test_calls_are_made_in_order_and_all_of_them() -> None:
    made: list[int] = []
    background = Background("test")
    for number in range(500):
        background.submit(lambda number=number: made.append(number))
    background.close()
    background.close()
    assert made == list(range(500))


def test_what_a_call_raises_is_raised_once_by_the_next() -> None:
    background = Background("test")
    failed = threading.Event()

    def fail() -> None:
        try:
            raise ConnectionError("no route")
        finally:
            failed.set()

    background.submit(fail)
    background.submit(lambda: None)
    failed.wait()
    with pytest.raises(ConnectionError, match="no route"):
        submit_many(background, MAX_WAITING // 2)
    background.submit(lambda: None)
    background.close()


def test_a_failure_of_the_last_call_is_raised_by_close() -> None:
    background = Background("test")
    background.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        background.close()


def test_a_server_that_takes_nothing_does_not_hold_the_run_up() -> None:
    gate = threading.Event()
    background = Background("test", close_s=0.01)
    background.submit(gate.wait)
    with pytest.raises(TimeoutError, match="1000 calls wait for the server"):
        submit_many(background, MAX_WAITING + 2)
    with pytest.raises(TimeoutError, match=r"the server (took nothing|did not take the rest)"):
        background.close()
    gate.set()
    Background("test", close_s=60).close()


def test_a_sink_without_tables_gets_none_and_one_that_fails_is_left_out() -> None:
    class Tables(ListSink):
        def write_table(self, step: int, name: str, table: Table) -> None:
            self.write(step, {name: len(table.rows)})
            if step == 2:
                raise OSError("full")

        def link(self, name: str, path: object) -> None:
            raise OSError("gone")

    first, plain, linking = Tables(), ListSink(), Tables()
    log = MetricsLog({"plain": plain, "tables": first, "linking": linking})
    assert log.takes_tables
    assert not MetricsLog({"plain": plain}).takes_tables
    log.write_table(1, "samples", Table(("a",), [[1], [2]]))
    assert first.entries == [(1, {"samples": 2})]
    assert plain.entries == []
    log.write_table(2, "samples", Table(("a",), [[1]]))
    assert list(log.sinks) == ["plain"]
    log = MetricsLog({"linking": Tables()})
    log.link("report", None)  # type: ignore[arg-type]
    assert list(log.failures) == ["linking"]


def test_a_configuration_is_flat_where_trackers_show_it() -> None:
    nested = {"a": {"b": 1, "c": {"d": None, "e": [1, {"f": 2}]}}, "g": "x", "h": True, "i": {}, "j": 0.5}
    assert flat_values(nested) == {
        "a.b": 1,
        "a.c.d": "null",
        "a.c.e": '[1, {"f": 2}]',
        "g": "x",
        "h": True,
        "i": "{}",
        "j": 0.5,
    }
