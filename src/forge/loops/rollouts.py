"""Rollouts of the loop: where groups come from, and how many are made at once."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from forge.errors import ActorFailure, CallTimeout, EngineDead, PromptError, RewardError
from forge.loops.planning import GRPOPlan
from forge.loops.step_metrics import StepMetrics
from forge.loops.workers import Workers
from forge.rollout.buffer import ReplayBuffer
from forge.rollout.rollouter import Rollouter
from forge.types import Group

_log = logging.getLogger("forge.grpo")


class RolloutSource(Protocol):
    """What a loop needs of whatever makes its groups. Any number of `roll_out` calls run concurrently."""

    @property
    def num_samples(self) -> int:
        """Completions that were sampled so far, whatever became of their groups."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of those completions."""
        ...

    @property
    def generating_s(self) -> float:
        """Seconds so far in which at least one group was being generated."""
        ...

    async def roll_out(self, number: int) -> Group:
        """Make the group of that number, with a reward for each episode.

        The number and the weights alone decide what is sampled: after a crash, the same number is asked for again.
        Raise `PromptError` for a group that can never be made, and `ActorFailure`, `EngineDead` or `CallTimeout` for
        one that may succeed when it is tried again.
        """
        ...

    def stages(self) -> Mapping[int, tuple[str, float]]:
        """Return what every group in flight waits for, and for how many seconds."""
        ...


def single_turn(plan: GRPOPlan, workers: Workers) -> RolloutSource:
    """Return the source of groups with one prompt and one completion for each episode."""
    return Rollouter(
        plan.prompts,
        policy=workers.policy,
        score=workers.rewards.score.route,
        ref_logprobs=None if workers.reference is None else workers.reference.forward_logprobs.route,
        sampling=plan.sampling,
        algorithm=plan.config.algorithm,
        seed=plan.config.run.seed,
    )


class RolloutRunner:
    """Starts a rollout whenever the buffer admits one.

    A group whose generator or reward process died is requeued, `rollout.max_task_retries` times. One that can never be
    made (a prompt that does not fit), or whose rewards failed under the rule `skip`, is dropped; the ledger says so.
    """

    def __init__(self, plan: GRPOPlan, source: RolloutSource, buffer: ReplayBuffer, *, metrics: StepMetrics) -> None:
        self._plan, self._source, self._buffer, self._metrics = plan, source, buffer, metrics
        self._tries: Counter[int] = Counter()

    async def run(self) -> None:
        """Run until the buffer admits no more. Raise what a rollout raises beyond its retries."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while (number := await self._buffer.admit()) is not None:
                    tasks.create_task(self._roll_out(number), name=f"rollout {number}")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _roll_out(self, number: int) -> None:
        try:
            group = await self._source.roll_out(number)
        except PromptError as error:
            _log.warning("group %d is dropped: %s", number, error)
            self._buffer.drop(number, "refused")
            return
        except (ActorFailure, EngineDead, CallTimeout) as error:
            self._tries[number] += 1
            if self._tries[number] > self._plan.rollout.max_task_retries:
                raise
            _log.warning("group %d is requeued: %s", number, error.message)
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
                f"the reward {name!r} failed on group {group.number} ({group.task.id}): {why}",
                path="rewards.on_error",
                value="stop",
                rule="with `stop` a reward that fails ends the run",
                repair="correct the reward, or set rewards.on_error to zero or skip",
            )
        _log.warning("group %d is skipped: the reward %r failed: %s", group.number, name, why)
        self._buffer.drop(group.number, "failed", group=group)

    def describe_wait(self) -> str:
        """Return what a batch is waiting for, for a log line."""
        stages = self._source.stages()
        shown = [f"group {number} {name} for {seconds:.0f} s" for number, (name, seconds) in stages.items()]
        in_flight = ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
        ready = f"{self._buffer.num_ready} of {self._plan.rollout.batch_groups} groups are ready"
        num_stale = self._buffer.counts.num_stale
        stale = f"; {num_stale} came from weights that were too old and were requeued" if num_stale else ""
        num_no_signal = self._buffer.tally.num_groups
        no_signal = f"; {num_no_signal} in a row had no signal" if num_no_signal else ""
        return f"{ready}; in flight: {in_flight or 'none'}{stale}{no_signal}"
