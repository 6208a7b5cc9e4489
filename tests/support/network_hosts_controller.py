"""A controller on a host of a test network. Run as a process there; it answers each line of its input with one line.

usage: network_hosts_controller.py SCENARIO BIND ADDRESS…, the addresses of the workers
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import forge
import grpo_runs
from actors import Worker
from forge.cli import main as cli
from forge.config import LauncherConfig
from forge.loops.run_paths import run_dir
from forge.loops.workers import Workers
from forge.runtime.control import control
from forge.runtime.lifetime import runtime
from forge.service.hosts import add_host, list_hosts


async def next_line() -> str:
    return (await asyncio.to_thread(sys.stdin.readline)).strip()


def reply(value: object) -> None:
    print(json.dumps(value), flush=True)


async def places(service: Any) -> list[str]:
    return sorted(replica.host for replica in (await service.get_metrics()).replicas)


@contextlib.asynccontextmanager
async def callers(service: Any, count: int) -> AsyncIterator[list[int]]:
    """Call all the time; a call that fails fails the scenario. Gives the number of answers, in a list of one."""
    served, stop = [0], asyncio.Event()

    async def call() -> None:
        while not stop.is_set():
            await service.nap.route(0.02)
            served[0] += 1

    tasks = [asyncio.create_task(call()) for _ in range(count)]
    try:
        yield served
    finally:
        stop.set()
        await asyncio.gather(*tasks)


def has_left(address: str, metrics: Any) -> bool:
    """Return whether every replica is healthy, and none is on this host."""
    return metrics.num_healthy == len(metrics.replicas) and all(each.host != address for each in metrics.replicas)


async def serve() -> None:
    """Two hosts with two replicas each. One more joins, and the hosts that are named are lost, while calls go on."""
    service = await Worker.options(num_replicas=4).as_service()
    reply({"places": await places(service), "pids": len(await service.pid.fanout())})
    async with callers(service, 4) as served:
        while line := await next_line():
            word, _, address = line.partition(" ")
            if word == "join":
                await add_host(address)
                await service.resize(6)
            elif word == "lose":
                await service.wait_until(functools.partial(has_left, address), timeout_s=600)
            before = served[0]
            await service.pid.fanout()
            while served[0] == before:
                await service.nap.route(0)
            reply({"places": await places(service), "states": {host.name: host.state for host in list_hosts()}})


async def publish_and_fetch() -> None:
    """Weights that two ranks of one host publish by rows, and two of the other host fetch by columns."""
    from store_hosts_controller import NUM_BYTES, SHAPES, Place, answers, fetched
    from store_traffic import num_bytes_sent, relaying

    place = Place()
    await place.open()
    before = sum(await answers(place.trainer, num_bytes_sent))
    found = await fetched(place.readers, "s1", verify="full")
    reply(
        {
            "hosts": place.hosts,
            "digest": place.digest,
            "fetched": found,
            "relaying": await answers(place.readers, relaying),
            "sent": sum(await answers(place.trainer, num_bytes_sent)) - before,
            "needed": NUM_BYTES,
        }
    )
    while await next_line():
        published = await place.trainer.publish.call("policy", 1, SHAPES, "s0")
        reply({"digest": next(iter(published.items()))[1].digest, "fetched": await fetched(place.readers, "s1")})


async def opened(fifo: str) -> int:
    """Wait until the import reads the FIFO. A thread that waited in `open` could not be ended by the time limit."""
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            await asyncio.sleep(0.05)


async def ask_while_importing() -> None:
    """Ask a host for something while it imports what a rank needs."""
    with tempfile.TemporaryDirectory() as folder:
        held = os.path.join(folder, "held")
        os.mkfifo(held)
        options = Worker.options(preload=("held_import",), env={"HELD_IMPORT": held})
        starting = asyncio.create_task(options.as_actor())
        gate = await opened(held)
        port = await control().submit(runtime().hosts[0].watch.free_port())
        os.close(gate)
        actor = await starting
        reply({"port": port, "sum": await actor.add.call_one(1)})


def train(bind: str, addresses: list[str]) -> None:
    """Train with workers on the hosts. Replies with where they are when version 2 was published, and goes on when the
    generators have left the host that the answer names; and again at version 4, when another host has joined."""

    async def generators(workers: Workers) -> list[str]:
        return await places(workers.policy.service)

    async def disturb(workers: Workers, version: int) -> None:
        if version not in (2, 4):
            return
        trainer: Any = workers.trainer
        reply({"trainer": await places(trainer.service), "generators": await generators(workers)})
        word, _, address = (await next_line()).partition(" ")
        if word == "lose":
            await workers.policy.service.wait_until(functools.partial(has_left, address), timeout_s=600)
        else:
            for command in (["hosts", "--add", address], ["scale", "generators=3"]):
                name, *words = command
                assert await asyncio.to_thread(cli, [name, str(run_dir(chosen)), *words]) == 0
        reply({"generators": await generators(workers)})

    with tempfile.TemporaryDirectory() as folder:
        launcher = (f"launcher.bind={bind}", f"launcher.hosts={json.dumps(addresses)}", "launcher.kind=hosts")
        options = ("generator.num_replicas=2", "rollout.batch_groups=4", *launcher)
        chosen = grpo_runs.config(Path(folder) / "run", *options)
        result = grpo_runs.train_watched(chosen, disturb)
        reply(
            {
                "step": result.step,
                "weights": grpo_runs.weights_digest(chosen),
                "ledger": [repr(line) for line in grpo_runs.ledger(chosen)],
                "recovered": grpo_runs.metrics(chosen, "recovery/restarts"),
            }
        )


SCENARIOS = {"serve": serve, "import": ask_while_importing, "weights": publish_and_fetch}


async def main(scenario: str, bind: str, addresses: list[str]) -> None:
    config = LauncherConfig(kind="hosts", bind=bind, hosts=tuple(addresses))
    async with asyncio.timeout(600), forge.run(config):
        await SCENARIOS[scenario]()


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2], sys.argv[3:])
    else:
        asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
