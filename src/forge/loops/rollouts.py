"""Rollouts of the loop: where groups come from, and how many are made at once."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from forge.errors import ActorFailure, CallTimeout, EngineDead, GroupFailed, PromptError, RewardError
from forge.loops.curriculum import groups_with_tasks, make_curriculum
from forge.loops.league import make_league
from forge.loops.planning import GRPOPlan
from forge.loops.run_paths import journal_dir
from forge.loops.step_metrics import StepMetrics
from forge.loops.waits import Work
from forge.loops.workers import Workers
from forge.observe.fault_records import record_fault
from forge.rollout.buffer import ReplayBuffer
from forge.rollout.curriculum import Curriculum
from forge.rollout.episode_source import EpisodeSource
from forge.rollout.journal_file import prune_journals
from forge.rollout.league import League
from forge.rollout.references import LogprobsFunction, References
from forge.rollout.rollouter import Rollouter
from forge.types import Group

_log = logging.getLogger("forge.grpo")


class RolloutSource(Protocol):
    """What a loop needs of whatever makes its groups. Any number of `roll_out` calls run concurrently."""

    @property
    def league(self) -> League | None:
        """What draws the opponents of groups; None where nothing does."""
        ...

    @property
    def curriculum(self) -> Curriculum | None:
        """What chooses the tasks of groups; None where they come in order."""
        ...

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

    async def roll_out(self, number: int, *, oldest_version: int) -> Group:
        """Make the group of that number, with a reward for each episode.

        The number and the weights alone decide what is sampled: after a crash, the same number is asked for again.
        What was sampled before a crash, and kept, may be used again unless its weights are older than
        `oldest_version`. Raise `PromptError` for a group that can never be made, `GroupFailed` for one that was tried
        often enough, and `ActorFailure`, `EngineDead` or `CallTimeout` for one that may succeed when it is tried again.
        """
        ...

    def sample_at(self, temperature: float) -> None:
        """Sample the groups that begin from now on at this temperature. Their `Group.temperature` says so."""
        ...

    def stages(self) -> Mapping[int, tuple[str, float]]:
        """Return what every group in flight waits for, and for how many seconds."""
        ...

    def take_metrics(self) -> Mapping[str, float]:
        """Return what happened since the last call, by the names of metrics."""
        ...

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop what was kept to resume groups: these were trained on or dropped."""
        ...


def make_source(plan: GRPOPlan, workers: Workers) -> RolloutSource:
    """Return what makes the groups of a run: single-turn episodes, or those of the program that `episode` names."""
    return single_turn(plan, workers) if workers.episodes is None else episodes(plan, workers)


def episodes(plan: GRPOPlan, workers: Workers) -> EpisodeSource:
    """Return the source of groups of episodes that a program makes."""
    assert workers.episodes is not None
    section = plan.config.episode
    if plan.checkpoint is None:
        shutil.rmtree(journal_dir(plan.config).parent, ignore_errors=True)  # of another run in this folder
    else:
        prune_journals(journal_dir(plan.config), newest_version=plan.resume_step, groups=groups_with_tasks(plan))
    curriculum = make_curriculum(plan)
    source = EpisodeSource(
        plan.prompts if curriculum is None else curriculum,
        run=workers.episodes.run.route,
        compare=None if section.group_reward is None else workers.episodes.compare.route,
        references=_references(plan, workers),
        config=section,
        group_size=plan.rollout.group_size,
        journal_dir=journal_dir(plan.config),
        league=make_league(plan),
    )
    source.curriculum = curriculum
    source.sample_at(plan.temperature)
    return source


def _references(plan: GRPOPlan, workers: Workers) -> References:
    reference: LogprobsFunction | None = None
    if workers.reference is not None:
        reference = workers.reference.forward_logprobs.route
    elif plan.config.base_is_reference and plan.config.algorithm.kl.place == "reward":
        reference = workers.trainer.base_logprobs
    return References(
        reference,
        algorithm=plan.config.algorithm,
        temperature=plan.temperature,
        teacher=None if workers.teacher is None else workers.teacher.logprobs,
    )


def single_turn(plan: GRPOPlan, workers: Workers) -> RolloutSource:
    """Return the source of groups with one prompt and one completion for each episode."""
    assert workers.rewards is not None
    curriculum = make_curriculum(plan)
    source = Rollouter(
        plan.prompts if curriculum is None else curriculum,
        policy=workers.policy,
        score=workers.rewards.score.route,
        references=_references(plan, workers),
        sampling=plan.sampling,
        seed=plan.config.run.seed,
    )
    source.curriculum = curriculum
    return source


class RolloutRunner:
    """Starts a rollout whenever the buffer admits one.

    A group whose generator or reward process died is requeued, `rollout.max_task_retries` times. One that can never be
    made (a prompt that does not fit), or whose rewards failed under the rule `skip`, is dropped; the ledger says so.
    """

    def __init__(self, plan: GRPOPlan, source: RolloutSource, buffer: ReplayBuffer, *, metrics: StepMetrics) -> None:
        self._plan, self._source, self._buffer, self._metrics = plan, source, buffer, metrics
        self._tries: Counter[int] = Counter()
        self.on_change: Callable[[], object] = lambda: None
        """Called when a group is done with."""

    async def run(self) -> None:
        """Run until the buffer admits no more. Raise what a rollout raises beyond its retries."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while (number := await self._buffer.admit()) is not None:
                    if self._source.curriculum is not None:
                        self._source.curriculum.choose(number)  # now: what is known later may be more
                    rolling = tasks.create_task(self._roll_out(number), name=f"rollout {number}")
                    rolling.add_done_callback(lambda _: self.on_change())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _roll_out(self, number: int) -> None:
        try:
            group = await self._source.roll_out(number, oldest_version=self._buffer.oldest_version)
        except PromptError as error:
            _log.warning("group %d is dropped: %s", number, error)
            record_fault("group", error, where=f"group {number}, which is dropped")
            self._buffer.drop(number, "refused")
            return
        except GroupFailed as error:
            _log.warning("group %d is dropped: %s", number, error)
            record_fault("group", error, where=f"group {number}, which is dropped")
            self._buffer.drop(number, "failed")
            return
        except (ActorFailure, EngineDead, CallTimeout) as error:
            self._tries[number] += 1
            if self._tries[number] > self._plan.rollout.max_task_retries:
                raise
            _log.warning("group %d is requeued: %s", number, error.message)
            record_fault("group", error, where=f"group {number}, which is requeued")
            self._buffer.requeue(number)
            return
        if self._source.curriculum is not None:
            self._source.curriculum.finished(group)
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

    @property
    def work(self) -> Work:
        """What a batch waits for."""
        buffer = self._buffer
        count = lambda: (min(buffer.num_ready, buffer.batch_groups), buffer.batch_groups)  # noqa: E731
        return Work(self.describe_wait, "waiting for rollouts", "first rollouts", count, "groups")

    def describe_wait(self) -> str:
        """Return what a batch is waiting for, for a log line."""
        stages = self._source.stages()
        shown = [f"group {number} {name} for {seconds:.0f} s" for number, (name, seconds) in stages.items()]
        in_flight = ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
        ready = f"{self._buffer.num_ready} of {self._buffer.batch_groups} groups are ready"
        num_stale = self._buffer.counts.num_stale
        stale = f"; {num_stale} came from weights that were too old and were requeued" if num_stale else ""
        num_no_signal = self._buffer.tally.num_groups
        no_signal = f"; {num_no_signal} in a row had no signal" if num_no_signal else ""
        return f"{ready}; in flight: {in_flight or 'none'}{stale}{no_signal}"
