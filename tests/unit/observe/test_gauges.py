"""Gauges: read when they are asked for, for as long as their owner exists."""

from __future__ import annotations

import gc
import json
import os
import weakref

import numpy as np
import pytest

from forge.observe import gauges
from forge.observe.gauges import add_gauges, of_process, read_gauges
from forge.observe.tracing import this_process


class Queue:
    def __init__(self, size: float) -> None:
        self.size = size

    def gauges(self) -> dict[str, float]:
        if self.size < 0:
            raise ValueError("a queue of negative size")
        return {"test/size": self.size}


@pytest.fixture(autouse=True)
def _no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what earlier tests of this process have left behind."""
    monkeypatch.setattr(gauges, "_gauges", weakref.WeakKeyDictionary())


def size() -> float | None:
    return read_gauges().get("test/size")


def test_gauges_are_read_as_they_are_and_add_up() -> None:
    first, second = Queue(1), Queue(2)
    add_gauges(first, Queue.gauges)
    add_gauges(second, Queue.gauges)
    assert size() == 3
    first.size = 10
    assert size() == 12
    del first
    gc.collect()
    assert size() == 2


def test_one_that_cannot_be_read_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = Queue(-1), Queue(5)
    add_gauges(broken, Queue.gauges)
    add_gauges(whole, Queue.gauges)
    assert size() == size() == 5
    assert [record.message for record in caplog.records] == ["the gauges of Queue cannot be read, and are left out"]


def test_the_log_of_one_that_cannot_be_read_keeps_no_other(caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = Queue(-1), Queue(5)
    add_gauges(broken, Queue.gauges)
    add_gauges(whole, Queue.gauges)
    assert size() == 5
    (record,) = caplog.records
    assert record.exc_info is not None  # and with it the frames of the traceback
    del whole
    gc.collect()
    assert size() is None


def test_numbers_of_any_kind_are_read_and_others_left_out(caplog: pytest.LogCaptureFixture) -> None:
    small, text = Queue(1), Queue(2)
    add_gauges(small, lambda queue: {"test/size": np.float32(queue.size)})
    add_gauges(text, lambda queue: {"test/name": "long"})  # type: ignore[dict-item]
    assert json.dumps(read_gauges()) == '{"test/size": 1.0}'
    assert len(caplog.records) == 1


def test_a_gauge_may_be_named_after_its_process() -> None:
    assert of_process({"version": 3}) == {f"version/{this_process().name}": 3}


def test_a_fork_starts_without_those_of_its_parent() -> None:
    queue = Queue(1)
    add_gauges(queue, Queue.gauges)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if read_gauges() == {} else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert size() == 1
