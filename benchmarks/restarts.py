"""How much memory does a controller keep for each process group that was started and ended, and how long does the end
of an actor take that owns others, compared with bare Monarch? How soon is a killed generator back as a fork of a
process that has imported torch, compared with one that is started by itself?

Both sides start one process with an empty actor, call it, and end it, again and again. What stays resident afterwards
is kept for as long as the controller runs. The bare side is a minimal reproduction: it has no code of ours.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NUM_WARM = 10
GOAL = 1.1
SETTLED_S = 1.0


def resident_kib() -> float:
    """Return what this process holds in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1024


async def bare(num_rounds: int) -> dict[str, Any]:
    from monarch.actor import Actor, endpoint, this_host

    class Empty(Actor):  # type: ignore[misc]
        @endpoint
        async def ping(self) -> None: ...

    class Outer(Actor):  # type: ignore[misc]
        @endpoint
        async def own(self) -> None:
            self.procs = this_host().spawn_procs({"gpus": 1}, name="inner")
            self.inner = self.procs.spawn("inner", Empty)
            await self.inner.ping.call()

    host, sizes = this_host(), []
    for number in range(NUM_WARM + num_rounds):
        procs = host.spawn_procs({"gpus": 1}, name=f"mesh{number}")
        actor = procs.spawn("actor", Empty)
        await actor.ping.call()
        await procs.stop()
        del actor, procs
        gc.collect()
        sizes.append(resident_kib())
    ends = {}
    for is_owner in (False, True):
        procs = host.spawn_procs({"gpus": 1}, name=f"outer{is_owner}")
        outer = procs.spawn("outer", Outer)
        if is_owner:
            await outer.own.call()
        else:
            await outer.initialized
        began = time.monotonic()
        await procs.stop()
        ends[str(is_owner)] = time.monotonic() - began
    return {"sizes": sizes, "ends": ends}


async def ours(num_rounds: int) -> dict[str, Any]:
    import forge

    class Empty(forge.ForgeActor):
        @forge.endpoint
        async def ping(self) -> None: ...

    class Outer(forge.ForgeActor):
        @forge.endpoint
        async def own(self) -> None:
            self.inner = await Empty.as_actor()

    sizes, ends = [], {}
    async with forge.run():
        for _ in range(NUM_WARM + num_rounds):
            actor = await Empty.as_actor()
            await actor.ping.call()
            await actor.stop()
            del actor
            gc.collect()
            sizes.append(resident_kib())
        for is_owner in (False, True):
            outer = await Outer.as_actor()
            if is_owner:
                await outer.own.call()
            began = time.monotonic()
            await outer.stop()
            ends[str(is_owner)] = time.monotonic() - began
    return {"sizes": sizes, "ends": ends}


async def generators(num_rounds: int) -> dict[str, Any]:
    """Kill a generator that is restarted as a fork, and one that is started by itself, in turns."""
    import psutil

    from forge import Generator, GeneratorConfig, run
    from forge.config import ModelConfig

    found: dict[str, list[tuple[float, float]]] = {"fork": [], "alone": []}
    async with run():
        config = GeneratorConfig(model=ModelConfig(preset="tiny"))
        services = {
            "fork": await Generator.options(num_replicas=1).as_service(config),
            "alone": await Generator.options(num_replicas=1, preload=()).as_service(config),
        }
        for number in range(num_rounds):
            for name, service in services.items():
                os.kill((await service.get_metrics()).replicas[0].pids[0], signal.SIGKILL)
                began = time.monotonic()
                await service.wait_until(
                    lambda now, number=number: (
                        now.replicas[0].generation > number and now.replicas[0].health == "healthy"
                    )
                )
                await service.generate.route("The sea", n=1, sampling={"max_tokens": 1})
                seconds = time.monotonic() - began
                times = psutil.Process((await service.get_metrics()).replicas[0].pids[0]).cpu_times()
                found[name].append((seconds, times.user + times.system))
                await asyncio.sleep(SETTLED_S)  # a service that fails too often in a row is given up
    return {name: [list(each) for each in values] for name, values in found.items()}


def show_generators(found: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Print what restarts took."""
    from harness.report import table

    middle = {name: [statistics.median(each) for each in zip(*values, strict=True)] for name, values in found.items()}
    rows = [(name, f"{wall:.2f}", f"{cpu:.2f}") for name, (wall, cpu) in middle.items()]
    print("\n" + table(("a killed generator", "s until it serves again", "CPU s of the new process"), rows))
    ratio = middle["alone"][0] / middle["fork"][0]
    print(f"\nstarted alone / as a fork: {ratio:.1f} in time, {middle['alone'][1] / middle['fork'][1]:.1f} in CPU")


def kept_kib(sizes: Sequence[float]) -> float:
    """Return what each round keeps: the slope of the sizes after the first rounds."""
    steady = sizes[NUM_WARM:]
    return statistics.linear_regression(range(len(steady)), steady).slope


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="starts and ends on each side")
    parser.add_argument("--quick", action="store_true", help="a smoke run; figures mean little")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--check", action="store_true", help="exit code 1 if the goal is missed")
    parser.add_argument("--only", choices=("groups", "generators"), help="one of the two questions")
    parser.add_argument("--side", choices=("bare", "ours", "generators"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    num_rounds = 5 if given.quick else given.rounds
    if given.side is not None:
        measure = {"bare": bare, "ours": ours, "generators": generators}[given.side]
        print(json.dumps(asyncio.run(measure(num_rounds))))
        return 0
    from harness.report import machine

    results: dict[str, Any] = {"machine": machine()}
    ratio = 0.0
    if given.only != "generators":
        results["sides"] = {side: measured(side, num_rounds) for side in ("bare", "ours")}
        ratio = show_groups(results["sides"])
    if given.only != "groups":
        results["generators"] = measured("generators", 2 if given.quick else 5)
        show_generators(results["generators"])
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(given.check and ratio > GOAL)


def measured(side: str, num_rounds: int) -> dict[str, Any]:
    """Return what a process of its own has measured."""
    command = [sys.executable, __file__, "--side", side, "--rounds", str(num_rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show_groups(sides: Mapping[str, Mapping[str, Any]]) -> float:
    """Print what process groups leave behind, and return the ratio to bare Monarch."""
    from harness.report import table

    kept = {side: kept_kib(found["sizes"]) for side, found in sides.items()}
    ratio = kept["ours"] / kept["bare"]
    rows = [
        (side, f"{kept[side]:.0f}", *(f"{sides[side]['ends'][key]:.1f}" for key in ("False", "True"))) for side in kept
    ]
    print(table(("", "KiB kept per start and end", "end of an actor, s", "end of an actor that owns another, s"), rows))
    print(f"\nkept, ours / bare Monarch: {ratio:.2f} (goal ≤ {GOAL})")
    return ratio


if __name__ == "__main__":
    sys.exit(main())
