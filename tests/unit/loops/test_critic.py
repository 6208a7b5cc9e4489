"""The critic in the loop: which version values which batch, the order of a step, and what becomes of half a step."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.config import GRPOConfig
from forge.errors import ConfigError, ModelError, NonFiniteError, StepAbandoned
from forge.loops.critic import critic_config, critic_loss
from forge.loops.planning import plan_run
from forge.loops.stopping import Stop
from forge.loops.worker_checks import grpo_worker_errors
from forge.models.locate import resolve
from forge.types import Batch, StepResult
from grpo_runs import config, episodes, metrics
from grpo_workers import StandInPolicy as Policy
from grpo_workers import StandInRewards as Rewards
from grpo_workers import StandInTrainer, make_loop, run_loop

PPO = ("algorithm.preset=ppo", "rollout.group_size=1")


class Noting(StandInTrainer):
    """Notes its steps."""

    def __init__(self, notes: list[str], name: str = "policy") -> None:
        super().__init__()
        self.notes, self.name = notes, name
        self.abandoned = asyncio.Event()

    @property
    def is_abandoned(self) -> bool:
        return self.abandoned.is_set()

    async def train_step(self, batch: Batch, *, keep_logprobs: bool = False) -> StepResult:
        if self.is_abandoned:
            raise StepAbandoned("the training step was abandoned on request", path="step 1")
        self.notes.append(f"{self.name} learns")
        return await super().train_step(batch, keep_logprobs=keep_logprobs)

    async def save(self, *, extra: Mapping[str, Any], metric: float | None = None, **options: Any) -> None:
        self.notes.append(f"{self.name} is saved")
        await super().save(extra=extra, metric=metric, **options)

    async def release_memory(self) -> None:
        self.notes.append(f"{self.name} releases memory")

    async def abandon_step(self) -> None:
        self.abandoned.set()


class StandInCritic(Noting):
    """Its value of every state is the number of optimizer steps that it has taken."""

    def __init__(self, notes: list[str], *, fails_at: int | None = None) -> None:
        super().__init__(notes, "critic")
        self._fails_at = fails_at

    async def forward_values(self, batch: Batch) -> list[torch.Tensor]:
        self.notes.append("critic values")
        return [torch.full((length,), float(self.step)) for length in batch.lengths]

    async def train_step(self, batch: Batch, *, keep_logprobs: bool = False) -> StepResult:
        if self.step == self._fails_at:
            raise NonFiniteError("the loss is not finite", path="step", value="nan")
        assert set(batch.fields) == {"returns", "old_values"}
        if self.is_abandoned:
            raise StepAbandoned("the training step was abandoned on request", path="step 1")
        self.notes.append("critic learns")
        self.step += 1
        found = {"squared_error": 0.5, "clip_fraction": 0.25}
        return StepResult(self.step, 0.25, 1.0, 1e-3, len(batch.token_ids), 1, seconds=0.01, metrics=found)


def run_with(chosen: GRPOConfig, notes: list[str], **options: Any) -> tuple[Noting, StandInCritic]:
    trainer, critic = Noting(notes), StandInCritic(notes, **options)
    run_loop(chosen, trainer, critic=critic)
    return trainer, critic


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_batch_is_valued_by_the_newest_critic(staleness: int, tmp_path: Path) -> None:
    """However old the policy is that sampled it: the critic of step n has learned from the n - 1 batches before."""
    chosen = config(tmp_path / "run", *PPO, f"rollout.staleness={staleness}", "training.max_steps=8")
    run_with(chosen, [])
    assert max(metrics(chosen, "rollout/staleness_max")) == staleness
    for episode in episodes(chosen):
        assert set(episode["values"]) == {float(episode["step"] - 1)}
    assert metrics(chosen, "critic/value_mean") == [float(step) for step in range(8)]


def test_a_step_values_then_teaches_the_policy_and_then_the_critic(tmp_path: Path) -> None:
    notes: list[str] = []
    overrides = ("training.max_steps=3", "rollout.iterations=2", "critic.iterations=1", "critic.warmup_steps=1")
    trainer, critic = run_with(config(tmp_path / "run", *PPO, *overrides, "checkpointing.save_interval=2"), notes)
    both = ["critic values", "policy learns", "policy learns", "critic learns"]
    saved = ["critic is saved", "policy is saved"]
    assert notes == ["critic values", "critic learns", *both, *saved, *both, *saved]
    assert (trainer.step, critic.step) == (4, 3)
    assert critic.saved == [{"step": 2}, {"step": 3}]


def test_on_one_gpu_memory_is_released_before_the_other_computes(tmp_path: Path) -> None:
    notes: list[str] = []
    trainer, critic = Noting(notes), StandInCritic(notes)
    chosen = config(tmp_path / "run", *PPO, "training.max_steps=1")

    async def body() -> None:
        loop = make_loop(chosen, trainer, Policy(trainer), Rewards(), critic=critic)
        loop.learner._shares_gpu = True  # this machine may have none
        await loop.run()
        loop.close()

    asyncio.run(body())
    release = "critic releases memory"
    expected = ["critic values", release, "policy learns", "policy releases memory", "critic learns", release]
    assert notes[: len(expected)] == expected


def test_metrics_of_the_critic(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", *PPO, "training.max_steps=2")
    run_with(chosen, [])
    assert metrics(chosen, "critic/loss") == [0.25, 0.25]
    assert metrics(chosen, "critic/clip_fraction") == [0.25, 0.25]
    assert metrics(chosen, "critic/squared_error") == [0.5, 0.5]
    for name in ("return_mean", "explained_variance", "grad_norm", "learning_rate", "seconds"):
        assert len(metrics(chosen, f"critic/{name}")) == 2


# ---- Half a step ----------------------------------------------------------------------------------------------------


def test_half_a_step_is_never_saved(tmp_path: Path) -> None:
    """The policy has learned from the batch when the critic fails: the checkpoint of the step before stays the last."""
    notes: list[str] = []
    chosen = config(tmp_path / "run", *PPO, "checkpointing.save_interval=1")
    with pytest.raises(NonFiniteError):
        run_with(chosen, notes, fails_at=2)
    assert notes[-1] == "policy learns"
    assert notes.count("policy is saved") == 2


@pytest.mark.parametrize(("fails_at", "is_saved"), [(2, True), (3, False)])
def test_a_critic_that_fails_in_the_warm_up_is_saved_if_it_is_between_two_steps(
    tmp_path: Path, fails_at: int, is_saved: bool
) -> None:
    """It takes two optimizer steps on each batch: after three of them it has learned half from the second."""
    notes: list[str] = []
    overrides = ("checkpointing.save_interval=9", "critic.warmup_steps=4", "critic.iterations=2")
    with pytest.raises(NonFiniteError):
        run_with(config(tmp_path / "run", *PPO, *overrides), notes, fails_at=fails_at)
    assert (notes[-2:] == ["critic is saved", "policy is saved"]) == is_saved
    assert ("policy is saved" in notes) == is_saved


@pytest.mark.parametrize(("warmup", "abandoned"), [(0, "policy"), (3, "critic")])
def test_a_step_that_takes_too_long_is_abandoned_whole(tmp_path: Path, warmup: int, abandoned: str) -> None:
    """The one that learns first is abandoned, so that neither has learned; the state before is saved."""
    notes: list[str] = []
    stop = Stop()
    trainer, critic = Noting(notes), StandInCritic(notes)

    async def forward_values(batch: Batch) -> list[torch.Tensor]:
        if critic.step == 1:  # the second step
            stop.ask(signal.SIGTERM)
            stop.expire()
            waiting = [asyncio.ensure_future(each.abandoned.wait()) for each in (trainer, critic)]
            _, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in left:
                task.cancel()
        return [torch.zeros(length) for length in batch.lengths]

    critic.forward_values = forward_values  # type: ignore[method-assign]
    chosen = config(tmp_path / "run", *PPO, f"critic.warmup_steps={warmup}", "checkpointing.save_interval=9")
    run_loop(chosen, trainer, critic=critic, stop=stop)
    assert (trainer.is_abandoned, critic.is_abandoned) == (abandoned == "policy", abandoned == "critic")
    assert (trainer.step, critic.step) == (0 if warmup else 1, 1)
    assert [each["step"] for each in trainer.saved] == [1]
    assert critic.saved == [{"step": 1}]


def test_several_iterations_are_not_abandoned(tmp_path: Path) -> None:
    notes: list[str] = []
    trainer, critic = Noting(notes), StandInCritic(notes)
    chosen = config(tmp_path / "run", *PPO, "rollout.iterations=2", "critic.warmup_steps=1")
    loop = make_loop(chosen, trainer, Policy(trainer), Rewards(), critic=critic)
    assert [asyncio.run(loop.learner.abandon(step=step)) for step in (0, 1)] == [False, False]
    assert not any(each.is_abandoned for each in (trainer, critic))


# ---- What it is made from -------------------------------------------------------------------------------------------


def test_the_critic_starts_from_the_policy_with_settings_of_its_own(tmp_path: Path) -> None:
    chosen = config(
        tmp_path / "run",
        *(*PPO, "critic.training.learning_rate=0.01", "critic.iterations=3", "critic.warmup_steps=2"),
        *("critic.value_clip=null", "training.max_steps=5", "rollout.iterations=2"),
    )
    plan = plan_run(chosen)
    made = critic_config(plan.config, plan.trainer)
    assert plan.trainer.total_steps == (5 - 2) * 2
    assert made.total_steps == 5 * 3
    assert (made.model.head, resolve(made.model).folder) == ("scalar", resolve(plan.trainer.model).folder)
    assert made.training == plan.trainer.training.model_copy(update={"learning_rate": 0.01})
    assert made.checkpoint_dir == tmp_path / "run" / "checkpoints" / "critic"
    assert (made.checkpointing.keep, made.checkpointing.asynchronous) == (1, False)
    assert critic_loss(plan.config).clip is None


def test_a_run_that_ends_in_the_warm_up_is_refused(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", *PPO, "training.max_steps=null", "critic.warmup_steps=20")
    with pytest.raises(ConfigError) as caught:
        plan_run(chosen)
    assert (caught.value.path, caught.value.value) == ("critic.warmup_steps", 20)
    assert caught.value.rule == "less than the steps of the run, which are 20"
    assert caught.value.repair


def test_a_critic_that_does_not_know_the_tokens_is_refused(tmp_path: Path) -> None:
    small = resolve(config(tmp_path / "run").model).folder
    assert small is not None
    other = tmp_path / "small"
    other.mkdir()
    for file in small.iterdir():
        text = file.read_bytes()
        (other / file.name).write_bytes(text.replace(b'"vocab_size": 512', b'"vocab_size": 256'))
    for path, message in ((str(other), "does not know all tokens"), (str(tmp_path / "nowhere"), "cannot be used")):
        (error,) = grpo_worker_errors(config(tmp_path / "run", *PPO, f"critic.path={path}"))
        assert isinstance(error, ModelError)
        assert error.path == "critic.path"
        assert message in error.message
        assert error.rule
        assert error.repair
