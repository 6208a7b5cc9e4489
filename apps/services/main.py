"""A service that survives: three replicas, 32 callers, one kill -9, no lost call.

Run it with `python apps/services/main.py`. It shows what the rest of the library stands on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import forge
from forge import ForgeActor, endpoint
from forge.observe import start_logging

NUM_REPLICAS = 3
NUM_CALLERS = 32


class Policy(ForgeActor):
    """Stands for a model: loading takes a moment, answering a little."""

    @endpoint
    async def setup(self) -> None:
        self.num_answered = 0

    @endpoint(retry=True, concurrent=True)
    async def answer(self, question: str) -> str:
        await asyncio.sleep(0.02)
        self.num_answered += 1
        return f"process {os.getpid()} says: {question[::-1]}"


async def keep_asking(policy: forge.Service[Policy], stop: asyncio.Event) -> int:
    """One caller: ask again and again, and count the answers."""
    count = 0
    while not stop.is_set():
        await policy.answer.route(f"question {count}")
        count += 1
    return count


async def main() -> None:
    async with forge.run():
        started = time.perf_counter()
        policy = await Policy.options(num_replicas=NUM_REPLICAS).as_service()
        print(f"{NUM_REPLICAS} replicas are up after {time.perf_counter() - started:.2f} s")
        print(await policy.answer.route("hello"))

        stop = asyncio.Event()
        callers = [asyncio.create_task(keep_asking(policy, stop)) for _ in range(NUM_CALLERS)]
        await asyncio.sleep(1)
        victim = (await policy.get_metrics()).replicas[0].pids[0]
        print(f"{NUM_CALLERS} callers are busy; kill -9 of process {victim}")
        killed = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        await policy.wait_until(lambda metrics: metrics.restarts == 1 and metrics.num_healthy == NUM_REPLICAS)
        print(f"the replica is back after {time.perf_counter() - killed:.2f} s")
        await asyncio.sleep(1)
        stop.set()
        served = sum(await asyncio.gather(*callers))

        metrics = await policy.get_metrics()
        print(f"{served} calls were answered, {metrics.num_retried} of them sent again after the kill, none was lost")
        for replica in metrics.replicas:
            print(
                f"  replica {replica.index}: {replica.health}, process {replica.pids[0]}, "
                f"{replica.num_ok} calls, {replica.restarts} restarts"
            )


if __name__ == "__main__":
    start_logging("warning")
    asyncio.run(main())
