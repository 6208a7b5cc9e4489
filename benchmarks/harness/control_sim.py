"""The two parts of `control_plane.py` that need no processes: what the table costs, and a run on simulated hosts."""

from __future__ import annotations

import asyncio
import cProfile
import gc
import math
import pstats
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.config import RolloutConfig
from forge.errors import ServiceStopped
from forge.rollout.buffer import ReplayBuffer
from forge.rollout.ledger import Ledger, LedgerLine, check_ledger, read_ledger
from forge.runtime.pending_calls import PendingCalls
from forge.service.calls import CallOptions
from forge.service.records import Request
from forge.service.routing import least_loaded
from forge.service.routing_table import RoutingTable
from forge.service.targets import Entry
from forge.types import Completion, Episode, Group, Score, Task, VersionSpan
from harness.linear_table import LinearTable
from harness.simulated_cluster import Cluster, Costs

LIMIT = 4
REQUEST = Request("generate", None, 0)

# ---- what the routing table costs


class _Verb:
    def broadcast(self, *args: Any) -> None: ...


class _Actor:
    _forge_invoke = _forge_connect = _forge_cancel = _Verb()


def fill(kind: type[RoutingTable], num_replicas: int) -> RoutingTable:
    """Return a table of healthy replicas."""
    table = kind("worker", router=least_loaded, limit=LIMIT, max_queue=None)
    for index in range(num_replicas):
        table.update(Entry(index, 0, "healthy", _Actor(), f"host{index // 10}", num_ranks=1), PendingCalls())
    return table


def cpu_us(work: Callable[[], None], *, at_least_s: float) -> float:
    """Return the CPU time of `work` in microseconds, the best of three parts of so many seconds in all."""
    best = float("inf")
    for _ in range(3):
        count, began = 0, time.process_time()
        while (spent := time.process_time() - began) < at_least_s / 3 or not count:
            work()
            count += 1
        best = min(best, spent / count)
    return 1e6 * best


def table_costs(kind: type[RoutingTable], num_replicas: int, *, at_least_s: float) -> dict[str, float]:
    """Return CPU time in microseconds of what a caller's process does for a call, a session and a change."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    began = time.process_time()
    table = fill(kind, num_replicas)
    built_s = time.process_time() - began
    gc.collect()
    held_b = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    for _ in range(num_replicas):
        table.try_acquire(REQUEST)
    some = table.entries[num_replicas // 2]

    def call() -> None:
        target = table.try_acquire(REQUEST)
        assert target is not None
        table.release(target)

    def session() -> None:
        table.pin("s")
        target = table.try_acquire(Request("generate", "s", 0))
        assert target is not None
        table.release(target)
        table.unpin("s")

    return {
        "call_us": cpu_us(call, at_least_s=at_least_s),
        "session_us": cpu_us(session, at_least_s=at_least_s),
        "change_us": cpu_us(lambda: table.update(some), at_least_s=at_least_s),
        "whole_table_s": built_s,
        "bytes_per_replica": held_b / num_replicas,
    }


def compare_tables(sizes: tuple[int, ...], *, at_least_s: float) -> list[dict[str, Any]]:
    """Return a row for each size: the table as it was, and as it is."""
    kinds = {"before": LinearTable, "after": RoutingTable}
    return [
        {"num_replicas": size, **{name: table_costs(kind, size, at_least_s=at_least_s) for name, kind in kinds.items()}}
        for size in sizes
    ]


def profile_calls(kind: type[RoutingTable], num_replicas: int, num_calls: int) -> list[dict[str, Any]]:
    """Return the functions that most of the CPU time of calls goes to."""
    table, profile = fill(kind, num_replicas), cProfile.Profile()
    profile.enable()
    for _ in range(num_calls):
        target = table.try_acquire(REQUEST)
        assert target is not None
        table.release(target)
    profile.disable()
    stats = pstats.Stats(profile)
    total: float = stats.total_tt  # type: ignore[attr-defined]
    found: list[tuple[float, str]] = sorted(
        ((own, name) for (_, _, name), (_, _, own, _, _) in stats.stats.items()),  # type: ignore[attr-defined]
        reverse=True,
    )
    return [{"function": name, "share": own / total} for own, name in found[:3]]


# ---- a run on simulated hosts


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A simulated run: hosts with ten replicas each, groups of calls, and a host that is lost on the way."""

    num_hosts: int
    per_host: int = 10
    group_size: int = 4
    calls_per_replica: int = 2
    service_s: float = 5.0
    num_batches: int = 3
    lose_host_at_s: float | None = 4.0

    @property
    def num_replicas(self) -> int:
        return self.num_hosts * self.per_host

    @property
    def num_in_flight(self) -> int:
        return max(1, self.num_replicas * self.calls_per_replica // self.group_size)


def make_group(number: int, version: int, size: int) -> Group:
    """Return a group of short completions that differ in their rewards."""
    span = (VersionSpan(version, 0, 1),)
    task = Task(f"simulated:{number}", messages=({"role": "user", "content": "?"},), answer="1")
    completion = Completion((1,), (2,), (-0.5,), None, "1", "stop", versions=span)
    episodes = [Episode.single(task, completion, Score(float(index % 2))) for index in range(size)]
    return Group(number, 0, tuple(episodes))


class Rollouts:
    """What a run does with the cluster: admit groups, call, put, take batches, and write the ledger."""

    def __init__(self, cluster: Cluster, scenario: Scenario, folder: Path) -> None:
        self.cluster, self.scenario = cluster, scenario
        batch = scenario.num_in_flight
        self.num_groups = batch * scenario.num_batches
        config = RolloutConfig(batch_groups=batch, staleness=1, max_in_flight=batch)
        self.buffer = ReplayBuffer(config, num_groups=self.num_groups)
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.waits_s: list[float] = []

    async def run(self) -> None:
        """Roll out every group, and learn from all of them."""
        training = asyncio.create_task(self._train())
        try:
            async with asyncio.TaskGroup() as groups:
                while (number := await self.buffer.admit()) is not None:
                    groups.create_task(self._roll_out(number))
            await training
        finally:
            training.cancel()
            self.ledger.close()

    async def _roll_out(self, number: int) -> None:
        version = self.buffer.version
        await asyncio.gather(*(self._call() for _ in range(self.scenario.group_size)))
        self.buffer.put(make_group(number, version, self.scenario.group_size))

    async def _call(self) -> None:
        loop, path = asyncio.get_running_loop(), self.cluster.path
        began = loop.time()
        await path.route(self.cluster.spec, (), {}, CallOptions())
        self.waits_s.append(loop.time() - began - self.scenario.service_s)

    async def _train(self) -> None:
        while (batch := await self.buffer.take()) is not None:
            lines = [LedgerLine(batch.index, each.number, 0, "simulated", "trained") for each in batch.groups]
            self.ledger.write(lines)
            self.buffer.commit()
            self.buffer.serve(batch.index + 1)


async def _is_over(rollouts: Rollouts) -> bool:
    """Roll out; return whether the run was lost on the way, as a controller without a moment to spare takes every host
    for lost."""
    try:
        await rollouts.run()
    except ExceptionGroup as failures:
        if failures.split(ServiceStopped)[1] is not None:
            raise
        return True
    return False


async def simulate(scenario: Scenario, costs: Costs) -> dict[str, Any]:
    """Run a scenario on the running (virtual) loop, and return what it counted and how long it took there."""
    loop = asyncio.get_running_loop()
    cluster = Cluster(
        costs,
        num_hosts=scenario.num_hosts,
        num_replicas=scenario.num_replicas,
        limit=LIMIT,
        service_s=scenario.service_s,
    )
    await cluster.start()
    network, began, busy_s, heartbeats = cluster.network, loop.time(), cluster.network.busy_s, 0
    heartbeats = network.num_heartbeats
    if scenario.lose_host_at_s is not None:
        loop.call_later(scenario.lose_host_at_s, setattr, cluster.hosts[0], "is_cut_off", True)
    with tempfile.TemporaryDirectory() as folder:
        rollouts = Rollouts(cluster, scenario, Path(folder))
        is_over = await _is_over(rollouts)
        lines = list(read_ledger(rollouts.ledger.path))
        if not is_over:
            check_ledger(lines, pending=rollouts.buffer.pending, next_number=rollouts.buffer.next_number)
    took_s = loop.time() - began
    waits = sorted(rollouts.waits_s)
    if not waits:
        waits = [math.nan]
    return {
        "num_hosts": scenario.num_hosts,
        "num_replicas": scenario.num_replicas,
        "is_lost": is_over,
        "num_answered": len(rollouts.waits_s),
        "num_sent": network.num_calls,
        "num_retried": cluster.path.num_retried,
        "num_ledger_lines": len(lines),
        "num_hosts_lost": sum(host.is_lost for host in cluster.hosts),
        "num_restarts": sum(max(0, each.num_starts - 1) for each in cluster.supervisor.replicas),
        "virtual_s": took_s,
        "calls_per_s": len(rollouts.waits_s) / took_s,
        "heartbeats_per_s": (network.num_heartbeats - heartbeats) / took_s,
        "controller_busy": (network.busy_s - busy_s) / took_s,
        "added_wait_median_s": statistics.median(waits),
        "added_wait_p99_s": waits[int(0.99 * (len(waits) - 1))],
    }
