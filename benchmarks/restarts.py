"""How much memory does a controller keep for each process group that was started and ended, and how long does the end
of an actor take that owns others, compared with bare Monarch?

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
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_WARM = 10
GOAL = 1.1


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
    parser.add_argument("--side", choices=("bare", "ours"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    num_rounds = 5 if given.quick else given.rounds
    if given.side is not None:
        measure = bare if given.side == "bare" else ours
        print(json.dumps(asyncio.run(measure(num_rounds))))
        return 0
    sides = {}
    for side in ("bare", "ours"):
        command = [sys.executable, __file__, "--side", side, "--rounds", str(num_rounds)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        sides[side] = json.loads(done.stdout.splitlines()[-1])
    from harness.report import machine, table

    kept = {side: kept_kib(found["sizes"]) for side, found in sides.items()}
    ratio = kept["ours"] / kept["bare"]
    rows = [
        (side, f"{kept[side]:.0f}", *(f"{sides[side]['ends'][key]:.1f}" for key in ("False", "True"))) for side in kept
    ]
    print(table(("", "KiB kept per start and end", "end of an actor, s", "end of an actor that owns another, s"), rows))
    print(f"\nkept, ours / bare Monarch: {ratio:.2f} (goal ≤ {GOAL})")
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": machine(), "kept_kib": kept, "sides": sides}, indent=1) + "\n")
    return int(given.check and ratio > GOAL)


if __name__ == "__main__":
    sys.exit(main())
