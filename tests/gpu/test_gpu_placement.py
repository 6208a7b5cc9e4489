"""GPUs for real: handed out once, seen by their holder, given back, and given again to a restarted replica."""

from __future__ import annotations

import os
import signal

import pytest

from actors import GpuWorker
from forge.errors import PlacementError
from forge.runtime.placement import count_gpus, visible_gpus

NUM_GPUS = len(visible_gpus(os.environ, count_gpus()))
pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(NUM_GPUS == 0, reason="no NVIDIA GPU is visible here"),
    pytest.mark.usefixtures("leaves_nothing"),
]


def test_an_actor_gets_gpus_of_its_own_and_gives_them_back(drive):
    async def body():
        blind = await GpuWorker.as_actor()
        assert await blind.count.call_one() == 0, "an actor that asked for none sees none"
        holder = await GpuWorker.options(procs=NUM_GPUS, with_gpus=True, mesh_name="holder").as_actor()
        assert [count for _, count in (await holder.count.call()).items()] == [NUM_GPUS] * NUM_GPUS
        assert [total for _, total in (await holder.multiply.call(512)).items()] == [512.0**3] * NUM_GPUS
        with pytest.raises(PlacementError) as caught:
            await GpuWorker.options(with_gpus=True, mesh_name="late").as_actor()
        assert f"0 of {NUM_GPUS} are free" in caught.value.message
        assert "holder holds" in caught.value.rule
        await holder.stop()
        late = await GpuWorker.options(with_gpus=True, mesh_name="late").as_actor()
        assert await late.multiply.call_one(64) == 64.0**3

    drive(body())


def test_a_killed_replica_comes_back_on_its_gpu(drive):
    async def body():
        service = await GpuWorker.options(num_replicas=NUM_GPUS, with_gpus=True).as_service()
        for kill in range(3):
            assert await service.multiply.route(64) == 64.0**3
            os.kill((await service.get_metrics()).replicas[0].pids[0], signal.SIGKILL)
            await service.wait_until(
                lambda metrics, kill=kill: metrics.restarts == kill + 1 and metrics.num_healthy == NUM_GPUS,
                timeout_s=60,
            )
        assert await service.multiply.route(64) == 64.0**3

    drive(body())
