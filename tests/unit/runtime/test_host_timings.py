"""The keys of `launcher` that decide when a host counts as lost: each has an effect, on a clock that does not wait."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge.config import LauncherConfig
from forge.runtime.hosts import Host, HostFacts, HostTimings

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The simulated cluster of the benchmarks: the library's heartbeats, without processes."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        names = ("simulated_cluster", "virtual_clock")
        yield SimpleNamespace(**{name: importlib.import_module(f"harness.{name}") for name in names})
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "harness":
                del sys.modules[name]


def watched(bench: SimpleNamespace, timings: HostTimings, *, silent_from: float, until: float) -> dict[str, Any]:
    """Watch a host that falls silent; return when it was lost, and how many heartbeats it got."""

    async def body() -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        costs = bench.simulated_cluster.Costs(latency_s=0.0, call_cpu_s=0.0, table_cpu_s=0.0, heartbeat_cpu_s=0.0)
        network = bench.simulated_cluster.Network(costs, 0.0)
        host: Any = Host("host1", None, address="", facts=HostFacts("host1", 1, (), 0))
        host.is_cut_off = False
        host.watch = bench.simulated_cluster.SimulatedWatch(host, network, timings)
        loop.call_at(silent_from, setattr, host, "is_cut_off", True)
        lost = asyncio.create_task(host.watch._lost.wait())
        await asyncio.wait({lost}, timeout=until)
        return {"lost_at": loop.time() if lost.done() else None, "heartbeats": network.num_heartbeats}

    found: dict[str, Any] = bench.virtual_clock.run_virtually(body())
    return found


@pytest.mark.parametrize(("heartbeat_s", "timeout_s"), [(1.0, 5.0), (1.0, 30.0), (4.0, 5.0)])
def test_a_silent_host_is_lost_after_a_heartbeat_and_the_timeout(
    bench: SimpleNamespace, heartbeat_s: float, timeout_s: float
) -> None:
    timings = HostTimings(heartbeat_s=heartbeat_s, heartbeat_timeout_s=timeout_s)
    found = watched(bench, timings, silent_from=19.5, until=1000.0)
    assert found["lost_at"] == pytest.approx(20.0 + timeout_s)
    assert found["heartbeats"] == 20 / heartbeat_s


def test_a_host_that_answers_is_asked_every_heartbeat(bench: SimpleNamespace) -> None:
    found = watched(bench, HostTimings(heartbeat_s=2.0), silent_from=1000.0, until=101.0)
    assert found == {"lost_at": None, "heartbeats": 50}


def test_the_configuration_has_them() -> None:
    given = {"heartbeat_s": 2.0, "heartbeat_timeout_s": 20.0, "lease_s": 40.0, "attach_timeout_s": 90.0}
    assert HostTimings.of(LauncherConfig(**given)) == HostTimings(**given)
    assert HostTimings.of(LauncherConfig()) == HostTimings(), "the defaults are the same"


def test_other_answers_have_as_much_time_at_least() -> None:
    assert HostTimings(heartbeat_timeout_s=0.5).answer_s == 5.0
    assert HostTimings(heartbeat_timeout_s=60.0).answer_s == 60.0
