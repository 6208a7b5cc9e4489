"""Collecting in a process that has no actors: nothing is started for it."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from forge.errors import DataError, OptionError
from forge.observe import Reduce, record_metric, span, switch_tracing
from forge.observe.metrics import drain_metrics
from forge.observe.tracing import drain_trace
from forge.runtime.collect import collect


@pytest.fixture(autouse=True)
def empty() -> None:
    drain_metrics()
    drain_trace()


def test_a_program_without_actors_hears_itself_and_starts_nothing() -> None:
    before = set(threading.enumerate())
    record_metric("alone/mean", 1.0)
    record_metric("alone/mean", 2.0)
    switch_tracing(True)
    with span("work"):
        pass
    switch_tracing(False)
    found = asyncio.run(collect())
    assert found.metrics == {"alone/mean": 1.5}
    assert [one.name for one in found.spans] == ["work"]
    assert (found.num_processes, found.num_dropped_spans, dict(found.unheard)) == (1, 0, {})
    assert set(threading.enumerate()) <= before
    assert asyncio.run(collect()).metrics == {}


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.inf, math.nan, None, True, "5"], ids=repr)
def test_it_waits_a_finite_time(timeout_s: object) -> None:
    record_metric("alone/kept", 1.0, Reduce.SUM)
    with pytest.raises(OptionError) as caught:
        asyncio.run(collect(timeout_s=timeout_s))  # type: ignore[arg-type]
    assert caught.value.path == "collect(timeout_s=)"
    assert caught.value.value is timeout_s
    assert caught.value.rule == "a finite number of seconds > 0"
    assert caught.value.repair == "timeout_s=60"
    assert asyncio.run(collect()).metrics == {"alone/kept": 1.0}, "nothing is lost by that"


def test_what_the_program_does_wrong_is_raised_where_it_is_done() -> None:
    record_metric("alone/reward", 1.0, Reduce.MAX)
    with pytest.raises(DataError, match=r"Reduce\.MIN, and elsewhere with Reduce\.MAX"):
        record_metric("alone/reward", 1.0, Reduce.MIN)
