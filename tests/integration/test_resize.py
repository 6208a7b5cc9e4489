"""`service.resize` on real processes: replicas join and leave while calls run, and no call is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from actors import Caller, Patient, TaskFailed
from forge.errors import ActorFailure, OptionError, ResizeError, ServiceStopped

pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Gate:
    """A named pipe that calls wait at."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        os.mkfifo(self.path)
        os.mkfifo(f"{self.path}-reached")

    async def reached(self) -> None:
        await asyncio.to_thread(self.path.with_name(f"{self.path.name}-reached").read_text)

    async def open(self) -> None:
        await asyncio.to_thread(self.path.write_text, "go")


def test_replicas_join_and_leave_under_calls_of_two_processes(drive, tmp_path):
    async def body():
        service = await Patient.as_service()
        caller, gate = await Caller.as_actor(service), Gate(tmp_path, "gate")
        (first,) = await caller.call.call_one(1)
        is_done, seen = False, set()

        async def keep_calling() -> None:
            while not is_done:
                seen.add(await service.pid.route())
                await asyncio.sleep(0)

        load = asyncio.ensure_future(keep_calling())
        grown = await service.resize(2)
        assert [(each.index, each.health) for each in grown.replicas] == [(0, "healthy"), (1, "healthy")]
        second = grown.replicas[1].pids[0]
        for pid in (second, first):  # it knows of both, and the next one goes to the new replica: round robin
            while await caller.call.call_one(1) != [pid]:
                pass
        while second not in seen:  # noqa: ASYNC110 - a call tells
            await asyncio.sleep(0)
        held = asyncio.ensure_future(caller.hold.call_one(str(gate.path)))
        await gate.reached()
        shrinking = asyncio.ensure_future(service.resize(1))
        draining = await service.wait_until(lambda metrics: metrics.num_healthy == 1)
        assert draining.replicas[1].health == "draining"
        assert {await service.pid.route() for _ in range(4)} == {first}
        while await caller.call.call_one(2) != [first, first]:
            pass  # the caller's process is told as well
        assert set(await caller.call.call_one(4)) == {first}
        assert not shrinking.done()
        await gate.open()
        assert await held == second
        assert [each.pids[0] for each in (await shrinking).replicas] == [first]
        is_done = True
        await load
        assert seen == {first, second}

    drive(body())


def test_resizes_follow_one_another_and_what_cannot_start_is_reported(drive, tmp_path):
    async def body():
        service = await Patient.as_service(2)
        await asyncio.gather(*(service.resize(count) for count in (2, 1, 2)))
        assert [each.generation for each in (await service.get_metrics()).replicas] == [0, 1]
        with pytest.raises(ResizeError) as raised:
            await service.resize(4)
        error = raised.value
        assert (error.num_replicas, error.path, error.value) == (3, "Patient.resize(num_replicas=)", 4)
        assert "1 of 2 new replicas could not be started; replica 2: TaskFailed" in error.message
        assert error.rule == "every new replica starts; the service now has 3"
        assert "ask for fewer replicas" in error.repair
        assert isinstance(error.__cause__, TaskFailed)
        assert [each.index for each in (await service.get_metrics()).replicas] == [0, 1, 3]
        await die_time_out_and_shut_down(service, [Gate(tmp_path, str(number)) for number in range(3)])

    drive(body())


async def die_time_out_and_shut_down(service, gates: list[Gate]) -> None:
    """Of three replicas, let one die while it leaves, the next run out of time, and end the service at the third."""
    held = [asyncio.ensure_future(service.hold.route(str(gate.path))) for gate in gates]
    for gate in gates:
        await gate.reached()
    shrinking = asyncio.ensure_future(service.resize(2))
    metrics = await service.wait_until(lambda metrics: metrics.num_healthy == 2)
    os.kill(metrics.replicas[2].pids[0], signal.SIGKILL)
    assert [each.index for each in (await shrinking).replicas] == [0, 1]
    assert len((await service.resize(1, drain_timeout_s=0.01)).replicas) == 1
    await service.pid.route()
    growing = asyncio.ensure_future(service.resize(2))
    await service.wait_until(lambda metrics: len(metrics.replicas) == 2)
    await service.shutdown()
    with pytest.raises(ServiceStopped, match="shut down while it was resized"):
        await growing
    with pytest.raises(ServiceStopped, match="was shut down"):
        await service.resize(3)
    ends = await asyncio.gather(*held[:3], return_exceptions=True)
    assert [type(end) for end in ends] == [ActorFailure] * 3
    assert sum("was removed" in str(end) for end in ends) == 1  # the one that ran out of time


@pytest.mark.parametrize(
    ("keywords", "path"),
    [
        ({"num_replicas": 0}, "resize(num_replicas=)"),
        ({"num_replicas": 2, "sessions": "drop"}, "resize(sessions=)"),
        ({"num_replicas": 2, "drain_timeout_s": -1.0}, "resize(drain_timeout_s=)"),
    ],
)
def test_arguments_out_of_range(keywords, path):
    from forge.service.resizing import check_resize

    with pytest.raises(OptionError) as raised:
        check_resize(**{"sessions": "move", "drain_timeout_s": None, **keywords})
    assert raised.value.path == path


def test_only_the_owner_resizes():
    from forge.service.handle import Service
    from forge.service.options import ServiceOptions

    elsewhere = Service(Patient, ServiceOptions(), name="policy", uid="x")
    with pytest.raises(OptionError, match="only the process that started service policy can resize it") as raised:
        asyncio.run(elsewhere.resize(2))
    assert (raised.value.path, raised.value.repair) == ("resize", "call resize() where as_service() was awaited")
