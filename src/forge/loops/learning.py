"""One step of learning: groups with rewards become advantages, a batch, and optimizer steps."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.config import GRPOConfig
from forge.errors import SaveError
from forge.loops.critic import Critic, in_warmup, policy_steps
from forge.loops.planning import GRPOPlan
from forge.loops.run_paths import checkpoint_dir
from forge.loops.utilization import Utilization
from forge.loops.workers import Workers
from forge.observe.sink import Value
from forge.rollout.agent_credit import AgentCredit
from forge.rollout.credit import AdvantageFunction, assign_advantages
from forge.rollout.samples import make_batch, with_field
from forge.rollout.step_record import LearnedBatch
from forge.trainer.handles import ServedTrainer, TrainerHandle
from forge.trainer.recovering import RecoveringTrainer, add_up
from forge.types import Batch, Group, StepResult

if TYPE_CHECKING:
    from forge.losses import Loss

_log = logging.getLogger("forge.grpo")


@dataclass(frozen=True, slots=True)
class StepRule:
    """How groups become a batch, and a batch the policy's optimizer steps: the same in a run and in its replay.

    Attributes:
        config: the run's configuration.
        loss: what is minimised.
        advantage: computes advantages from groups.
        credit: how the agents of episodes with several are credited.
    """

    config: GRPOConfig
    loss: Loss
    advantage: AdvantageFunction
    credit: AgentCredit = field(default_factory=AgentCredit)

    def batch(self, groups: Sequence[Group]) -> tuple[list[Group], Batch]:
        """Return the groups with their advantages, and the batch that they make."""
        mask_truncated = self.config.rollout.mask_truncated
        with_advantages = assign_advantages(
            groups,
            self.config.algorithm,
            mask_truncated=mask_truncated,
            function=self.advantage,
            agents=self.credit,
        )
        batch = make_batch(
            with_advantages,
            mask_truncated=mask_truncated,
            with_reference="ref_logprobs" in self.loss.fields and not self.config.base_is_reference,
        )
        return with_advantages, batch

    async def take_steps(
        self, trainer: TrainerHandle, batch: Batch, *, learning_rate: float | None = None
    ) -> StepResult:
        """Take all steps on one batch. Report what the first one saw. `learning_rate` is the highest rate of the
        schedule; None for what the trainer was made with."""
        own, record = self.config.generator.sampling.temperature, self.config.record
        temperature = None if batch.temperatures else own
        options: dict[str, Any] = {} if learning_rate is None else {"learning_rate": learning_rate}
        if "ref_logprobs" in self.loss.fields and self.config.base_is_reference:
            batch = with_field(batch, "ref_logprobs", await trainer.base_logprobs(batch, temperature))
        if "proximal_logprobs" in self.loss.fields:
            before = await trainer.forward_logprobs(batch, temperature=temperature)
            batch = with_field(batch, "proximal_logprobs", before)
        keep = record.rollouts != "none" and record.trainer_logprobs
        first = await trainer.train_step(batch, keep_logprobs=keep, **options)
        last, seconds = first, first.seconds
        for _ in range(self.config.rollout.iterations - 1):
            last = await trainer.train_step(batch, **options)
            seconds += last.seconds
        return replace(first, seconds=seconds, learning_rate=last.learning_rate)


class Learner:
    """Teaches the trainer from groups, as the algorithm says, and with it the critic, if there is one: a step of the
    run is a step of both. `credit` is that of episodes with several agents."""

    def __init__(self, plan: GRPOPlan, workers: Workers, credit: AgentCredit) -> None:
        self._plan, self._workers, self._credit = plan, workers, credit
        self._rule = StepRule(plan.config, plan.loss, plan.advantage, credit)
        mask = plan.rollout.mask_truncated
        self._critic = None if workers.critic is None else Critic(plan.config, workers.critic, mask_truncated=mask)
        self._trainers = [workers.trainer] if workers.critic is None else [workers.trainer, workers.critic]
        self._is_learning = False
        self._restart: Mapping[str, float] = {}
        self.batch: Batch | None = None
        """The batch of the last step, or of the one under way."""
        self.learned: LearnedBatch | None = None
        """What the last step learned from."""
        self._next_rate: float | None = None
        self._utilization: Utilization | None = None
        self._mfu: float | None = None
        self._shares_gpu = plan.run.critic is not None and plan.run.critic.is_beside and plan.run.critic.on_gpu

    def take_metrics(self) -> dict[str, Value]:
        """Return what the critic found in the last step, if there is one, and what recovery has cost since the last."""
        values: dict[str, Value] = {} if self._critic is None else dict(self._critic.metrics)
        restart, self._restart = self._restart, {}
        if self._mfu is not None:
            values["train/mfu"] = self._mfu
        return values | add_up([restart, *(trainer.take_metrics() for trainer in self._trainers)])

    def note_restart(self, metrics: Mapping[str, float]) -> None:
        """Add to the next step's metrics what it cost to start the whole run again."""
        self._restart = metrics

    def use_rates(self, config: GRPOConfig) -> None:
        """Take the learning rates of a configuration from the next step on."""
        rate = config.training.learning_rate
        self._next_rate = None if rate == self._plan.trainer.training.learning_rate else rate
        if self._critic is not None:
            self._critic.use_rate(config.critic.training.over(config.training).learning_rate)

    async def learn(self, groups: Sequence[Group], *, step: int) -> tuple[list[Group], StepResult]:
        """Take the optimizer's steps on one batch, after `step` steps of the run. Returns the groups with their
        advantages, and what happened."""
        self._is_learning = True
        try:
            return await self._learn(groups, step=step)
        finally:
            self._is_learning = False

    async def _learn(self, groups: Sequence[Group], *, step: int) -> tuple[list[Group], StepResult]:
        await self._workers.policy.sleep()
        valued = groups if self._critic is None else await self._critic.value(groups)
        await self._free(self._workers.critic)
        with_advantages, batch = self._rule.batch(valued)
        self.batch, rate = batch, self._next_rate
        result = await self._steps(batch, valued, step=step, learning_rate=rate)
        self._mfu = self._utilization_of(batch, result)
        critic = None if self._critic is None else self._critic.record(valued)
        self.learned = LearnedBatch(batch, rate, critic)
        self._credit.learned_from(groups)
        if self._plan.config.placement == "turns":  # else generators would wake to a device that is full
            await self._workers.trainer.release_memory()
            if self._workers.critic is not None:
                await self._workers.critic.release_memory()
        await self._workers.policy.wake()
        return with_advantages, result

    def _utilization_of(self, batch: Batch, result: StepResult) -> float | None:
        """Return which part of the peak of its devices the policy's trainer used; None where that is not known."""
        if self._utilization is None or not result.num_tokens or result.seconds <= 0:
            return None
        rate = result.num_tokens * self._plan.config.rollout.iterations / result.seconds
        return self._utilization.of(batch.lengths, rate)

    async def _steps(
        self, batch: Batch, valued: Sequence[Group], *, step: int, learning_rate: float | None
    ) -> StepResult:
        """Let the policy and then the critic learn; in the critic's warm-up the critic alone."""
        if self._critic is None:
            return await self._rule.take_steps(self._workers.trainer, batch, learning_rate=learning_rate)
        if self._critic.learns_alone(after=step):
            result = in_warmup(await self._critic.learn(valued))
        else:
            result = await self._rule.take_steps(self._workers.trainer, batch, learning_rate=learning_rate)
            await self._free(self._workers.trainer)
            await self._critic.learn(valued)
        await self._free(self._workers.critic)
        return result

    async def _free(self, trainer: ServedTrainer | None) -> None:
        """Let a trainer release what its allocator keeps, where policy and critic compute in turns on the same GPU."""
        if self._shares_gpu and trainer is not None:
            await trainer.release_memory()

    async def abandon(self, *, step: int) -> bool:
        """Let the step after `step` be abandoned, if the state is then the one before it. Returns whether it may be.

        Of policy and critic the one that learns first is abandoned: once it has learned, the other does, too. With
        several iterations the state may lie between two optimizer steps on the same batch.
        """
        config = self._plan.config
        is_warmup = self._workers.critic is not None and step < config.critic.warmup_steps
        if (config.critic_iterations if is_warmup else config.rollout.iterations) > 1:
            return False
        trainer = self._workers.critic if is_warmup else self._workers.trainer
        assert trainer is not None
        await trainer.abandon_step()
        return True

    # ---- Recovery -------------------------------------------------------------------------------------------------

    def recover_while(self, may_recover: Callable[[], bool]) -> None:
        """Let the policy's trainer and the critic be restored when they die, for as long as a condition holds."""
        for trainer in self._trainers:
            if isinstance(trainer, RecoveringTrainer):
                trainer.may_recover, trainer.make_room = may_recover, self._make_room
                trainer.remake_parts = self._remake_parts

    @asynccontextmanager
    async def _make_room(self) -> AsyncIterator[None]:
        """Let generators sleep while a trainer is restored on their device; while it learns they sleep already."""
        if self._is_learning:
            yield
            return
        await self._workers.policy.sleep()
        yield
        await self._workers.policy.wake()

    async def _remake_parts(self, step: int) -> Mapping[str, Path] | None:
        if self._critic is None or not await self._critic.is_before(step):
            return None
        return await self._critic.save(checkpoint_dir(self._plan.config), step=step)

    @property
    def is_log_full(self) -> bool:
        """Whether a checkpoint is due, so that what would be trained again stays bounded."""
        return any(trainer.is_log_full for trainer in self._trainers)

    # ---- Checkpoints ----------------------------------------------------------------------------------------------

    async def is_before(self, step: int) -> bool:
        """Whether policy and critic have learned from the batches before `step` and from no other."""
        state = await self._workers.trainer.state()
        is_whole = state["step"] == policy_steps(self._plan.config, step)
        return is_whole and (self._critic is None or await self._critic.is_before(step))

    async def save(self, *, extra: Mapping[str, Any], metric: float | None) -> None:
        """Save the policy and the critic as one checkpoint: it has both, or does not appear."""
        trainer = self._workers.trainer
        if self._critic is None:
            await trainer.save(extra=extra, metric=metric)
            return
        await trainer.wait_saved()  # it takes the critic's last one
        config, step = self._plan.config, int(extra["step"])
        parts = await self._critic.save(checkpoint_dir(config), step=step)
        await trainer.save(extra=extra, metric=metric, parts=parts, step=step * config.rollout.iterations)

    async def complete_save(self) -> None:
        """Wait for a checkpoint that is being written. That it fails is logged: something else ends the run."""
        try:
            await self._workers.trainer.wait_saved()
        except SaveError as error:
            _log.warning("%s", error)

    async def load(self, resume: str) -> dict[str, Any] | None:
        """Resume from a checkpoint, and return what was saved with it as `extra`; None to start anew."""
        extra = await self._workers.trainer.load(resume)
        self._utilization = Utilization(self._plan.trainer.model, await self._workers.trainer.state())
        if extra is not None and self._critic is not None:
            assert self._plan.checkpoint is not None
            await self._critic.load(self._plan.checkpoint, step=int(extra["step"]))
        return extra

    async def export(self, folder: Path) -> Path:
        """Write the policy's weights into `hf` of a folder, and the critic's into `critic/hf`. Returns the former."""
        await self._workers.trainer.export_hf(folder / "hf", overwrite=True)
        if self._critic is not None:
            await self._critic.export(folder)
        return folder / "hf"
