"""How many replicas and calls does one controller carry, and what bounds it?

Four parts. `costs` measures a few real replicas: CPU time of the controller for a call, for a heartbeat, and for a
replica that only exists. `tables` measures the routing table from 10 to 10,000 replicas, as it was (the peer, which
looks at every replica) and as it is. `simulation` runs the library's own routing, admission, health and ledger code on
a virtual clock for 10, 100 and 1,000 hosts, with the measured costs. `validation` starts as many light actors as memory
allows and compares them with what the costs predict. CPU time is used throughout: it depends less on what else runs.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import forge
from forge import ForgeActor, endpoint
from forge.runtime.backend import stop_client
from forge.runtime.replies import stop_replies
from forge.service.routing_table import RoutingTable
from forge.service.supervisor import heartbeat_pause_s
from harness.control_sim import Scenario, compare_tables, profile_calls, simulate
from harness.linear_table import LinearTable
from harness.report import machine, table
from harness.simulated_cluster import Costs
from harness.virtual_clock import run_virtually
from harness.windows import count_calls, cpu_s, resident_b

NUM_CALLERS = 64
QUIET_S = 600.0
SECTIONS = ("costs", "tables", "simulation", "validation")
ASSUMED = {"latency_us": 300.0, "call_us": 150.0, "heartbeat_us": 150.0, "idle_us_per_s": 0.0, "table_us": 10.0}
"""Used where `costs` is not measured: round numbers, so that a simulation is the same every time."""


class Light(ForgeActor):
    """An actor that does nothing: what is measured is the controller."""

    @endpoint(concurrent=True)
    async def f(self, x: int) -> int:
        return x


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to measure."""

    num_real: int
    num_validated: int
    window_s: float
    sizes: tuple[int, ...]
    part_s: float
    num_hosts: tuple[int, ...]


FULL = Plan(
    num_real=4, num_validated=100, window_s=4.0, sizes=(10, 100, 1000, 10_000), part_s=0.3, num_hosts=(10, 100, 1000)
)
QUICK = Plan(num_real=2, num_validated=4, window_s=0.5, sizes=(10, 100), part_s=0.03, num_hosts=(2, 10))


# ---- real processes


async def cpu_of_idle(seconds: float) -> float:
    """Return the share of a core that this process uses while nothing is called."""
    before, began = cpu_s(os.getpid()), time.perf_counter()
    await asyncio.sleep(seconds)
    return (cpu_s(os.getpid()) - before) / (time.perf_counter() - began)


async def latency_s(service: Any, num_calls: int = 300) -> float:
    """Return half of the median time of a call while there is no other one: one way, with what both sides do."""
    times = []
    for number in range(num_calls):
        began = time.perf_counter()
        await service.f.route(number)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / 2


async def measure_service(num_replicas: int, plan: Plan) -> dict[str, float]:
    """Return what a service of light actors costs its controller, in microseconds of CPU time."""
    held_b, began = resident_b(os.getpid()), time.perf_counter()
    beat_s = max(0.02, num_replicas / 1000)
    service = await Light.options(num_replicas=num_replicas, routing="least_loaded", heartbeat_s=beat_s).as_service()
    start_s = time.perf_counter() - began
    added_b = resident_b(os.getpid()) - held_b
    supervisor = service._supervisor
    beating = await cpu_of_idle(plan.window_s)
    supervisor.options = replace(supervisor.options, heartbeat_s=QUIET_S)
    await cpu_of_idle(2 * beat_s + 0.2)  # the last heartbeats
    idle = await cpu_of_idle(plan.window_s)
    one_way_s = await latency_s(service)
    before = cpu_s(os.getpid())
    num_calls, seconds = await count_calls(service.f.route, num_callers=NUM_CALLERS, seconds=plan.window_s)
    spent_s = cpu_s(os.getpid()) - before - idle * seconds
    await service.shutdown()
    num_beats_per_s = num_replicas / heartbeat_pause_s(beat_s, num_replicas)
    return {
        "num_replicas": num_replicas,
        "start_s": start_s,
        "controller_kb_per_replica": added_b / 1e3 / num_replicas,
        "latency_us": 1e6 * one_way_s,
        "call_us": 1e6 * spent_s / num_calls,
        "calls_per_s": num_calls / seconds,
        "heartbeats_per_s": num_beats_per_s,
        "heartbeat_us": 1e6 * (beating - idle) / num_beats_per_s,
        "idle_core": idle,
        "idle_us_per_s": 1e6 * idle / num_replicas,
    }


# ---- what follows from the costs


def bounds(rows: Sequence[dict[str, Any]], costs: dict[str, float]) -> list[dict[str, Any]]:
    """Return for each size what one core of the controller can take, with the table as it was and as it is."""
    found = []
    for row in rows:
        size, cell = row["num_replicas"], {}
        for name in ("before", "after"):
            call_us = costs["call_us"] - costs["table_us"] + row[name]["call_us"]
            pause_s = 1.0 if name == "before" else heartbeat_pause_s(1.0, size)
            cell[name] = {
                "call_us": call_us,
                "calls_per_s": 1e6 / call_us,
                "heartbeat_core": size / pause_s * costs["heartbeat_us"] / 1e6,
                "pause_s": pause_s,
            }
        found.append({"num_replicas": size, **cell})
    return found


def simulate_all(plan: Plan, costs: dict[str, float], tables: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Run each scenario with the table's cost as it is; with measured tables, also as it was."""
    rows = []
    for num_hosts in plan.num_hosts:
        scenario = Scenario(num_hosts=num_hosts)
        for name in ("before", "after") if tables else ("after",):
            size = min(tables or (), key=lambda row: abs(row["num_replicas"] - scenario.num_replicas), default=None)
            table_us = costs["table_us"] if size is None else size[name]["call_us"]
            model = Costs(
                latency_s=costs["latency_us"] / 1e6,
                call_cpu_s=(costs["call_us"] - costs["table_us"]) / 1e6,
                table_cpu_s=table_us / 1e6,
                heartbeat_cpu_s=costs["heartbeat_us"] / 1e6,
            )
            print(f"simulating: {scenario.num_replicas} replicas, table {name}", file=sys.stderr, flush=True)
            rows.append({"table": name, **run_virtually(simulate(scenario, model))})
    return rows


def validate(real: dict[str, float], costs: dict[str, float]) -> list[dict[str, Any]]:
    """Return what was measured with many replicas beside what the costs of a few predict."""
    calls = 1e6 / costs["call_us"]
    busy = real["heartbeats_per_s"] * costs["heartbeat_us"] / 1e6
    return [
        {"what": "controller CPU µs a call", "predicted": costs["call_us"], "measured": real["call_us"]},
        {"what": "calls/s for each core of the controller", "predicted": calls, "measured": 1e6 / real["call_us"]},
        {
            "what": f"share of a core for {real['heartbeats_per_s']:,.0f} heartbeats/s",
            "predicted": busy,
            "measured": real["heartbeats_per_s"] * real["heartbeat_us"] / 1e6,
        },
        {
            "what": "share of a core while nothing is called and no heartbeat is asked for",
            "predicted": costs["idle_us_per_s"] * real["num_replicas"] / 1e6,
            "measured": real["idle_core"],
        },
    ]


# ---- the report


def costs_table(rows: Iterable[dict[str, float]]) -> str:
    names = {
        "num_replicas": "replicas", "start_s": "start s", "call_us": "CPU µs a call", "calls_per_s": "calls/s",
        "latency_us": "µs one way", "heartbeat_us": "CPU µs a heartbeat", "idle_us_per_s": "idle CPU µs/s a replica",
        "controller_kb_per_replica": "controller KB a replica",
    }  # fmt: skip
    return table(tuple(names.values()), (tuple(f"{row[name]:,.4g}" for name in names) for row in rows))


def tables_table(rows: Iterable[dict[str, Any]]) -> str:
    head = ("replicas", "µs a call", "ratio", "µs a session", "µs a change", "s for the whole table", "bytes a replica")
    cells = []
    for row in rows:
        old, new = row["before"], row["after"]
        pairs = ("session_us", "change_us", "whole_table_s", "bytes_per_replica")
        cells.append(
            (
                f"{row['num_replicas']:,}",
                f"{old['call_us']:,.4g} → {new['call_us']:,.4g}",
                f"{old['call_us'] / new['call_us']:.1f}",
                *(f"{old[name]:,.4g} → {new[name]:,.4g}" for name in pairs),
            )
        )
    return table(head, cells)


def bounds_table(rows: Iterable[dict[str, Any]]) -> str:
    head = ("replicas", "controller CPU µs a call", "calls/s a core", "heartbeats: share of a core", "pause s")
    both = ("call_us", "calls_per_s", "heartbeat_core", "pause_s")
    cells = (
        (f"{row['num_replicas']:,}", *(f"{row['before'][name]:,.3g} → {row['after'][name]:,.3g}" for name in both))
        for row in rows
    )
    return table(head, cells)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else f"{value:,.4g}"


def simulation_table(rows: Iterable[dict[str, Any]]) -> str:
    names = {
        "num_hosts": "hosts", "num_replicas": "replicas", "table": "table", "num_answered": "calls",
        "calls_per_s": "calls/s", "heartbeats_per_s": "heartbeats/s", "controller_busy": "controller busy",
        "added_wait_median_s": "added s, median", "added_wait_p99_s": "added s, p99", "num_retried": "retried",
        "num_restarts": "restarts", "num_hosts_lost": "hosts lost", "is_lost": "run lost",
    }  # fmt: skip
    cells = ((_cell(row[name]) for name in names) for row in rows)
    return table(tuple(names.values()), (tuple(row) for row in cells))


def ratio(row: dict[str, Any]) -> float:
    return float(row["measured"] / row["predicted"])


def validation_table(rows: Iterable[dict[str, Any]]) -> str:
    cells = (
        (
            row["what"],
            f"{row['predicted']:,.4g}",
            f"{row['measured']:,.4g}",
            f"{row['measured'] / row['predicted']:.2f}",
        )
        for row in rows
    )
    return table(("what", "predicted", "measured", "ratio"), cells)


def report(found: dict[str, Any]) -> str:
    shown = {
        "real": costs_table, "tables": tables_table, "bounds": bounds_table, "simulation": simulation_table,
        "validation": validation_table,
    }  # fmt: skip
    parts = [make(found[name]) for name, make in shown.items() if found.get(name)]
    for name, rows in found.get("profile", {}).items():
        shares = ", ".join(f"`{row['function']}` {row['share']:.0%}" for row in rows)
        parts.append(f"Profile of calls, table {name}: {shares}")
    return "\n\n".join(parts)


async def measure_real(plan: Plan, sizes: Sequence[int]) -> list[dict[str, float]]:
    async with forge.run():
        found = []
        for size in sizes:
            print(f"measuring: {size} real replicas", file=sys.stderr, flush=True)
            found.append(await measure_service(size, plan))
        return found


def measure_all(plan: Plan, sections: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": machine(), "plan": vars(plan)}
    costs = dict(ASSUMED)
    try:
        is_real = {"costs", "validation"} & set(sections)
        if is_real:
            sizes = (plan.num_real, *((plan.num_validated,) if "validation" in sections else ()))
            found["real"] = asyncio.run(measure_real(plan, sizes))
            costs |= found["real"][0]
        if "tables" in sections:
            print("measuring: tables", file=sys.stderr, flush=True)
            found["tables"] = compare_tables(plan.sizes, at_least_s=plan.part_s)
            kinds = {"before": LinearTable, "after": RoutingTable}
            found["profile"] = {name: profile_calls(kind, plan.sizes[-1], 50) for name, kind in kinds.items()}
            costs["table_us"] = found["tables"][0]["after"]["call_us"]
            found["bounds"] = bounds(found["tables"], costs)
        if "simulation" in sections:
            found["simulation"] = simulate_all(plan, costs, found.get("tables"))
        if "validation" in sections:
            found["validation"] = validate(found["real"][1], costs)
    finally:
        stop_replies()
        stop_client()
    found["costs"] = costs
    found["machine"]["load_after"] = os.getloadavg()[0]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of less than a minute")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this part only (repeatable)")
    parser.add_argument("--replicas", type=int, help="real replicas of the validation")
    parser.add_argument("--sizes", type=int, nargs="+", help="replicas in the tables that are measured")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    chosen = parser.parse_args()
    logging.getLogger("forge").setLevel(logging.CRITICAL)  # a simulated host is lost on purpose
    plan = QUICK if chosen.quick else FULL
    if chosen.replicas is not None:
        plan = replace(plan, num_validated=chosen.replicas)
    if chosen.sizes is not None:
        plan = replace(plan, sizes=tuple(chosen.sizes))
    found = measure_all(plan, chosen.only or SECTIONS)
    print(", ".join(f"{name} {value}" for name, value in found["machine"].items()) + f"\n\n{report(found)}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
