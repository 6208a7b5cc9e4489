"""One step of learning: who has the device's memory, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge.types import Batch, StepResult
from grpo_runs import config
from grpo_workers import StandInPolicy, StandInTrainer, run_loop

WORK = ["rest", "train", "rise"]


class Told(StandInTrainer):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    async def train_step(self, batch: Batch, *, keep_logprobs: bool = False) -> StepResult:
        self.notes.append("train")
        return await super().train_step(batch, keep_logprobs=keep_logprobs)

    async def release_memory(self) -> None:
        self.notes.append("give back")


class Resting(StandInPolicy):
    def __init__(self, trainer: Told, **options: Any) -> None:
        super().__init__(trainer, **options)
        self._notes = trainer.notes

    async def sleep(self) -> None:
        self._notes.append("rest")

    async def wake(self) -> None:
        self._notes.append("rise")


@pytest.mark.parametrize(
    ("placement", "expected"),
    [("apart", WORK), ("beside", WORK), ("shared", WORK), ("turns", ["rest", "train", "give back", "rise"])],
)
def test_the_trainer_gives_memory_back_before_generators_wake(
    placement: str, expected: list[str], tmp_path: Path
) -> None:
    trainer = Told()
    run_loop(
        config(tmp_path / "run", f"placement={placement}", "training.max_steps=2"), trainer, policy=Resting(trainer)
    )
    assert trainer.notes == expected * 2


def test_beside_the_trainer_groups_may_be_older(tmp_path: Path) -> None:
    trainer = StandInTrainer()
    result = run_loop(config(tmp_path / "run", "placement=beside", "rollout.staleness=2"), trainer)
    assert result.step == trainer.step == 6
