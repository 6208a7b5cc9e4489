"""What does a service cost, and how fast does it heal?

Four questions, answered in one run: routed calls against a bare Monarch call to the same actor; against Ray actors
behind a round robin (`--with-ray`); the time from `kill -9` to the first call that the restarted replica serves; how
cost grows from 1 to 16 replicas. Rates on a busy machine drift, so both sides of a comparison are measured in short
windows that alternate (A B, B A, ...), and the result is the median of the ratios of neighbouring windows. CPU time per
call is given beside it: it depends less on what else runs.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import itertools
import json
import logging
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import monarch.actor
import psutil

import forge
from forge import ForgeActor, endpoint
from forge.errors import ActorFailure
from harness.ray_peer import RayPeer, make_environment
from harness.report import comparison_table, machine, table, verdict
from harness.windows import Side, alternate, calling, compare, cpu_s, resident_b, spread

NUM_CALLERS = 64
GIVE_UP_S = 60.0
SECTIONS = ("monarch", "ray", "recovery", "scale")


class Echo(ForgeActor):
    """A light actor: what is measured is the way to it."""

    @endpoint
    async def f(self, x: int) -> int:
        return x

    @monarch.actor.endpoint  # type: ignore[untyped-decorator]
    async def bare(self, x: int) -> int:
        return x

    @monarch.actor.endpoint(instrument=False)  # type: ignore[untyped-decorator]
    async def bare_untraced(self, x: int) -> int:
        return x

    @endpoint(retry=True)
    async def pid(self) -> int:
        return os.getpid()

    @endpoint(concurrent=True)
    async def hold(self) -> None:
        await asyncio.Event().wait()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to measure."""

    num_rounds: int
    num_ray_rounds: int
    window_s: float
    num_kills: int
    num_loaded_kills: int
    sizes: tuple[int, ...]
    idle_s: float


FULL = Plan(
    num_rounds=40,
    num_ray_rounds=16,
    window_s=0.25,
    num_kills=10,
    num_loaded_kills=10,
    sizes=(1, 2, 4, 8, 16),
    idle_s=2.0,
)
QUICK = Plan(
    num_rounds=6,
    num_ray_rounds=4,
    window_s=0.15,
    num_kills=3,
    num_loaded_kills=1,
    sizes=(1, 4),
    idle_s=0.5,
)


# ---- the questions


async def pids_of(service: Any) -> tuple[int, ...]:
    metrics = await service.get_metrics()
    return (os.getpid(), *(pid for replica in metrics.replicas for pid in replica.pids))


def meshes_of(service: Any) -> list[Any]:
    """Monarch's own handle of each replica, past everything that the service adds."""
    return [target.entry.actor for target in service._table.live()]


def taking_turns(calls: Iterable[Callable[[int], Awaitable[Any]]]) -> Callable[[int], Awaitable[Any]]:
    turns = itertools.cycle(calls)
    return lambda x: next(turns)(x)


async def against_monarch(plan: Plan) -> dict[str, Any]:
    """The same actor in the same process, reached through the service and without it."""
    service = await Echo.options(num_replicas=1).as_service()
    (mesh,) = meshes_of(service)
    pids = await pids_of(service)
    ours = Side("routed", calling(service.f.route), pids)
    bare = Side("bare", calling(mesh.bare.call_one), pids)
    untraced = Side("untraced", calling(mesh.bare_untraced.call_one), pids)
    rows = []
    for num_callers, word in ((1, "one caller"), (NUM_CALLERS, f"{NUM_CALLERS} callers")):
        taken = await alternate(
            (ours, bare, untraced), num_callers=num_callers, num_rounds=plan.num_rounds, window_s=plan.window_s
        )
        rows.append(compare(f"`call_one`, {word}", taken["routed"], taken["bare"], goal=0.85))
        rows.append(compare(f"`call_one`, tracing off, {word}", taken["routed"], taken["untraced"]))
    await service.shutdown()
    return {"rows": rows}


async def against_ray(plan: Plan, environment: Path | None) -> dict[str, Any]:
    """Services and Ray actors with as many replicas, both in turn, both up during the whole comparison."""
    if environment is None:
        return {"skipped": "not measured: pass --with-ray"}
    peer = RayPeer(environment)
    try:
        rows = []
        for num_replicas in (2, 4):
            service = await Echo.options(num_replicas=num_replicas).as_service()
            ours = Side("routed", calling(service.f.route), await pids_of(service))
            for kind in ("def", "async"):
                await asyncio.to_thread(peer.start, num_replicas, kind)
                family = [process.pid for process in psutil.Process(peer.pid).children(recursive=True)]
                ray = Side("ray", peer.measure, (peer.pid, *family))
                taken = await alternate(
                    (ours, ray), num_callers=NUM_CALLERS, num_rounds=plan.num_ray_rounds, window_s=plan.window_s
                )
                what = f"Ray, `{kind}` actors, {num_replicas} replicas, {NUM_CALLERS} callers"
                rows.append(compare(what, taken["routed"], taken["ray"], goal=1.5))
            await service.shutdown()
        return {"version": peer.version, "rows": rows, "start_s": peer.start_s}
    finally:
        await asyncio.to_thread(peer.stop)


@dataclass
class Kill:
    """What one `kill -9` did to the callers. Times are in seconds after it."""

    served_s: float = 0.0
    noticed_s: float = 0.0
    num_calls: int = 0
    num_lost: int = 0


async def ask_pid(service: Any, kill: Kill) -> int | None:
    """Which process answers; None if the call was lost, which an endpoint with `retry=True` must never be."""
    kill.num_calls += 1
    try:
        return int(await service.pid.route())
    except ActorFailure:
        kill.num_lost += 1
        return None


async def kill_idle(service: Any) -> Kill:
    """Kill the only replica while one call is pending there and another is sent at that moment."""
    kill = Kill()
    old = await ask_pid(service, kill)
    assert old is not None
    pending = asyncio.create_task(service.hold.route())
    await asyncio.sleep(0)  # the pending call is sent
    await service.f.route(0)  # calls arrive in order: it is there
    began = time.perf_counter()
    os.kill(old, signal.SIGKILL)

    async def notice() -> None:
        try:
            await pending
        except ActorFailure:
            kill.noticed_s = time.perf_counter() - began
            return
        raise RuntimeError("the pending call of a killed replica returned")

    async def be_served() -> None:
        answer: int | None = None
        while answer in (None, old):
            answer = await ask_pid(service, kill)
            await asyncio.sleep(0)
        kill.served_s = time.perf_counter() - began

    await asyncio.gather(notice(), be_served())
    return kill


async def kill_loaded(service: Any) -> Kill:
    """Kill one of two replicas while all callers are busy."""
    kill = Kill()
    _, victim, *others = await pids_of(service)
    known = {None, victim, *others}
    came_back: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def caller() -> None:
        while not came_back.done():
            if await ask_pid(service, kill) not in known and not came_back.done():
                came_back.set_result(time.perf_counter())

    callers = [asyncio.create_task(caller()) for _ in range(NUM_CALLERS)]
    while kill.num_calls < 10 * NUM_CALLERS:
        await service.f.route(0)
    began = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    await asyncio.gather(*callers)
    kill.served_s = await came_back - began
    return kill


async def kill_often(num_replicas: int, kill: Callable[[Any], Awaitable[Kill]], num_kills: int) -> list[Kill]:
    service = await Echo.options(num_replicas=num_replicas).as_service()
    kills = [await asyncio.wait_for(kill(service), GIVE_UP_S) for _ in range(num_kills)]
    await service.shutdown()
    return kills


async def recovery(plan: Plan) -> dict[str, Any]:
    idle = await kill_often(1, kill_idle, plan.num_kills)
    loaded = await kill_often(2, kill_loaded, plan.num_loaded_kills)
    rows = [
        spread("a pending call raises `ActorFailure`", [kill.noticed_s for kill in idle]),
        spread("the restarted replica serves a call", [kill.served_s for kill in idle], goal=1.5),
        spread(f"the same while {NUM_CALLERS} callers are busy", [kill.served_s for kill in loaded], goal=1.5),
    ]
    num_calls, num_lost = (sum(getattr(kill, name) for kill in (*idle, *loaded)) for name in ("num_calls", "num_lost"))
    return {"rows": rows, "retried": {"num_calls": num_calls, "num_lost": num_lost, "met": num_lost == 0}}


async def scale(plan: Plan) -> dict[str, Any]:
    """One service after another, each larger; the peer is a bare round robin over the same replicas."""
    rows = []
    for size in plan.sizes:
        held_b, began = resident_b(os.getpid()), time.perf_counter()
        service = await Echo.options(num_replicas=size).as_service()
        start_s = time.perf_counter() - began
        pids = await pids_of(service)
        memory = [psutil.Process(pid).memory_full_info() for pid in pids]
        bare = taking_turns([mesh.bare.call_one for mesh in meshes_of(service)])
        sides = (Side("routed", calling(service.f.route), pids), Side("bare", calling(bare), pids))
        num_rounds = max(3, plan.num_rounds // 4)
        taken = await alternate(sides, num_callers=NUM_CALLERS, num_rounds=num_rounds, window_s=plan.window_s)
        row = compare(f"{size}", taken["routed"], taken["bare"])
        before = [cpu_s(pid) for pid in pids]
        await asyncio.sleep(plan.idle_s)
        idle = [(cpu_s(pid) - start) / plan.idle_s for pid, start in zip(pids, before, strict=True)]
        row |= {
            "num_replicas": size,
            "start_s": start_s,
            "idle_caller_cpu": idle[0],
            "idle_total_cpu": sum(idle),
            "caller_mb": memory[0].rss / 1e6,
            "caller_added_mb": (memory[0].rss - held_b) / 1e6,
            "replica_mb": statistics.fmean(entry.rss / 1e6 for entry in memory[1:]),
            "replica_own_mb": statistics.fmean(entry.uss / 1e6 for entry in memory[1:]),
        }
        rows.append(row)
        await service.shutdown()
    return {"rows": rows}


# ---- the report


def scale_table(rows: Iterable[dict[str, Any]]) -> str:
    head = (
        "replicas", "start s", "calls/s (best)", "ratio to bare", "controller CPU µs a call", "idle controller CPU",
        "controller MB added", "MB a replica (not shared)",
    )  # fmt: skip
    return table(
        head,
        (
            (
                str(row["num_replicas"]),
                f"{row['start_s']:.2f}",
                f"{row['ours']['rate']:,.0f} ({row['ours']['rate_best']:,.0f})",
                f"{row['ratio']:.2f}",
                f"{row['ours']['caller_cpu_us']:.0f}",
                f"{row['idle_caller_cpu']:.1%}",
                f"{row['caller_added_mb']:.1f}",
                f"{row['replica_mb']:.0f} ({row['replica_own_mb']:.0f})",
            )
            for row in rows
        ),
    )


def recovery_table(rows: Iterable[dict[str, Any]]) -> str:
    cells = (
        (row["what"], f"{row['median_s']:.3f}", f"{row['worst_s']:.3f}", str(len(row["seconds"])), verdict(row, "<"))
        for row in rows
    )
    return table(("after `kill -9` of a replica", "median s", "worst s", "kills", "goal"), cells)


def report(found: dict[str, Any]) -> str:
    tables = {"monarch": comparison_table, "ray": comparison_table, "recovery": recovery_table, "scale": scale_table}
    parts = []
    for name, section in found["sections"].items():
        parts.append(f"Ray: {section['skipped']}" if "skipped" in section else tables[name](section["rows"]))
        if "retried" in section:
            retried = section["retried"]
            parts.append(f"Calls with `retry=True` lost meanwhile: {retried['num_lost']} of {retried['num_calls']:,}.")
    return "\n\n".join(parts)


def goals_missed(found: dict[str, Any]) -> list[str]:
    missed = []
    for name, section in found["sections"].items():
        missed += [f"{name}: {row['what']}" for row in section.get("rows", ()) if row["met"] is False]
        if section.get("retried", {}).get("met") is False:
            missed.append(f"{name}: calls were lost")
    return missed


async def measure_all(plan: Plan, sections: Sequence[str], environment: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": machine(), "plan": vars(plan), "sections": {}}
    questions: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
        "monarch": lambda: against_monarch(plan),
        "ray": lambda: against_ray(plan, environment),
        "recovery": lambda: recovery(plan),
        "scale": lambda: scale(plan),
    }
    async with forge.run():
        for name in sections:
            print(f"measuring: {name}", file=sys.stderr, flush=True)
            found["sections"][name] = await questions[name]()
    found["machine"]["load_after"] = os.getloadavg()[0]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of less than half a minute")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="answer this question only (repeatable)")
    parser.add_argument("--with-ray", action="store_true", help="compare with Ray, installed into .venv-ray if need be")
    parser.add_argument("--ray-venv", type=Path, help="compare with Ray in this environment")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal was missed")
    chosen = parser.parse_args()
    environment: Path | None = chosen.ray_venv
    if environment is not None and not (environment / "bin" / "python").exists():
        parser.error(f"--ray-venv {environment}: no environment there; --with-ray makes one")
    if environment is None and chosen.with_ray:
        environment = Path(__file__).resolve().parent.parent / ".venv-ray"
        make_environment(environment)
    logging.getLogger("forge").setLevel(logging.ERROR)  # replicas are killed on purpose here
    found = asyncio.run(measure_all(QUICK if chosen.quick else FULL, chosen.only or SECTIONS, environment))
    facts = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    print(f"{facts}\n\n{report(found)}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    missed = goals_missed(found)
    print("\n" + ("goals missed: " + "; ".join(missed) if missed else "every goal measured was met"))
    return 1 if chosen.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
