"""A controller of two "hosts" that publish and read weights. Run as a process, since a channel is chosen only once.

usage: store_hosts_controller.py SCENARIO ADDRESS ADDRESS PID PID, the last two of the workers at the addresses
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import forge
import forge.store as ts
from forge.config import LauncherConfig
from forge.errors import LaunchError
from store_actors import Rank, host_and_pid
from store_traffic import num_bytes_sent, relaying

SHAPES = {"a": (256, 384), "b": (384, 256), "c": (64, 40, 16)}
NUM_BYTES = 4 * (2 * 256 * 384 + 64 * 40 * 16)


async def answers(handle: Any, function: Any, *args: Any) -> list[Any]:
    return [answer for _, answer in (await handle.run.call(function, *args)).items()]


async def fetched(readers: Any, words: str, **options: Any) -> list[Any]:
    return [list(found) for _, found in (await readers.fetch.call("policy", SHAPES, words, options)).items()]


async def failure(readers: Any) -> str:
    """What a fetch says that must not succeed; asked until the registry has heard of the loss too."""
    try:
        return f"it succeeded: {await fetched(readers, 's1')}"
    except ts.StoreError as error:
        return str(error)


async def on_the_host_that_is_left() -> Any:
    """Two ranks where a host answers: the first that is tried may be the one that has just been lost."""
    while True:
        with contextlib.suppress(LaunchError):
            return await Rank.options(procs=2).as_actor((2,))


class Place:
    """Two ranks on each host. Groups go to the host with the fewest of them: one after the other, by turns."""

    async def open(self) -> None:
        self.trainer = await Rank.options(procs=2).as_actor((2,))
        self.readers = await Rank.options(procs=2).as_actor((2,))
        self.hosts = [(await answers(group, host_and_pid))[0][0] for group in (self.trainer, self.readers)]
        published = await self.trainer.publish.call("policy", 0, SHAPES, "s0")
        self.digest = next(iter(published.items()))[1].digest


async def reshard(place: Place) -> dict[str, object]:
    """Two ranks that publish rows, two that read columns on the other host."""
    before = sum(await answers(place.trainer, num_bytes_sent))
    halves = await fetched(place.readers, "s1")
    after = sum(await answers(place.trainer, num_bytes_sent))
    return {
        "hosts": place.hosts,
        "halves": halves,
        "full": await fetched(place.readers, "s1", verify="full"),
        "rows": await fetched(place.readers, "s0"),
        "digest": place.digest,
        "sent": after - before,
        "needed": NUM_BYTES,
        "relaying": await answers(place.readers, relaying),
    }


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the others of a group are ended with the first
            os.kill(pid, signal.SIGKILL)


async def lose_publisher(place: Place, workers: list[int]) -> dict[str, object]:
    """The publishing host is killed after it was read once, when it has a version that was not, and fetched from again
    before anybody is told."""
    first = await fetched(place.readers, "s1")
    await place.trainer.publish.call("policy", 1, SHAPES, "s0")
    pids = [pid for _, pid in await answers(place.trainer, host_and_pid)]
    kill((*pids, workers[0]))
    said = [await failure(place.readers) for _ in range(3)]
    late = await on_the_host_that_is_left()
    await late.publish.call("policy", 2, SHAPES, "s1")
    return {
        "first": first,
        "said": said,
        "pids": pids,
        "hosts": place.hosts,
        "later": await fetched(place.readers, "s0", verify="full"),
    }


async def lose_publisher_with_volumes(place: Place, workers: list[int]) -> dict[str, object]:
    """As before, but what is published from now on goes to a volume on each host."""
    volumes = await ts.setup(volumes=2, copies=2)
    await place.trainer.publish.call("policy", 1, SHAPES, "s0")
    pids = [pid for _, pid in await answers(place.trainer, host_and_pid)]
    kill((*pids, workers[0]))
    found = await fetched(place.readers, "s1", verify="full")
    late = await on_the_host_that_is_left()
    await late.publish.call("policy", 2, SHAPES, "s0")
    return {
        "volumes": len(volumes),
        "found": found,
        "later": await fetched(place.readers, "s1", verify="full"),
    }


async def reshard_and_lose(place: Place, workers: list[int]) -> dict[str, object]:
    return {"reshard": await reshard(place), "lose": await lose_publisher(place, workers)}


SCENARIOS = {"reshard and lose": reshard_and_lose, "volumes": lose_publisher_with_volumes}


async def main(scenario: str, addresses: list[str], workers: list[int]) -> None:
    async with asyncio.timeout(600), forge.run(LauncherConfig(kind="hosts", hosts=tuple(addresses))):
        place = Place()
        await place.open()
        print(json.dumps(await SCENARIOS[scenario](place, workers)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:4], [int(pid) for pid in sys.argv[4:6]]))
