"""The loop of reinforcement learning with stand-ins for everyone in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forge.config import Sampling
from forge.errors import ActorFailure, CheckpointError, RolloutError, SyncError
from forge.loops.planning import plan_run
from forge.loops.recording import Records
from forge.rollout.ledger import check_ledger
from forge.types import Completion, Score, Task
from grpo_runs import config, ledger, metrics
from grpo_workers import StandInPolicy, StandInRewards, StandInTrainer, run_loop


def test_a_run_goes_to_its_end(tmp_path: Path) -> None:
    trainer = StandInTrainer()
    chosen = config(tmp_path / "run")
    assert run_loop(chosen, trainer).step == 6
    assert [line.step for line in ledger(chosen)] == [step for step in range(1, 7) for _ in range(2)]
    assert [extra["step"] for extra in trainer.saved] == [2, 4, 6]


def test_a_run_that_learns_from_no_group_says_so(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", "~training.max_steps")
    with pytest.raises(RolloutError, match="had a signal") as caught:
        run_loop(chosen, StandInTrainer(), rewards=StandInRewards(lambda completion: 1.0))
    assert caught.value.value == "40 groups: all rewards are equal (40 groups)"


@pytest.mark.parametrize("staleness", [1, 3])
def test_an_update_that_fails_beside_training_ends_the_run_and_what_was_learned_is_saved(
    staleness: int, tmp_path: Path
) -> None:
    def fail(version: int) -> None:
        if version == 3:
            raise SyncError("not the trainer's weights")

    trainer = StandInTrainer()
    chosen = config(tmp_path / "run", f"rollout.staleness={staleness}", "checkpointing.save_interval=100")
    with pytest.raises(SyncError):
        run_loop(chosen, trainer, policy=StandInPolicy(trainer, on_update=fail))
    (extra,) = trainer.saved
    assert extra["step"] == trainer.step >= 3
    buffer = extra["buffer"]
    check_ledger(ledger(chosen), pending=buffer["pending"], next_number=buffer["next_number"])
    assert {line.step for line in ledger(chosen)} == set(range(1, trainer.step + 1))
    assert len(metrics(chosen, "rollout/reward_mean")) == trainer.step


def test_the_evaluation_at_the_end_is_kept_with_the_last_step(tmp_path: Path) -> None:
    """So that a run that goes on from there does not evaluate the same weights again, and knows how good they were."""
    trainer = StandInTrainer()
    chosen = config(tmp_path / "run", "evaluation.fraction=0.2", "training.max_steps=4", "evaluation.interval=3")
    run_loop(chosen, trainer)
    assert [(extra["step"], extra["evaluated_step"]) for extra in trainer.saved] == [(2, 0), (4, 3), (4, 4)]


@pytest.mark.parametrize("on_error", ["skip", "stop"])
def test_a_reward_that_fails_on_what_is_too_old_decides_nothing(on_error: str, tmp_path: Path) -> None:
    """A generator was behind: the group goes back to the queue, and comes again with the weights of now."""

    class Behind(StandInPolicy):
        def choose(self) -> int:
            return 1 if self.version == 2 and not seen else self.version

    class Failing(StandInRewards):
        async def score(self, prompt: Task, completions: Sequence[Completion]) -> list[Score]:
            if trainer.step == 2 and completions[0].version == 1:
                seen.append(prompt.id)
                return [Score(0.0, {}, failures={"all": "it raised"}) for _ in completions]
            return await super().score(prompt, completions)

    seen: list[str] = []
    trainer = StandInTrainer()
    chosen = config(tmp_path / "run", f"rewards.on_error={on_error}")
    run_loop(chosen, trainer, policy=Behind(trainer), rewards=Failing())
    assert seen
    assert {line.outcome for line in ledger(chosen)} == {"trained"}
    assert sum(metrics(chosen, "rollout/num_stale")) == len(seen)


def test_fewer_steps_than_were_taken_are_refused(tmp_path: Path) -> None:
    trainer = StandInTrainer()
    run_loop(config(tmp_path / "run"), trainer)
    later = StandInTrainer()
    later.found = trainer.saved[-1]
    assert run_loop(config(tmp_path / "run"), later).step == 6
    with pytest.raises(CheckpointError, match="more steps than") as caught:
        run_loop(config(tmp_path / "run", "training.max_steps=5"), later)
    assert (caught.value.path, caught.value.value) == ("training.max_steps", 5)


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    """Even if their checkpoints lie elsewhere: the second would move the first one's ledger aside."""
    trainer = StandInTrainer()

    class Second(StandInRewards):
        async def score(self, prompt: Task, completions: Sequence[Completion]) -> list[Score]:
            if not refused:
                elsewhere = config(tmp_path / "run", f"checkpointing.output_dir={tmp_path / 'elsewhere'}")
                with pytest.raises(CheckpointError, match="Another run is writing") as caught:
                    Records(plan_run(elsewhere), resume_step=None)
                refused.append(caught.value)
            return await super().score(prompt, completions)

    refused: list[CheckpointError] = []
    chosen = config(tmp_path / "run")
    assert run_loop(chosen, trainer, rewards=Second()).step == 6
    assert refused[0].path == str(tmp_path / "run")
    assert len(ledger(chosen)) == 12


def test_a_run_without_signal_ends_and_says_so(tmp_path: Path) -> None:
    chosen = config(tmp_path / "flat", "rollout.no_signal=replace", "rollout.max_no_signal_groups=8")
    trainer = StandInTrainer()
    with pytest.raises(RolloutError, match="8 groups in a row"):
        run_loop(chosen, trainer, rewards=StandInRewards(lambda completion: 1.0))
    assert trainer.saved[-1]["buffer"]["pending"] == list(range(trainer.saved[-1]["buffer"]["next_number"]))


def test_the_end_of_the_prompts_ends_the_run(tmp_path: Path) -> None:
    chosen = config(tmp_path / "epochs", "~training.max_steps", "prompts.sources.0.num_prompts=5")
    assert run_loop(chosen, StandInTrainer()).step == 3  # 2 + 2 + 1 groups
    assert sorted(line.group for line in ledger(chosen)) == list(range(5))


def test_the_goal_of_the_evaluation_ends_the_run(tmp_path: Path) -> None:
    goal = ("evaluation.solved_at=0.0", "evaluation.stop_at=1.0", "evaluation.interval=2", "evaluation.at_start=false")
    chosen = config(tmp_path / "goal", "evaluation.fraction=0.2", *goal)
    assert run_loop(chosen, StandInTrainer()).step == 2


def test_other_prompts_are_not_taken_for_the_same_run(tmp_path: Path) -> None:
    trainer, later = StandInTrainer(), StandInTrainer()
    run_loop(config(tmp_path / "run"), trainer)
    later.found = trainer.saved[-1]
    with pytest.raises(CheckpointError, match="the prompts are not those of the run") as caught:
        run_loop(config(tmp_path / "run", "prompts.sources.0.num_prompts=30"), later)
    assert caught.value.path == "prompts.sources"


def test_a_group_whose_rewards_fail_may_be_skipped(tmp_path: Path) -> None:
    class Failing(StandInRewards):
        async def score(self, prompt: Task, completions: Sequence[Completion]) -> list[Score]:
            scores = await super().score(prompt, completions)
            is_bad = sum(completions[0].token_ids) % 2 == 0
            return [replace(score, failures={"all": "it raised"}) if is_bad else score for score in scores]

    chosen = config(tmp_path / "run", "rewards.on_error=skip")
    assert run_loop(chosen, StandInTrainer(), rewards=Failing()).step == 6
    assert {line.outcome for line in ledger(chosen)} == {"trained", "failed"}
    assert sum(metrics(chosen, "rollout/num_failed")) > 0


class Dying(StandInPolicy):
    """Dies on the first requests for one prompt."""

    def __init__(self, trainer: StandInTrainer, *, num_deaths: int) -> None:
        super().__init__(trainer)
        self._left = num_deaths
        self.victim: str | None = None

    async def generate(self, prompt: Task, *, sampling: Sampling) -> list[Completion]:
        self.victim = self.victim or prompt.id
        if prompt.id == self.victim and self._left:
            self._left -= 1
            raise ActorFailure("its process died")
        return await super().generate(prompt, sampling=sampling)


def test_a_group_whose_generator_died_is_rolled_out_again(tmp_path: Path) -> None:
    """With its seed: nothing that is learned from is different."""
    whole, chosen = config(tmp_path / "whole"), config(tmp_path / "run", "rollout.max_task_retries=3")
    run_loop(whole, StandInTrainer())
    trainer = StandInTrainer()
    run_loop(chosen, trainer, policy=Dying(trainer, num_deaths=3))
    assert ledger(chosen) == ledger(whole)
    assert metrics(chosen, "rollout/reward_mean") == metrics(whole, "rollout/reward_mean")


def test_a_group_that_kills_every_generator_ends_the_run(tmp_path: Path) -> None:
    trainer = StandInTrainer()
    with pytest.raises(ActorFailure, match="its process died"):
        run_loop(config(tmp_path / "run", "rollout.max_task_retries=2"), trainer, policy=Dying(trainer, num_deaths=3))
