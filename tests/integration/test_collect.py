"""Figures and spans of real processes, brought together."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import statistics

import pytest

from forge.observe import Reduce, TraceFile, record_metric, span, switch_tracing
from forge.runtime.collect import collect
from observe_actors import Family, Observed

pytestmark = pytest.mark.usefixtures("leaves_nothing", "traces_nothing")

VALUES = {0: ([1.0, 2.5], [1e6]), 1: ([-3.0, 0.25, 7.0], [4.0, 1e6 + 1])}
"""For each replica, what its two ranks record: different numbers of values, of different size."""

PATIENCE_S = 300.0


@pytest.fixture
def traces_nothing():
    yield
    switch_tracing(False)


async def record_everywhere(service) -> None:
    """Each replica gets its own values."""
    pids = {await service.record.route(values) for values in VALUES.values()}
    assert len(pids) == len(VALUES), "round robin gave each replica one call"


def test_replicas_and_ranks_come_together_as_if_they_were_one(drive):
    async def body():
        service = await Observed.options(num_replicas=2, procs=2, mesh_name="policy").as_service()
        await record_everywhere(service)
        record_metric("observed/mean", 100.0)
        found = await collect(timeout_s=PATIENCE_S)
        everything = [value for ranks in VALUES.values() for values in ranks for value in values]
        assert found.metrics["observed/mean"] == pytest.approx(statistics.fmean([*everything, 100.0]), rel=1e-12)
        assert found.metrics["observed/std"] == pytest.approx(statistics.pstdev(everything), rel=1e-12)
        assert found.metrics["observed/max"] == max(everything)
        assert found.metrics["observed/min"] == min(everything)
        assert found.metrics["observed/sum"] == pytest.approx(sum(everything), rel=1e-12)
        assert found.metrics["observed/count"] == len(everything)
        assert found.metrics["observed/num_setups"] == 4
        assert (found.num_processes, dict(found.unheard), found.spans) == (5, {}, [])
        again = await collect(timeout_s=PATIENCE_S)
        assert (again.metrics, again.num_processes) == ({}, 5)

    drive(body())


def test_one_mesh_and_the_actors_of_an_actor_are_heard_as_well(drive):
    async def body():
        family = await Family.options(mesh_name="parent").as_actor()
        await family.record.call_one(1.0)
        record_metric("family/sum", 100.0, Reduce.SUM)
        found = await collect(timeout_s=PATIENCE_S)
        assert found.metrics == {"family/sum": 111.0, "observed/num_setups": 1.0}
        assert found.num_processes == 3
        await family.record.call_one(2.0)
        assert await family.take.call_one() == {"family/sum": 22.0}, "an actor may collect for itself"
        await family.stop()
        after = await collect(timeout_s=PATIENCE_S)
        assert (after.metrics, after.num_processes, dict(after.unheard)) == ({}, 1, {})

    drive(body())


def test_a_death_costs_what_was_not_asked_for_and_nothing_else(drive):
    async def body():
        service = await Observed.options(num_replicas=2, mesh_name="policy").as_service()
        first = await service.record.route([[1.0]])
        other = await service.record.route([[2.0]])
        assert (await collect(timeout_s=PATIENCE_S)).metrics["observed/sum"] == 3.0
        for value in (10.0, 20.0):
            await service.record.route([[value]])
        os.kill(first, signal.SIGKILL)
        found = await collect(timeout_s=PATIENCE_S)
        # The first replica had recorded 10; it died unasked, or while it was asked and then it is named.
        assert found.metrics["observed/sum"] == 20.0
        assert set(found.unheard) <= {"policy[0]"}
        await service.wait_until(lambda metrics: metrics.num_healthy == 2 and metrics.restarts == 1, timeout_s=600)
        assert other in await service.record.fanout([[5.0]])
        assert (await collect(timeout_s=PATIENCE_S)).metrics["observed/sum"] == 10.0, "the new generation is asked"

    drive(body())


def test_a_replica_that_hangs_is_named_and_counted_when_it_answers(drive, caplog):
    async def body():
        service = await Observed.options(num_replicas=2, mesh_name="policy", heartbeat_timeout_s=600.0).as_service()
        pids = [await service.record.route([[value]]) for value in (1.0, 2.0)]
        os.kill(pids[0], signal.SIGSTOP)
        try:
            with caplog.at_level(logging.WARNING, "forge.runtime"):
                found = await collect(timeout_s=10.0)  # which the other replica must keep
            assert found.metrics["observed/sum"] == 2.0
            assert dict(found.unheard) == {"policy[0]": "did not answer within 10 s"}
            assert "policy[0] did not report within 10 s" in caplog.text
            overdue = await asyncio.wait_for(collect(timeout_s=600.0), PATIENCE_S)
            assert set(overdue.unheard) == {"policy[0]"}, "and it is not waited for again"
        finally:
            os.kill(pids[0], signal.SIGCONT)
        assert await service.record.fanout([[10.0]]) == pids, "what it was asked first it has answered first"
        late = await collect(timeout_s=PATIENCE_S)
        assert (late.metrics["observed/sum"], dict(late.unheard)) == (21.0, {})

    drive(body())


def test_spans_of_all_processes_stand_on_one_clock(drive, tmp_path):
    async def body():
        before = await Observed.options(mesh_name="early").as_actor()
        switch_tracing(True)
        late = await Observed.options(mesh_name="late", procs=2).as_actor()
        with span("outside"):
            await late.record.call([[1.0], [2.0]])
            await late.work.call("compute")
        await before.work.call_one("unseen")
        first = await collect(timeout_s=PATIENCE_S)
        assert await before.is_traced.call_one(), "the question switched it on"
        await before.work.call_one("seen")
        second = await collect(timeout_s=PATIENCE_S)
        switch_tracing(False)
        await collect(timeout_s=PATIENCE_S)
        assert not any((await late.is_traced.call()).values())
        return [*first.spans, *second.spans]

    spans = drive(body())
    found = sorted((span.process.name, span.name) for span in spans)
    ranks = [(f"late rank {rank}", name) for rank in (0, 1) for name in ("compute", "record", "setup")]
    start = [("controller", phase) for phase in ("starting", "importing", "setting up")]  # of those that started late
    assert found == sorted([*start, ("controller", "outside"), ("early", "seen"), *ranks])
    (outside,) = [span for span in spans if span.name == "outside"]
    inside = [span for span in spans if span.name in ("record", "compute")]
    assert all(outside.start_ns < span.start_ns <= span.end_ns < outside.end_ns for span in inside)
    with TraceFile(tmp_path / "trace.json") as file:
        file.write(spans)
    events = json.loads((tmp_path / "trace.json").read_text())
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(names) == {"controller", "early", "late rank 0", "late rank 1"}
    assert names["controller"] == os.getpid()
    assert len(set(names.values())) == 4
