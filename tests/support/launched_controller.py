"""A controller that gets its hosts from a scheduler. Run as a process on a host of a test network.

usage: launched_controller.py OVERRIDE…, keys of `launcher` as in `launcher.kind=slurm`

It says where the replicas of its service are. Each line of its input names a host that is lost: it answers when all
replicas are elsewhere.
"""

from __future__ import annotations

import asyncio
import functools
import sys

import forge
from actors import Worker
from forge.config import ForgeConfig, load
from forge.service.hosts import list_hosts
from network_hosts_controller import has_left, next_line, places, reply
from networks import PATIENT


async def main(overrides: list[str]) -> None:
    config = load(ForgeConfig, overrides=["launcher.insecure=true", *PATIENT, *overrides]).launcher
    async with asyncio.timeout(600), forge.run(config):
        service = await Worker.options(num_replicas=len(list_hosts())).as_service()
        reply({"places": await places(service)})
        while lost := await next_line():
            await service.wait_until(functools.partial(has_left, lost), timeout_s=600)
            answers = await service.pid.fanout()
            states = {host.name: host.state for host in list_hosts()}
            reply({"places": await places(service), "states": states, "answers": len(answers)})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
