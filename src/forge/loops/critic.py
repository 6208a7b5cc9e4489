"""The critic of a run: a trainer of its own, whose values become advantages.

Which critic values which batch: batch b is valued when it is taken for training, by the critic that has learned from
batches 0 to b - 1, however old the weights are that sampled it. Returns are computed from these values, before the
critic learns from the batch. So the staleness of the critic is 0, in synchronous and in asynchronous runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forge.config import GRPOConfig, TrainerConfig
from forge.errors import CheckpointError
from forge.loops.run_paths import checkpoint_dir, crash_dir
from forge.observe import span
from forge.rollout.step_record import CriticRecord, values_digest
from forge.rollout.value_credit import CriticBatch, value_samples, with_values
from forge.runtime.placement import GPU_VARIABLE
from forge.trainer.actor import Trainer
from forge.trainer.checkpoint_folder import CheckpointInfo, check_checkpoint, checkpoint_name, read_checkpoint
from forge.trainer.handles import ServedTrainer, ServiceTrainer, planned_ranks, trainer_options
from forge.trainer.recovering import RecoverySetup, recovering
from forge.types import Batch, Group, StepResult

if TYPE_CHECKING:
    from forge.losses import CriticLoss

_log = logging.getLogger("forge.grpo")
_SECONDS: Final = "critic/seconds"
CRITIC_FOLDER: Final = "critic"
"""The folder in a checkpoint that has the critic's, and next to the checkpoints the one in which it is written."""


def policy_steps(config: GRPOConfig, num_steps: int) -> int:
    """Return the optimizer steps of the policy in a run of so many steps: none in the critic's warm-up."""
    return max(0, num_steps - config.critic.warmup_steps) * config.rollout.iterations


def critic_config(config: GRPOConfig, trainer: TrainerConfig) -> TrainerConfig:
    """Return what the critic is made from; `trainer` is what the policy's trainer is made from.

    Its checkpoints are written while the loop waits, and become a part of the policy's, so one of its own is kept.
    """
    assert trainer.checkpoint_dir is not None and trainer.total_steps is not None  # noqa: PT018
    num_steps = trainer.total_steps // config.rollout.iterations + config.critic.warmup_steps
    own = {"keep": 1, "keep_best": False, "asynchronous": False}
    return trainer.model_copy(
        update={
            "model": config.critic.model_from(trainer.model),
            "training": config.critic.training.over(trainer.training),
            "adapter": None,  # it trains all of its weights
            "distributed": config.critic_distributed,
            "checkpoint_dir": trainer.checkpoint_dir / CRITIC_FOLDER,
            "checkpointing": trainer.checkpointing.model_copy(update=own),
            "total_steps": num_steps * config.critic_iterations,
        }
    )


def critic_loss(config: GRPOConfig) -> CriticLoss:
    """Return what the critic minimizes."""
    from forge.losses import CriticLoss

    return CriticLoss(config.critic.value_clip)


def find_critic_checkpoint(policy: CheckpointInfo) -> CheckpointInfo:
    """Return the critic's part of a checkpoint. Refuse a checkpoint without one, or with a damaged one."""
    folder = policy.path / CRITIC_FOLDER
    if not folder.is_dir():
        raise CheckpointError(
            "this run cannot resume from the checkpoint: it has no critic",
            path=str(policy.path),
            value="a checkpoint of a run without a critic",
            rule="one with a critic, since algorithm.advantage.function is `gae`",
            repair="name a checkpoint of this run; to start from the weights of another run, set model.path to the "
            "folder `hf` next to its checkpoints, and leave --resume out",
        )
    found = read_checkpoint(folder)
    check_checkpoint(found)
    return found


async def start_critic(
    config: GRPOConfig, trainer: TrainerConfig, *, with_gpus: bool, on_gpus: str | None
) -> ServedTrainer:
    """Start the critic's processes, on the GPUs `on_gpus` where it is beside the trainer. It is restored if it dies."""
    start = partial(start_critic_service, config, trainer, with_gpus=with_gpus, on_gpus=on_gpus)
    return await recovering(
        RecoverySetup("critic", start, config.recovery, checkpoint_dir(config), crash_dir(config), part=CRITIC_FOLDER)
    )


async def start_critic_service(
    config: GRPOConfig, trainer: TrainerConfig, *, with_gpus: bool, on_gpus: str | None
) -> ServiceTrainer:
    """Start the critic's processes; a critic that dies is not restored."""
    made = critic_config(config, trainer)
    options = trainer_options(made.distributed) | {"mesh_name": "critic"} | config.workers.critic.options()
    if on_gpus and config.critic.placement == "beside" and with_gpus:
        options["env"][GPU_VARIABLE] = ",".join(on_gpus.split(",")[: planned_ranks(made.distributed)])
        options["with_gpus"] = False
    return ServiceTrainer(await Trainer.options(**options).as_service(made, critic_loss(config)))


def in_warmup(seen: StepResult) -> StepResult:
    """Return the result of a step in which the critic learned alone: `seen` is what it saw."""
    return replace(seen, loss=0.0, grad_norm=0.0, learning_rate=0.0, num_loss_tokens=0, metrics={})


class Critic:
    """Values groups, learns from them, and is saved with the policy."""

    def __init__(self, config: GRPOConfig, handle: ServedTrainer, *, mask_truncated: bool) -> None:
        self._config, self._handle, self._mask_truncated = config, handle, mask_truncated
        self._made_with = config.critic.training.over(config.training).learning_rate
        self._options: dict[str, Any] = {}
        self._learned_with: float | None = None
        self.metrics: dict[str, float] = {}
        """What the last step found, by the names of metrics."""

    def use_rate(self, learning_rate: float | None) -> None:
        """Take this as the highest rate of the schedule from the next step on; None for what it was made with."""
        is_own = learning_rate is None or learning_rate == self._made_with
        self._options = {} if is_own else {"learning_rate": learning_rate}

    def learns_alone(self, *, after: int) -> bool:
        """Whether the step after so many steps is one of the warm-up, in which the policy does not learn."""
        return after < self._config.critic.warmup_steps

    def record(self, valued: Sequence[Group]) -> CriticRecord:
        """Return what a replay needs of the last step, which learned from these groups."""
        outcome = {name: float(value) for name, value in self.metrics.items() if name != _SECONDS}
        return CriticRecord(values_digest(valued), outcome, self._learned_with)

    async def value(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the newest critic's values."""
        samples = value_samples(groups)
        with span("value batch", num_samples=len(samples)):
            return with_values(groups, await self._handle.forward_values(Batch.of(samples)) if samples else [])

    async def learn(self, groups: Sequence[Group]) -> StepResult:
        """Take the critic's steps on groups with values. Returns what the first step saw."""
        found = CriticBatch.of(groups, self._config.algorithm, mask_truncated=self._mask_truncated)
        options = self._options
        self._learned_with = options.get("learning_rate")
        first = last = await self._handle.train_step(found.batch, **options)
        seconds = first.seconds
        for _ in range(self._config.critic_iterations - 1):
            last = await self._handle.train_step(found.batch, **options)
            seconds += last.seconds
        self.metrics = {
            "critic/loss": first.loss,
            "critic/grad_norm": first.grad_norm,
            "critic/learning_rate": last.learning_rate,
            "critic/squared_error": float(first.metrics["squared_error"]),
            "critic/clip_fraction": float(last.metrics["clip_fraction"]),
            _SECONDS: seconds,
            **{f"critic/{name}": value for name, value in found.metrics().items()},
            **({"critic/skipped": 1.0} if first.skipped or last.skipped else {}),
        }
        return replace(first, seconds=seconds)

    async def save(self, folder: Path, *, step: int) -> Mapping[str, Path]:
        """Write a complete checkpoint of the state after `step`, and return where it is, for the policy's to take."""
        await self._handle.save(extra={"step": step})
        await self._handle.wait_saved()
        state: dict[str, Any] = await self._handle.state()
        return {CRITIC_FOLDER: folder / CRITIC_FOLDER / checkpoint_name(state["step"])}

    async def load(self, checkpoint: CheckpointInfo, *, step: int) -> None:
        """Resume from the critic's part of a policy's checkpoint, which was saved after `step`."""
        extra = await self._handle.load(str(checkpoint.path / CRITIC_FOLDER))
        if extra is None or extra.get("step") != step:
            raise CheckpointError(
                "the critic in the checkpoint is not of the same step as the policy",
                path=str(checkpoint.path / CRITIC_FOLDER),
                value=None if extra is None else extra.get("step"),
                rule=f"step {step}",
                repair="resume from another checkpoint",
            )

    async def is_before(self, step: int) -> bool:
        """Whether it has learned from the batches before `step` and from no other."""
        return bool((await self._handle.state())["step"] == step * self._config.critic_iterations)

    async def export(self, folder: Path) -> None:
        """Write its weights as a Hugging Face folder."""
        await self._handle.export_hf(folder / CRITIC_FOLDER / "hf", overwrite=True)
