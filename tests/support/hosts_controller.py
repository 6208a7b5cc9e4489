"""A controller on two "hosts": worker processes on loopback. Run as a process, since a channel is chosen only once.

usage: hosts_controller.py SCENARIO ADDRESS ADDRESS PID PID
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import forge
import grpo_runs
from actors import Worker
from forge.cli import main as cli
from forge.config import GRPOConfig, LauncherConfig
from forge.errors import LaunchError, PlacementError
from forge.loops.run_control import RunCommands, listening
from forge.loops.run_hosts import RunHosts
from forge.loops.run_paths import run_dir
from forge.loops.runtime_changes import with_changes
from forge.loops.workers import Workers
from forge.service.hosts import add_host, list_hosts, remove_host


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
        lambda metrics: metrics.num_healthy == len(metrics.replicas) and metrics.restarts >= 2, timeout_s=600
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


async def join_and_leave(service, addresses: list[str], folder: Path) -> dict[str, object]:
    """One host at first. Another joins, gets replicas and takes over: by `forge hosts`, as for a run in `folder`."""
    config = GRPOConfig.model_validate(
        {"run": {"output_dir": folder, "name": "run"}, "launcher": {"kind": "hosts", "hosts": addresses[:1]}}
    )
    run_dir(config).mkdir()
    hosts = RunHosts(cast(Any, SimpleNamespace(config=config, asked=None)), step=lambda: 3)

    async def ask(*words: str) -> int:
        async with listening(run_dir(config), RunCommands(hosts.handlers).answer):
            return await asyncio.to_thread(cli, ["hosts", str(run_dir(config)), *words])

    async def places() -> list[str]:
        return sorted(replica.host for replica in (await service.get_metrics()).replicas)

    def states() -> dict[str, str]:
        return {host.name: host.state for host in list_hosts()}

    said: dict[str, object] = {"first": await places()}
    said["exits"] = [await ask("--add", addresses[1]), await ask("--add", addresses[1]), await ask()]
    await service.resize(4)
    said["joined"] = await places()
    stays = await Worker.options(mesh_name="stays").as_actor()
    place = next(host.name for host in list_hosts() if "stays" in host.groups)
    said["refusals"] = [await refusal(address) for address in ("127.0.0.1:1", addresses[1])]
    said["refusals"] += [await refusal(place, add=False)]
    await stays.stop()
    held = [asyncio.ensure_future(service.hold.route("gate")) for _ in range(4)]
    while sum(map(len, await service.read_log.fanout())) < 4:
        pass
    said["exits"] += [await ask("--remove", addresses[0], "--drain-timeout", "0.5")]
    said["left"], said["states"] = await places(), states()
    said["refusals"] += [await refusal(addresses[1], add=False), await refusal(addresses[0], add=False)]
    await service.open.fanout("gate")
    said["calls"] = sorted(type(each).__name__ for each in await asyncio.gather(*held, return_exceptions=True))
    said["refusals"] += [await refusal(addresses[0])]
    said["resumed"] = with_changes(config, run_dir(config)).launcher.hosts
    return said


async def refusal(address: str, *, add: bool = True) -> str:
    try:
        await (add_host(address) if add else remove_host(address))
    except (LaunchError, PlacementError) as error:
        return error.message
    return ""


def train_without_the_host(addresses: list[str], workers: list[int]) -> dict[str, object]:
    """Train, and kill the worker of the trainer's host when version 3 has been published."""
    before: list[str] = []

    async def lose_trainer(parts: Workers, version: int) -> None:
        if version == 3 and not before:
            service: Any = parts.trainer.service  # type: ignore[attr-defined]
            before.append((await service.get_metrics()).replicas[0].host)
            os.kill(workers[addresses.index(before[0])], signal.SIGKILL)

    with tempfile.TemporaryDirectory() as folder:
        chosen = grpo_runs.config(
            Path(folder) / "whole",
            "checkpointing.asynchronous=false",
            "launcher.kind=hosts",
            f"launcher.hosts={json.dumps(addresses)}",
        )
        result = grpo_runs.train_watched(chosen, lose_trainer)
        return {
            "step": result.step,
            "hosts": before,
            "weights": grpo_runs.weights_digest(chosen),
            "restarts": grpo_runs.metrics(chosen, "recovery/restarts"),
            "ledger": [repr(line) for line in grpo_runs.ledger(chosen)],
        }


async def main(scenario: str, addresses: list[str], worker: int) -> None:
    hosts = addresses[:1] if scenario == "join" else addresses
    async with forge.run(LauncherConfig(kind="hosts", hosts=tuple(hosts))):
        if scenario == "join":
            service = await Worker.options(num_replicas=2).as_service()
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(await join_and_leave(service, addresses, Path(folder))), flush=True)
            return
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
    if sys.argv[1] == "train":
        print(json.dumps(train_without_the_host(sys.argv[2:4], [int(pid) for pid in sys.argv[4:6]])), flush=True)
    else:
        asyncio.run(main(sys.argv[1], sys.argv[2:4], int(sys.argv[4])))
