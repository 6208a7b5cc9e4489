"""Processes that publish, hold or read weights are killed or stopped: nobody reads a mixture, and nothing is leaked."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import forge
import forge.store as ts
from forge.errors import ActorFailure
from forge.runtime.rendezvous import environment
from store_actors import (
    DyingVolume,
    Rank,
    become_rank,
    count_torn,
    die_while_serving,
    num_opened,
    num_segments,
    republish,
    value,
)

Drive = Callable[[Any], Any]
SHAPES = {"a": (64, 300), "b": (300, 64), "c": (7,)}
LARGE = {"a": (1024, 4096), "b": (1024, 4096)}
TCP = {"FORGE_STORE_WAYS": "tcp"}
ELSEWHERE = {"FORGE_STORE_WAYS": "tcp", "FORGE_HOST": "elsewhere"}
"""A publisher that shares no memory with anybody: what it publishes is with it, or on volumes."""
GRACE_S = 120


def open_segments() -> list[str]:
    """The segments that this process has open or mapped."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the one that lists them
            continue
        if "memfd:forge-" in target:
            found.append(target)
    return found


def mapped_segments() -> list[str]:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return [line for line in maps if "memfd:forge-" in line]


@pytest.fixture(autouse=True)
def no_segment_stays(leaves_nothing: None) -> Iterator[None]:
    gc.collect()
    assert open_segments() == mapped_segments() == []
    yield
    gc.collect()
    assert open_segments() == mapped_segments() == []


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask other processes again and again, since what a death brings about comes after it; ends with the test."""
    while not await condition():
        continue


def kill(actor: Any, how: int = signal.SIGKILL) -> int:
    (pid,) = actor.pids
    pidfd = os.pidfd_open(pid)
    os.kill(pid, how)
    if how == signal.SIGKILL:
        assert select.select([pidfd], [], [], GRACE_S)[0], "it was killed, and lives"
    os.close(pidfd)
    return int(pid)


async def two_ranks() -> list[Any]:
    """Two actors that publish together, each in a group of its own: one outlives the other."""
    ranks = list(await asyncio.gather(Rank.as_actor(), Rank.as_actor()))
    for number, rank in enumerate(ranks):
        await rank.run.call_one(become_rank, number, 2)
    return ranks


async def publish_together(ranks: list[Any], version: int) -> list[ts.Published]:
    return list(await asyncio.gather(*(rank.publish.call_one("policy", version, SHAPES) for rank in ranks)))


def test_a_publisher_that_is_killed_half_way_is_named_and_the_last_version_stays(drive: Drive) -> None:
    async def scenario() -> None:
        ranks, reader = await asyncio.gather(two_ranks(), Rank.as_actor())
        await publish_together(ranks, 0)
        held = len(open_segments())
        for version in (1, 2):  # abandoned with a segment that was new, and with one that was used before
            doomed = ranks[1]
            (pid,) = doomed.pids
            first = asyncio.ensure_future(ranks[0].publish.call_one("policy", version, SHAPES))
            with pytest.raises(ActorFailure):
                await doomed.die_while_publishing.call_one("policy", version, SHAPES)
            with pytest.raises(ts.StoreError, match=rf"version {version} of 'policy' .*rank 1, pid {pid} on host"):
                await first
            assert (await reader.fetch.call_one("policy", SHAPES, "", {"verify": "full"}))[0] == 0
            ranks[1] = await Rank.as_actor()
            await ranks[1].run.call_one(become_rank, 1, 2)
        published = await publish_together(ranks, 3)
        assert await reader.fetch.call_one("policy", SHAPES) == (3, published[0].digest)
        await publish_together(ranks, 4)
        assert len(open_segments()) <= 2 * held, "the controller holds parts of versions that were abandoned"

    drive(scenario())


def test_versions_that_were_abandoned_cost_no_memory(drive: Drive) -> None:
    """A rank writes its part and commits it; another one never does. The part must be freed, wherever it is held."""

    async def scenario() -> None:
        publisher = await Rank.as_actor()
        await publisher.run.call_one(become_rank, 0, 2)
        for version in range(3):
            doomed = await Rank.as_actor()
            await doomed.run.call_one(become_rank, 1, 2)
            first = asyncio.ensure_future(publisher.publish.call_one("policy", version, LARGE))
            with pytest.raises(ActorFailure):
                await doomed.die_while_publishing.call_one("policy", version, LARGE)
            with pytest.raises(ts.StoreError, match="rank 1, pid"):
                await first
        assert await publisher.run.call_one(num_segments) == 0
        assert open_segments() == [], "the controller holds segments of versions that came to nothing"

    drive(scenario())


def test_a_killed_reader_gives_its_version_back(drive: Drive) -> None:
    async def scenario() -> None:
        publisher, reader = await asyncio.gather(Rank.as_actor(), Rank.as_actor())
        weights = ts.Weights("policy")
        await publisher.publish.call_one("policy", 0, SHAPES)
        await reader.hold.call_one("policy", "mine")
        for version in range(1, 4):
            await publisher.publish.call_one("policy", version, SHAPES)
        await reader.check_held.call_one("mine", SHAPES)
        with_reader = await publisher.run.call_one(num_segments)
        kill(reader)

        async def is_recycled() -> bool:
            await publisher.publish.call_one("policy", (await weights.wait()) + 1, SHAPES)
            return bool(await publisher.run.call_one(num_segments) < with_reader)

        await until(is_recycled)
        assert all(info.num_readers == 0 for info in await weights.versions())

    drive(scenario())


def test_a_killed_publisher_leaves_its_version_behind(drive: Drive) -> None:
    async def scenario() -> None:
        publisher, reader = await asyncio.gather(Rank.as_actor(), Rank.as_actor())
        published = await publisher.publish.call_one("policy", 0, SHAPES)
        kill(publisher)
        weights = ts.Weights("policy")
        for _ in range(2):
            options = {"verify": "full"}
            assert await reader.fetch.call_one("policy", SHAPES, "", options) == (0, published.digest)
        late = await Rank.as_actor()
        assert await late.fetch.call_one("policy", SHAPES) == (0, published.digest)
        for version in (1, 2, 3):
            await late.publish.call_one("policy", version, SHAPES)
            assert (await reader.fetch.call_one("policy", SHAPES))[0] == version
        assert [info.number for info in await weights.versions()] == [2, 3]
        await weights.retire(keep=0)
        kill(late)

        async def is_free() -> bool:
            return not open_segments() and await reader.run.call_one(num_opened) == 0

        await until(is_free)

    drive(scenario())


def test_the_loss_of_the_only_volume_is_told_with_its_name(drive: Drive) -> None:
    async def scenario() -> None:
        (volume,) = await ts.setup(volumes=1)
        publisher = await Rank.options(env=ELSEWHERE).as_actor()
        reader = await Rank.as_actor()
        await publisher.publish.call_one("policy", 0, SHAPES)
        assert (await reader.fetch.call_one("policy", SHAPES))[0] == 0
        assert await volume.num_segments.call_one() == 1
        pid = kill(volume)
        with pytest.raises(ts.StoreError, match="store-volume-0") as caught:
            await reader.fetch.call_one("policy", SHAPES)
        assert str(pid) in str(caught.value)
        await publisher.publish.call_one("policy", 1, SHAPES)
        assert (await reader.fetch.call_one("policy", SHAPES))[0] == 1

    drive(scenario())


def test_the_other_copy_is_used_when_a_volume_is_lost(drive: Drive) -> None:
    async def scenario() -> None:
        volumes = await ts.setup(volumes=2, copies=2)
        publisher = await Rank.options(env=ELSEWHERE).as_actor()
        reader = await Rank.as_actor()
        published = await publisher.publish.call_one("policy", 0, SHAPES)
        kill(publisher)
        kill(volumes[0])
        for _ in range(2):
            options = {"verify": "full"}
            assert await reader.fetch.call_one("policy", SHAPES, "", options) == (0, published.digest)
        late = await Rank.options(env=ELSEWHERE).as_actor()
        for version in (1, 2, 3):
            await late.publish.call_one("policy", version, SHAPES)
            assert (await reader.fetch.call_one("policy", SHAPES))[0] == version
        assert await volumes[1].num_segments.call_one() <= 2

    drive(scenario())


def test_a_publisher_that_is_killed_while_it_is_read_over_tcp(drive: Drive) -> None:
    async def scenario() -> None:
        publisher, reader = await asyncio.gather(
            Rank.options(env=ELSEWHERE).as_actor(), Rank.options(env=TCP).as_actor()
        )
        await publisher.publish.call_one("policy", 0, LARGE)
        await publisher.run.call_one(die_while_serving, 2)
        (pid,) = publisher.pids
        with pytest.raises(ts.StoreError, match=f"pid {pid} on host elsewhere"):
            await reader.fetch.call_one("policy", LARGE)
        with pytest.raises(ts.StoreError, match=rf"lost.*pid {pid} on host elsewhere"):
            await until_lost(reader)
        late = await Rank.options(env=ELSEWHERE).as_actor()
        await late.publish.call_one("policy", 1, LARGE)
        assert (await reader.fetch.call_one("policy", LARGE, "", {"verify": "full"}))[0] == 1

    drive(scenario())


async def until_lost(reader: Any) -> None:
    """Fetch until the registry has heard of the death as well."""
    while True:
        try:
            await reader.fetch.call_one("policy", LARGE)
        except ts.StoreError as error:
            if "is lost" in str(error):
                raise


def test_a_volume_that_is_killed_while_it_is_read_is_replaced_by_the_other(drive: Drive) -> None:
    async def scenario() -> None:
        publisher, reader = await asyncio.gather(
            Rank.options(env=ELSEWHERE).as_actor(), Rank.options(env=TCP).as_actor()
        )

        doomed = await DyingVolume.as_actor("store-volume-a")
        other = await DyingVolume.as_actor("store-volume-b")
        await ts.setup(volumes=0, copies=2)
        published = await publisher.publish.call_one("policy", 0, LARGE)
        kill(publisher)
        await doomed.die_while_serving.call_one(2)
        found = await reader.fetch.call_one("policy", LARGE, "", {"verify": "full"})
        assert found == (0, published.digest)

        async def has_died() -> bool:
            return await other.num_segments.call_one() == 1 and not doomed.is_alive

        await until(has_died)

    drive(scenario())


def test_what_a_stopped_reader_holds_is_not_overwritten(drive: Drive) -> None:
    async def scenario() -> None:
        publisher, reader = await asyncio.gather(Rank.as_actor(), Rank.as_actor())
        await publisher.publish.call_one("policy", 0, SHAPES)
        await reader.hold.call_one("policy", "mine")
        kill(reader, signal.SIGSTOP)
        try:
            for version in range(1, 8):
                await publisher.publish.call_one("policy", version, SHAPES)
        finally:
            kill(reader, signal.SIGCONT)
        await reader.check_held.call_one("mine", SHAPES)
        assert await publisher.run.call_one(num_segments) <= 4

    drive(scenario())


WAITS = """
from forge.store.client import client
from forge.store.records import Acquire
line = client().line
version = line.request("acquire", (Acquire("policy", "weights", None), 600.0))
line.call("versions", ("weights", "policy"))  # answered after the desk has begun with the other
print("waiting", flush=True)
try:
    version.result()
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0], flush=True)
"""


def test_a_reader_that_waits_hears_that_the_run_has_ended() -> None:
    async def scenario() -> tuple[subprocess.Popen[str], BaseException]:
        async with asyncio.timeout(600):
            async with forge.run():
                loop = asyncio.get_running_loop()
                env = os.environ | await loop.run_in_executor(None, environment)
                outside = subprocess.Popen(
                    [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
                )
                assert outside.stdout is not None
                assert await loop.run_in_executor(None, outside.stdout.readline) == "waiting\n"
                waiting = asyncio.create_task(ts.Weights("policy").wait(at_least=5))
                await ts.Weights("policy").versions()
            (error,) = await asyncio.gather(waiting, return_exceptions=True)
            return outside, error

    outside, error = asyncio.run(scenario())
    said, _ = outside.communicate(timeout=600)
    assert outside.returncode == 0
    for text in (said, f"{type(error).__name__} {error}"):
        assert "the run has ended" in text or "controller was lost" in text, text


@pytest.mark.parametrize(("env", "num_reads"), [({}, 1200), (ELSEWHERE, 200)], ids=["shm", "tcp"])
def test_no_read_is_torn_by_continuous_publishing(drive: Drive, env: dict[str, str], num_reads: int) -> None:
    async def scenario() -> None:
        publisher, *readers = await asyncio.gather(Rank.options(env=env).as_actor(), Rank.as_actor(), Rank.as_actor())
        what = ("policy", 12, 6_000)
        publishing = asyncio.ensure_future(publisher.run.call_one(republish, *what))
        counts = await asyncio.gather(*(reader.run.call_one(count_torn, *what, num_reads) for reader in readers))
        await ts.put("stop", True)
        last = await publishing
        assert [count["torn"] for count in counts] == [0, 0]
        assert min(count["versions"] for count in counts) > 10, "too few versions were seen for this to mean anything"
        assert last > 10
        assert await publisher.run.call_one(num_segments) <= 2 + 1 + 2, "versions kept, spare, and one for each reader"

    drive(scenario())


def test_memory_is_freed_when_versions_are_retired(drive: Drive) -> None:
    async def scenario() -> None:
        publisher, reader = await asyncio.gather(Rank.as_actor(), Rank.as_actor())
        weights = ts.Weights("policy", rank=0, world_size=1)
        for version in range(3):
            await publisher.publish.call_one("policy", version, SHAPES, "", {"keep": 8})
            await reader.fetch.call_one("policy", SHAPES)
        assert await publisher.run.call_one(num_segments) == 3
        assert len(open_segments()) == 3
        assert await weights.retire(keep=1) == [0, 1]
        assert await publisher.run.call_one(num_segments) == 2, "the newest, and one for the next"
        assert len(open_segments()) == 2
        await weights.publish({name: value(name, shape, 3) for name, shape in SHAPES.items()}, version=3)
        await publisher.stop()

        async def is_free() -> bool:
            return len(open_segments()) == 1 + 1

        await weights.retire(keep=1)
        await until(is_free)

    drive(scenario())
