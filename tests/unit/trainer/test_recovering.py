"""A trainer that is lost at any point of its calls, in one process: what is repeated, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge.config import RecoveryConfig
from forge.errors import ActorFailure, CheckpointError, LaunchError, RecoveryError, ServiceStopped, StoreError
from forge.store import Weights
from forge.trainer.checkpoint_folder import CheckpointInfo, checkpoint_name, write_record
from forge.trainer.publishing import take_back
from forge.trainer.recovering import RecoveringTrainer, RecoverySetup
from forge.types import Batch, StepResult

LOST = "trainer[0] was lost: rank 0 ended"


class StandIn:
    """A trainer whose state is the list of batches that it learned from. `deaths` has calls that it dies in, once."""

    def __init__(self, folder: Path, deaths: list[str]) -> None:
        self.folder, self.deaths = folder, deaths
        self.learned: list[int] = []
        self.rates: list[float | None] = []
        self.saved: list[int] = []
        self.is_dead = False
        self.service = SimpleNamespace(name="trainer", shutdown=self.end, get_metrics=self.metrics)

    async def end(self) -> None:
        self.is_dead = True

    async def metrics(self) -> Any:
        return SimpleNamespace(replicas=[SimpleNamespace(last_failure="rank 0 ended")])

    def reach(self, place: str) -> None:
        if self.is_dead:
            raise ServiceStopped("all replicas were dropped")
        if place in self.deaths:
            self.deaths.remove(place)
            self.is_dead = True
            raise ActorFailure(LOST)

    async def train_step(
        self, batch: Batch, *, keep_logprobs: bool = False, learning_rate: float | None = None
    ) -> StepResult:
        number = int(batch.token_ids[0])
        self.reach(f"step {number}")
        self.learned.append(number)
        self.rates.append(learning_rate)
        return StepResult(len(self.learned), float(sum(self.learned)), 1.0, 1e-3, 1, 1)

    async def save(self, *, extra: Mapping[str, Any], metric: Any, parts: Any, step: Any) -> None:
        number = len(self.learned)
        for part in (parts or {}).values():
            part.rename(part.with_name("moved"))  # as a save does before it is complete
        self.reach(f"save {number}")
        place = self.folder / checkpoint_name(number)
        place.mkdir(parents=True, exist_ok=True)
        state = {"learned": self.learned, "caller": dict(extra)}
        write_record(CheckpointInfo(place, number, number, "", None, 1, "", state), folder=place)
        self.saved.append(number)
        self.reach(f"saved {number}")

    async def load(self, resume: str) -> dict[str, Any] | None:
        if resume == "never":
            return None
        import json

        extra = json.loads((Path(resume) / "checkpoint.json").read_text())["extra"]
        self.learned = list(extra["learned"])
        caller: dict[str, Any] = extra["caller"]
        return caller

    async def state(self) -> dict[str, Any]:
        self.reach("state")
        return {"step": len(self.learned)}

    async def publish_weights(self, version: int, *, name: str) -> None:
        self.reach("publish")
        if "give up" in self.deaths:  # as with a storage volume that dies meanwhile
            self.deaths.remove("give up")
            raise StoreError("was abandoned")
        weights = Weights(name, rank=0, world_size=1)
        await weights.publish({"w": torch.tensor(self.learned)}, version=version)
        self.reach("published")

    async def release_memory(self) -> None: ...

    async def close(self) -> None:
        self.reach("close")
        self.is_dead = True


class Fixture:
    """A trainer under recovery, and all that were started for it."""

    def __init__(self, folder: Path, *deaths: str, fails: int = 0, **rules: Any) -> None:
        self.started: list[StandIn] = []
        self.deaths, self.fails = list(deaths), fails

        async def start() -> Any:
            if self.started and self.fails:
                self.fails -= 1
                raise LaunchError("no host")
            self.started.append(StandIn(folder / "checkpoints", self.deaths))
            return self.started[-1]

        made = RecoveryConfig(**{"backoff_s": 0.0, **rules})
        self.setup = RecoverySetup("trainer", start, made, folder / "checkpoints", folder / "crashes")

    async def open(self) -> RecoveringTrainer:
        trainer = RecoveringTrainer(await self.setup.start(), self.setup)
        await trainer.load("never")
        return trainer

    def run(self, body: Callable[[RecoveringTrainer], Awaitable[None]]) -> StandIn:
        async def whole() -> None:
            await body(await self.open())

        asyncio.run(whole())
        return self.started[-1]


def batch(number: int) -> Batch:
    return Batch(torch.tensor([number]), torch.ones(1), (1,), identities=(f"sample {number}",))


async def train(trainer: RecoveringTrainer) -> None:
    for number in range(1, 6):
        await trainer.train_step(batch(number))
        if number % 2 == 0:
            await trainer.save(extra={"step": number})


@pytest.mark.parametrize("death", ["step 1", "step 3", "save 2", "saved 2", "save 4", "saved 4", "step 5", "close"])
def test_every_batch_is_learned_from_once_in_order(tmp_path: Path, death: str) -> None:
    fixture = Fixture(tmp_path, death)

    async def body(trainer: RecoveringTrainer) -> None:
        await train(trainer)
        await trainer.close()

    last = fixture.run(body)
    assert (last.learned, len(fixture.started)) == ([1, 2, 3, 4, 5], 2)
    assert {place.name for place in (tmp_path / "checkpoints").iterdir()} == {"step-00000002", "step-00000004"}


def test_steps_are_trained_again_at_the_learning_rates_that_they_had(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path, "step 5")

    async def body(trainer: RecoveringTrainer) -> None:
        for number, rate in enumerate((None, 0.1, 0.2, None, 0.3), start=1):
            await trainer.train_step(batch(number), learning_rate=rate)

    assert fixture.run(body).rates == [None, 0.1, 0.2, None, 0.3]
    assert len(fixture.started) == 2


def test_a_start_that_fails_counts_as_a_restart(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path, "step 5", fails=2, max_restarts=3)
    assert fixture.run(train).learned == [1, 2, 3, 4, 5]
    fixture = Fixture(tmp_path / "b", "step 5", fails=2, max_restarts=2)
    with pytest.raises(RecoveryError, match="lost again after 2 restart") as caught:
        fixture.run(train)
    assert (caught.value.path, caught.value.value) == ("recovery.max_restarts", "no host")


def test_a_step_that_kills_twice_while_it_is_trained_again_ends_the_run(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path, max_restarts=9)

    async def body(trainer: RecoveringTrainer) -> None:
        for number in range(1, 4):
            await trainer.train_step(batch(number))
        fixture.deaths += ["state", "step 2", "step 2"]
        await trainer.state()

    with pytest.raises(RecoveryError, match="died twice in train_step after 1 step") as caught:
        fixture.run(body)
    assert caught.value.path == str(tmp_path / "crashes" / "trainer-step-00000002")
    assert "sample 2" in (tmp_path / "crashes" / "trainer-step-00000002" / "README.md").read_text()


def test_no_call_reaches_a_trainer_that_is_being_restored(tmp_path: Path) -> None:
    """Two calls fail with the same death: it is restored once, and both are repeated."""
    fixture = Fixture(tmp_path, "step 3")

    async def body(trainer: RecoveringTrainer) -> None:
        await trainer.train_step(batch(1))
        await trainer.train_step(batch(2))
        result, *states = await asyncio.gather(trainer.train_step(batch(3)), trainer.state(), trainer.state())
        assert (result.step, [state["step"] for state in states]) == (3, [3, 3])

    assert (fixture.run(body).learned, len(fixture.started)) == ([1, 2, 3], 2)


def test_a_run_that_is_asked_to_stop_does_not_wait_for_it(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path, "step 5")

    async def body(trainer: RecoveringTrainer) -> None:
        trainer.may_recover = lambda: False
        await train(trainer)

    with pytest.raises(ActorFailure, match="rank 0 ended"):
        fixture.run(body)
    assert len(fixture.started) == 1


def test_after_the_end_nothing_is_restored(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)

    async def body(trainer: RecoveringTrainer) -> None:
        await trainer.close()
        with pytest.raises(ServiceStopped):
            await trainer.state()

    fixture.run(body)
    assert len(fixture.started) == 1


def test_an_exception_of_the_user_is_no_death(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)

    async def body(trainer: RecoveringTrainer) -> None:
        await trainer.train_step(Batch(torch.zeros(0, dtype=torch.int64), torch.ones(0), ()))

    with pytest.raises(IndexError):
        fixture.run(body)
    assert len(fixture.started) == 1


@pytest.mark.parametrize("is_behind", [True, False])
def test_parts_that_died_with_the_save_are_saved_again(tmp_path: Path, is_behind: bool) -> None:
    """If the other model has learned more since, the checkpoint is left out: the next one has both."""
    fixture = Fixture(tmp_path, "save 1")
    asked: list[int] = []

    async def remake(step: int) -> Mapping[str, Path] | None:
        asked.append(step)
        return {} if is_behind else None

    async def body(trainer: RecoveringTrainer) -> None:
        trainer.remake_parts = remake
        await trainer.train_step(batch(1))
        (tmp_path / "critic").mkdir()
        await trainer.save(extra={"step": 1}, parts={"critic": tmp_path / "critic"}, step=1)

    assert (fixture.run(body).saved, asked) == ([1] if is_behind else [], [1])


@pytest.mark.parametrize("death", ["publish", "published", "give up"])
def test_a_version_is_published_once_whole(tmp_path: Path, drive: Callable[[Any], Any], death: str) -> None:
    """Also if only the answer was lost. A number that was published before stays refused."""
    fixture = Fixture(tmp_path, death)

    async def body() -> None:
        trainer = await fixture.open()
        await trainer.train_step(batch(7))
        await trainer.publish_weights(3, name="policy")
        assert [info.number for info in await Weights("policy").versions()] == [3]
        assert (await Weights("policy").fetch()).tensors["w"].tolist() == [7]
        assert await trainer.republish(3, name="policy")
        assert (await Weights("policy").fetch()).tensors["w"].tolist() == [7]
        await trainer.train_step(batch(8))
        assert not await trainer.republish(3, name="policy"), "the weights are those of version 4"
        with pytest.raises(StoreError):
            await trainer.publish_weights(3, name="policy")
        assert (await Weights("policy").fetch()).tensors["w"].tolist() == [7]

    drive(body())


def test_a_version_that_was_lost_with_the_trainer_is_published_again(
    tmp_path: Path, drive: Callable[[Any], Any]
) -> None:
    fixture = Fixture(tmp_path)

    async def body() -> None:
        trainer = await fixture.open()
        await trainer.train_step(batch(7))
        await trainer.publish_weights(3, name="policy")
        await take_back("policy", 3)  # as when its memory was that of the trainer's GPU
        fixture.deaths.append("step 8")
        await trainer.train_step(batch(8))
        assert (await Weights("policy").fetch(version=3)).tensors["w"].tolist() == [7]

    drive(body())


def test_checkpoints_that_somebody_removed_are_missed(tmp_path: Path) -> None:
    """Without them the batches since then would be trained on from other weights."""
    fixture = Fixture(tmp_path)

    async def body(trainer: RecoveringTrainer) -> None:
        await train(trainer)
        for place in (tmp_path / "checkpoints").iterdir():
            (place / "checkpoint.json").unlink()
            place.rmdir()
        fixture.deaths.append("state")
        await trainer.state()

    with pytest.raises(CheckpointError, match="cannot be restored") as caught:
        fixture.run(body)
    assert (caught.value.path, caught.value.value) == (str(tmp_path / "checkpoints"), [])
    assert caught.value.rule and caught.value.repair  # noqa: PT018
    assert all(each.is_dead for each in fixture.started[1:]), "the one that is not whole is ended"
