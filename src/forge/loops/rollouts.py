"""The half of the loop that makes groups: numbers in, groups in the buffer out."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from forge.errors import ActorFailure, CallTimeout, EngineDead, PromptError, RewardError
from forge.loops.planning import GRPOPlan
from forge.loops.step_metrics import StepMetrics
from forge.rollout.buffer import ReplayBuffer
from forge.rollout.rollouter import Rollouter
from forge.types import Group

_log = logging.getLogger("forge.grpo")


class RolloutRunner:
    """Begins a rollout whenever the buffer admits one.

    A group whose generator or reward process died goes back to the queue, `rollout.max_task_retries` times. One that
    can never be made (a prompt that does not fit), or whose rewards failed under the rule `skip`, is given up: the
    buffer remembers, and the ledger says so.
    """

    def __init__(self, plan: GRPOPlan, rollouter: Rollouter, buffer: ReplayBuffer, *, metrics: StepMetrics) -> None:
        self._plan, self._rollouter, self._buffer, self._metrics = plan, rollouter, buffer, metrics
        self._tries: Counter[int] = Counter()

    async def run(self) -> None:
        """Go on until the buffer admits no more. What a rollout raises beyond its retries is raised here."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while (number := await self._buffer.admit()) is not None:
                    tasks.create_task(self._roll_out(number), name=f"rollout {number}")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _roll_out(self, number: int) -> None:
        try:
            group = await self._rollouter.roll_out(number)
        except PromptError as error:
            _log.warning("group %d is left out: %s", number, error)
            self._buffer.drop(number, "refused")
            return
        except (ActorFailure, EngineDead, CallTimeout) as error:
            self._tries[number] += 1
            if self._tries[number] > self._plan.rollout.max_task_retries:
                raise
            _log.warning("group %d goes back to the queue: %s", number, error.message)
            self._buffer.requeue(number)
            return
        failed = [episode for episode in group.episodes if episode.score.failures]
        self._metrics.count_failures(failed)
        if failed and self._plan.config.rewards.on_error != "zero" and not self._buffer.is_stale(group):
            self._deal_with_failure(group)
        else:
            self._buffer.put(group)

    def _deal_with_failure(self, group: Group) -> None:
        failures = next(episode.score.failures for episode in group.episodes if episode.score.failures)
        name, why = next(iter(failures.items()))
        if self._plan.config.rewards.on_error == "stop":
            raise RewardError(
                f"the reward {name!r} failed on group {group.number} ({group.prompt.id}): {why}",
                path="rewards.on_error",
                value="stop",
                rule="with `stop` a reward that fails ends the run",
                repair="correct the reward, or set rewards.on_error to zero or skip",
            )
        _log.warning("group %d is skipped: the reward %r failed: %s", group.number, name, why)
        self._buffer.drop(group.number, "failed", group=group)
