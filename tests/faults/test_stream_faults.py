"""What becomes of a stream when one of its two ends is killed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from forge.errors import ActorFailure
from forge.runtime.streams import WINDOW
from stream_actors import Impatient, Reader, Streamer

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_a_killed_replica_ends_its_streams_and_only_those(drive, tmp_path):
    async def body():
        service = await Streamer.options(num_replicas=2).as_service()
        streams = [service.step.stream("gate") for _ in range(4)]
        pids = [await anext(stream) for stream in streams]
        full = service.count.stream(1000)
        assert await anext(full) == 0
        full_at = next(replica for replica in (await service.get_metrics()).replicas if replica.in_flight == 3)
        victim = full_at.pids[0]
        reading = [asyncio.ensure_future(anext(stream)) for stream in streams]
        os.kill(victim, signal.SIGKILL)
        ends = dict(zip(reading, pids, strict=True))
        lost, _ = await asyncio.wait([call for call, pid in ends.items() if pid == victim])
        assert [type(call.exception()) for call in lost] == [ActorFailure] * 2
        seen = []
        with pytest.raises(ActorFailure, match="was lost"):  # what has arrived is read first
            await collect(full, seen)
        assert seen == list(range(1, len(seen) + 1))
        assert len(seen) < 2 * WINDOW
        going = [call for call, pid in ends.items() if pid != victim]
        await service.open.fanout("gate")
        assert await asyncio.gather(*going) == [1, 1]
        await service.wait_until(lambda metrics: metrics.num_healthy == 2 and metrics.restarts == 1, timeout_s=600)
        metrics = await service.get_metrics()
        assert metrics.replicas[full_at.index].num_lost == 3
        assert (metrics.num_retried, metrics.replicas[full_at.index].in_flight) == (0, 0)
        await retries(service, tmp_path)

    drive(body())


async def collect(stream, seen):
    async for item in stream:
        seen.append(item)


async def retries(service, folder):
    """Safe to send again, but only while nothing has been yielded."""
    survivors = [replica.pids[0] for replica in (await service.get_metrics()).replicas]
    assert [item in survivors async for item in service.die_first.stream(str(folder), num_before=0)] == [True]
    assert (await service.get_metrics()).num_retried == 1
    await service.wait_until(lambda metrics: metrics.num_healthy == 2 and metrics.restarts == 2, timeout_s=600)
    (folder / "dead").unlink()
    stream = service.die_first.stream(str(folder), num_before=2)
    pid = await anext(stream)
    assert await anext(stream) == pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorFailure, match="was lost"):
        await anext(stream)
    assert (await service.get_metrics()).num_retried == 1
    (folder / "dead").unlink()
    with pytest.raises(ActorFailure, match="was lost"):
        await anext(service.die_first.options(retry=False).stream(str(folder), num_before=0))


def test_a_killed_actor_ends_its_streams_here_and_in_other_processes(drive):
    async def body():
        actor = await Streamer.as_actor()
        reader = await Reader.as_actor(actor)
        passed_on, direct = reader.read_step.stream("gate"), actor.step.stream("gate")
        assert [await anext(passed_on), await anext(direct)] == [actor.pids[0]] * 2
        reading = [asyncio.ensure_future(anext(stream)) for stream in (direct, passed_on)]
        os.kill(actor.pids[0], signal.SIGKILL)
        for call in reading:
            with pytest.raises(ActorFailure, match="was lost"):
                await call

    drive(body())


def test_a_held_generator_is_closed_when_its_reader_was_killed_and_not_before(drive):
    async def body():
        service = await Impatient.as_service()
        reader, doomed = await asyncio.gather(*(Reader.as_actor(service) for _ in range(2)))
        assert await reader.read_one.call_one() == 0
        while await service.count_yielded.route() < WINDOW:
            pass
        assert await doomed.read_one.call_one() == 0
        while (await service.kept.route())[0] < 2:
            pass
        os.kill(doomed.pids[0], signal.SIGKILL)
        while (await service.kept.route())[0] == 2:
            pass
        assert (await service.kept.route())[0] == 1
        assert await reader.read_rest.call_one() == 999, "it does not read, but it lives"

    drive(body())
