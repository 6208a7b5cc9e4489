"""`forge.run` with a configuration."""

from __future__ import annotations

import asyncio

import pytest

import forge
from actors import Worker
from forge.config import ForgeConfig, LauncherConfig, RunConfig, load
from forge.errors import ActorFailure, LaunchError, ServiceStopped


def test_the_resolved_configuration_is_saved_with_the_run(tmp_path):
    config = ForgeConfig(run=RunConfig(name="first", output_dir=tmp_path, seed=3))

    async def body() -> int:
        async with forge.run(config):
            service = await Worker.options(num_replicas=1).as_service()
            return await service.add.route(1)

    assert asyncio.run(body()) == 2
    assert load(ForgeConfig, files=[tmp_path / "first" / "config.yaml"]) == config


def test_hosts_cannot_change_while_the_runtime_is_open():
    async def body() -> None:
        async with forge.run():
            with pytest.raises(LaunchError, match="already open on local"):
                async with forge.run(LauncherConfig(kind="hosts", hosts=("tcp://127.0.0.1:9",))):
                    pass

    asyncio.run(body())


def test_a_block_ends_what_was_spawned_inside_it_and_nothing_else():
    async def body() -> None:
        async with forge.run():
            outer = await Worker.as_actor()
            async with forge.run():
                inner = await Worker.as_service()
                assert await inner.add.route(1) == 2
            with pytest.raises(ServiceStopped):
                await inner.add.route(1)
            assert await outer.add.call_one(1) == 2
        with pytest.raises(ActorFailure):
            await outer.add.call_one(1)

    asyncio.run(body())
