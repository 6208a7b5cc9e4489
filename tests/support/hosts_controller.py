"""A controller on two "hosts": worker processes on loopback. Run as a process, since a channel is chosen only once.

usage: hosts_controller.py SCENARIO ADDRESS ADDRESS [PID OF THE FIRST WORKER]
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import forge
from actors import Worker
from forge.config import LauncherConfig
from forge.errors import PlacementError


async def spread(service) -> dict[str, object]:
    metrics = await service.get_metrics()
    spans = await Worker.options(hosts=2, procs=2).as_actor()
    ranks = [facts["RANK"] for _, facts in (await spans.describe.call()).items()]
    sums = [total for _, total in (await spans.all_reduce.call()).items()]
    try:
        await Worker.options(hosts=3).as_actor()
        refusal = ""
    except PlacementError as error:
        refusal = error.message
    return {"hosts": sorted({r.host for r in metrics.replicas}), "ranks": ranks, "sums": sums, "refusal": refusal}


async def lose_a_host(service, worker: int) -> dict[str, object]:
    """Kill the first host's worker while 16 callers call; nobody may notice."""
    lost = (await service.get_metrics()).replicas
    stop = asyncio.Event()

    async def caller() -> int:
        count = 0
        while not stop.is_set():
            await service.nap.route(0.01)
            count += 1
        return count

    callers = [asyncio.create_task(caller()) for _ in range(16)]
    os.kill(worker, signal.SIGKILL)
    metrics = await service.wait_until(
        lambda metrics: metrics.num_healthy == len(metrics.replicas) and metrics.restarts >= 1, timeout_s=600
    )
    stop.set()
    served = sum(await asyncio.gather(*callers))
    return {
        "hosts": sorted({replica.host for replica in metrics.replicas}),
        "before": sorted({replica.host for replica in lost}),
        "restarts": metrics.restarts,
        "served": served,
        "after": len(await service.pid.fanout()),
    }


async def main(scenario: str, addresses: list[str], worker: int) -> None:
    async with forge.run(LauncherConfig(kind="hosts", hosts=tuple(addresses))):
        service = await Worker.options(num_replicas=4).as_service()
        if scenario == "spread":
            print(json.dumps(await spread(service)), flush=True)
        elif scenario == "lose":
            print(json.dumps(await lose_a_host(service, worker)), flush=True)
        else:
            pids = [pid for replica in (await service.get_metrics()).replicas for pid in replica.pids]
            print(json.dumps(pids), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:4], int(sys.argv[4])))
