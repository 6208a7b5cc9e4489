"""Versions whose memory is gone when generators are to load them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge.config import RecoveryConfig, StoreConfig
from forge.errors import ActorFailure, FanoutError, StoreError
from forge.loops.volumes import load_version, start_volumes
from forge.store import Weights, setup
from forge.store.client import client
from forge.store.records import Acquire, Relay
from forge.trainer.publishing import take_back
from forge.trainer.recovering import RecoveringTrainer, RecoverySetup
from forge.types import Batch, StepResult


class StandInTrainer:
    """Publishes one number, which counts its steps."""

    def __init__(self) -> None:
        self.step = 0

    async def train_step(self, batch: Batch, **options: object) -> StepResult:
        self.step += 1
        return StepResult(self.step, 0.0, 0.0, 0.0, 1, 1)

    async def publish_weights(self, version: int, *, name: str) -> None:
        await Weights(name, rank=0, world_size=1).publish({"w": torch.tensor([self.step])}, version=version)


class Policy:
    """Generators that load a version, or fail to."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    async def update_weights(self, version: int) -> list[Any]:
        try:
            self.loaded.append(int((await Weights("policy").fetch(version=version)).tensors["w"][0]))
        except StoreError as error:
            raise FanoutError("1 of 1 replicas failed", outcomes=()) from error
        return []


@pytest.mark.parametrize("has_moved_on", [False, True])
def test_a_lost_version_is_published_again_unless_the_trainer_has_moved_on(
    tmp_path: Path, drive: Callable[[Any], Any], has_moved_on: bool
) -> None:
    batch = Batch(torch.zeros(1, dtype=torch.int64), torch.ones(1), (1,))

    async def body() -> None:
        async def start() -> Any: ...

        stand_in: Any = StandInTrainer()
        setup = RecoverySetup("trainer", start, RecoveryConfig(), tmp_path, tmp_path)
        trainer, policy = RecoveringTrainer(stand_in, setup), Policy()
        workers: Any = SimpleNamespace(trainer=trainer, policy=policy)
        await trainer.train_step(batch)
        await trainer.publish_weights(1, name="policy")
        await load_version(workers, 1, name="policy")
        await take_back("policy", 1)  # as when the process that held it has died
        if not has_moved_on:
            await load_version(workers, 1, name="policy")
            assert policy.loaded == [1, 1]
            return
        await trainer.train_step(batch)
        with pytest.raises(ActorFailure, match="version 1 was lost"):  # the run starts again from a checkpoint
            await load_version(workers, 1, name="policy")

    drive(body())


def test_an_update_that_fails_for_another_reason_is_raised(drive: Callable[[Any], Any]) -> None:
    async def fail(version: int) -> list[Any]:
        raise FanoutError("1 of 1 replicas failed", outcomes=())

    async def body() -> None:
        await StandInTrainer().publish_weights(1, name="policy")
        workers: Any = SimpleNamespace(trainer=None, policy=SimpleNamespace(update_weights=fail))
        with pytest.raises(FanoutError):
            await load_version(workers, 1, name="policy")

    drive(body())


def test_a_run_may_read_weights_directly_on_every_host(drive: Callable[[Any], Any]) -> None:
    async def body() -> list[bool]:
        await Weights("policy", rank=0, world_size=1).publish({"w": torch.zeros(3)}, version=0)
        found = []
        for section in (StoreConfig(), StoreConfig(distribution="direct")):
            await start_volumes(section)
            lease = await client().acquire(Acquire("policy", "weights", None))
            offer = Relay("another host", 1, client().session, "tcp:1")
            found.append(client().line.call("route", (lease.id, offer, ())) is None)
            client().release(lease.id)
        return found

    assert drive(body()) == [False, True]


def test_there_are_two_distributions(drive: Callable[[Any], Any]) -> None:
    with pytest.raises(StoreError, match=r"(?s)there is no such distribution.*one of auto, direct"):
        drive(setup(distribution="tree"))  # type: ignore[arg-type]
