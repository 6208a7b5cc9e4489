"""How real processes are: what they use, their gauges and faults, and profiles of what they compute."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
from collections.abc import Mapping

import pytest

from forge.observe.torch_profile import ProfileOptions
from forge.runtime.collect import collect
from forge.runtime.profiling import finish_profiles, start_profiles
from observe_actors import Ailing, Family

pytestmark = pytest.mark.usefixtures("leaves_nothing")

PATIENCE_S = 300.0


def profiled(data: Mapping[str, bytes]) -> dict[str, bool]:
    """Whether each profile has the multiplication."""
    events = {name: json.loads(gzip.decompress(each))["traceEvents"] for name, each in data.items()}
    return {name: any(event["name"] == "aten::mm" for event in each) for name, each in events.items()}


def test_every_process_says_what_it_uses_and_what_went_wrong(drive):
    async def body():
        service = await Ailing.options(num_replicas=2, mesh_name="ailing").as_service()
        family = await Family.options(mesh_name="family").as_actor()
        await service.fail.route()
        found = await collect(timeout_s=PATIENCE_S, use=True)
        used = {each.process.name: each for each in found.processes}
        assert set(used) == {"controller", "ailing[0]", "ailing[1]", "family", "child"}
        assert all(each.use is not None and each.use.memory > 1 << 20 for each in used.values())
        assert {name: each.gauges.get(f"level/{name}") for name, each in used.items() if "ailing" in name} == {
            "ailing[0]": 7.0,
            "ailing[1]": 7.0,
        }
        assert used["controller"].gauges["queue/ailing"] == 0
        (fault,) = found.faults
        assert (fault.kind, fault.where, fault.process) == ("test", "a number", "ailing[0]")
        assert 'int("seven")' in fault.traceback
        again = await collect(timeout_s=PATIENCE_S)
        assert (again.faults, [each.use for each in again.processes]) == ([], [None] * 5)
        await family.stop()
        await service.shutdown()

    drive(body())


def test_a_replica_that_is_lost_is_a_fault_of_the_run(drive):
    async def body():
        service = await Ailing.options(num_replicas=2, mesh_name="ailing").as_service()
        pid = (await service.get_metrics()).replicas[1].pids[0]
        os.kill(pid, signal.SIGKILL)
        await service.wait_until(lambda found: found.restarts == 1 and found.num_healthy == 2, timeout_s=PATIENCE_S)
        (fault,) = (await collect(timeout_s=PATIENCE_S)).faults
        assert (fault.kind, fault.where, fault.process) == ("replica", "ailing[1]", "controller")
        assert "was lost and is started again" in fault.message
        await service.shutdown()

    drive(body())


def test_processes_of_a_worker_are_profiled_and_one_that_dies_is_named(drive):
    async def body():
        service = await Ailing.options(num_replicas=2, mesh_name="ailing").as_service()
        await Ailing.options(mesh_name="other").as_actor()
        await service.multiply.fanout()  # torch is loaded
        profiles = await start_profiles(["ailing"], ProfileOptions())
        await service.multiply.fanout()
        assert profiled(await finish_profiles(profiles)) == {"ailing[0]": True, "ailing[1]": True}
        assert not profiles.failed
        profiles = await start_profiles(["ailing"], ProfileOptions())
        os.kill((await service.get_metrics()).replicas[0].pids[0], signal.SIGKILL)
        await service.wait_until(lambda found: found.restarts == 1, timeout_s=PATIENCE_S)
        found = await asyncio.wait_for(finish_profiles(profiles), PATIENCE_S)
        assert set(found) == {"ailing[1]"}
        assert set(profiles.failed) == {"ailing[0]"}
        await service.shutdown()

    drive(body())


def test_without_such_a_worker_this_process_is_profiled():
    import torch

    async def body():
        profiles = await start_profiles(["nobody"], ProfileOptions())
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        return await finish_profiles(profiles)

    assert profiled(asyncio.run(body())) == {"controller": True}
