"""A process and a service, started and asked, to show that they work on this machine."""

from __future__ import annotations

import os
import signal
import time

from forge.errors import ForgeError
from forge.runtime.endpoints import endpoint
from forge.runtime.lifetime import run
from forge.service.actor import ForgeActor


class Echo(ForgeActor):
    """Answers with its process id."""

    @endpoint(retry=True)
    async def pid(self) -> int:
        return os.getpid()


async def call_an_actor() -> str:
    """Start one process, call it, stop it."""
    began = time.perf_counter()
    async with run():
        actor = await Echo.options(mesh_name="selftest").as_actor()
        pid = await actor.pid.call_one()
        if pid == os.getpid():
            raise ForgeError("the actor answered from the controller's own process")
    return f"started, answered and stopped in {time.perf_counter() - began:.2f} s"


async def call_a_service() -> str:
    """Start two replicas, call each, kill one, and call until it is back."""
    async with run():
        service = await Echo.options(mesh_name="selftest", num_replicas=2).as_service()
        before = set(await service.pid.fanout())
        if len(before) != 2:
            raise ForgeError("two replicas should be two processes", value=before)
        victim = min(before)
        began = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        calls = 0
        while True:
            calls += 1
            if await service.pid.route() not in before:
                break
        took = time.perf_counter() - began
    return f"2 replicas; one was killed and was back after {took:.2f} s and {calls} calls"
