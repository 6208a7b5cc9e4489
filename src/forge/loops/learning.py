"""One step of learning: groups with rewards become advantages, a batch, and optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forge.loops.planning import GRPOPlan
from forge.loops.workers import Workers
from forge.rollout.credit import assign_advantages
from forge.rollout.samples import make_batch, with_field
from forge.types import Batch, Group, StepResult


class Learner:
    """Teaches the trainer from groups, as the algorithm says."""

    def __init__(self, plan: GRPOPlan, workers: Workers) -> None:
        self._plan, self._workers = plan, workers

    async def learn(self, groups: Sequence[Group]) -> tuple[list[Group], StepResult]:
        """Take the optimizer's steps on one batch. Returns the groups with their advantages, and what happened."""
        mask_truncated = self._plan.rollout.mask_truncated
        with_advantages = assign_advantages(
            groups, self._plan.config.algorithm, mask_truncated=mask_truncated, function=self._plan.advantage
        )
        batch = make_batch(
            with_advantages,
            mask_truncated=mask_truncated,
            with_reference="ref_logprobs" in self._plan.loss.fields,
        )
        await self._workers.policy.sleep()
        result = await self._steps_on(batch)
        if self._plan.config.placement == "turns":  # else generators would wake to a device that is full
            await self._workers.trainer.release_memory()
        await self._workers.policy.wake()
        return with_advantages, result

    async def _steps_on(self, batch: Batch) -> StepResult:
        """Take all steps on one batch. Report what the first one saw."""
        trainer, record = self._workers.trainer, self._plan.config.record
        if "proximal_logprobs" in self._plan.loss.fields:
            before = await trainer.forward_logprobs(batch, temperature=self._plan.temperature)
            batch = with_field(batch, "proximal_logprobs", before)
        first = await trainer.train_step(batch, keep_logprobs=record.rollouts != "none" and record.trainer_logprobs)
        last, seconds = first, first.seconds
        for _ in range(self._plan.rollout.iterations - 1):
            last = await trainer.train_step(batch)
            seconds += last.seconds
        return replace(first, seconds=seconds, learning_rate=last.learning_rate)
