"""Reinforcement learning of a policy: GRPO and its family.

    prompts ──number──▶ rollouter ──▶ generators ──Completion──▶ rewards | reference ──Group──▶ buffer
                            ▲                                                                    │ batch
        admits by staleness │                                                                    ▼
                          buffer ◀──version served── generators ◀──version── store ◀── advantages, trainer.train_step

Two coroutines run concurrently. `RolloutRunner` starts a rollout whenever the buffer admits one, and puts finished
groups into the buffer. `_train` takes a batch when one is ready, trains on it, and sends the new weights to the
generators. Synchronous training needs no other code: `rollout.staleness` alone says how far rollouts may run ahead.

A checkpoint holds the weights, the optimizer, and which groups are pending. The ledger says what became of all others.
So a run that is killed anywhere resumes with every group learned from once, or back in the queue.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forge.config import GRPOConfig, save
from forge.envs.episode import EpisodeProgram
from forge.errors import CheckpointError, NonFiniteError, RecordError, RolloutError, StepAbandoned
from forge.loops.agents import agent_credit
from forge.loops.bound_versions import BoundVersions
from forge.loops.curriculum import RunCurriculum
from forge.loops.evaluation import Evaluation, make_evaluator
from forge.loops.league import run_league
from forge.loops.learning import Learner
from forge.loops.planning import GRPOPlan
from forge.loops.preflight import check_grpo
from forge.loops.recording import Records, tracing
from forge.loops.restarting import Restarts, start_planned
from forge.loops.results import GRPOResult
from forge.loops.resuming import SaveRule, check_continues, group_keys, ledger_before, report_changes, where_it_stopped
from forge.loops.rollouts import RolloutRunner, RolloutSource, make_source
from forge.loops.run_paths import checkpoint_dir, run_dir
from forge.loops.scaling import RunScaling
from forge.loops.step_metrics import StepClock, StepMetrics
from forge.loops.stopping import Reminder, Stop, stopped_by_signals
from forge.loops.volumes import load_version
from forge.loops.workers import Workers
from forge.observe import span
from forge.observe.clock import monotonic_s
from forge.rollout.buffer import ReplayBuffer, TakenBatch
from forge.rollout.credit import AdvantageFunction
from forge.rollout.signal import NoSignalGroup
from forge.runtime.lifetime import run
from forge.trainer.recovering import LOST
from forge.trainer.schedules import is_due
from forge.types import Group, StepResult

if TYPE_CHECKING:
    from forge.losses import Loss

__all__ = ["GRPOLoop", "GRPOResult", "run_grpo"]

_log = logging.getLogger("forge.grpo")
T = TypeVar("T")


async def run_grpo(
    config: GRPOConfig,
    *,
    loss: Loss | None = None,
    advantage: AdvantageFunction | None = None,
    episode: EpisodeProgram | None = None,
) -> GRPOResult:
    """Train a policy as a configuration says. Everything that it starts is gone when it returns or raises.

    `loss` and `advantage` are used instead of those that the section `algorithm` names, and `episode` instead of what
    the section `episode` names: a program made with `@forge.episode` or `forge.episode_from_env`.
    SIGINT, SIGTERM and SIGHUP end it after a checkpoint; a second signal ends it at once, with SystemExit.
    """
    plan = check_grpo(config, program=episode)
    if loss is not None:
        from forge.losses.build import check_loss

        check_loss(loss, temperature=plan.temperature)
        plan = replace(plan, loss=loss, own_loss=True)
    if advantage is not None:
        plan = replace(plan, advantage=advantage, own_advantage=True)
    with tracing(config.record.trace):  # before workers start: they inherit it
        return await _run(plan)


async def _run(plan: GRPOPlan) -> GRPOResult:
    """Run a plan, again from its newest checkpoint where the loss of a worker ends it. When all processes have ended,
    log what a resume continues after."""
    hint, grace_s = "this step is finished and saved", plan.config.checkpointing.grace_s
    restarts, is_stopped = Restarts(plan), True
    async with stopped_by_signals(save_hint=hint, grace_s=grace_s) as (stop, _):
        try:
            while True:
                try:
                    result = await _attempt(plan, stop, restarts)
                except LOST as failure:
                    plan = await restarts.after(failure, plan, stop=stop)
                else:
                    is_stopped = result.is_stopped
                    return result
        finally:
            if is_stopped:
                step = plan.resume_step if restarts.loop is None else restarts.loop.step
                _log.warning("%s", where_it_stopped(step, checkpoint_dir(plan.config)))


async def _attempt(plan: GRPOPlan, stop: Stop, restarts: Restarts) -> GRPOResult:
    """Start the workers and run a loop."""
    async with run(plan.config.launcher):
        workers = await stop.unless(start_planned(plan))
        if workers is None:
            return GRPOResult(plan.resume_step, math.nan, None, None, True, None, None, stop.exit_code)
        loop = restarts.begin(GRPOLoop(plan, workers, make_source(plan, workers), stop=stop), plan)
        try:
            return await loop.run()
        finally:
            loop.close()


class GRPOLoop:
    """One run, from its first group or from where a checkpoint left it.

    Args:
        plan: what is to be done.
        workers: the services that do it.
        source: makes the groups that are trained on; `make_source` gives the one of `run_grpo`.
        stop: says when the run is asked to end.
        clock: seconds, for the time between two checkpoints and for throughput.
    """

    def __init__(
        self,
        plan: GRPOPlan,
        workers: Workers,
        source: RolloutSource,
        *,
        stop: Stop | None = None,
        clock: Callable[[], float] = monotonic_s,
    ) -> None:
        self._plan, self._config, self._workers = plan, plan.config, workers
        self._stop = stop or Stop()
        self._credit = agent_credit(self._config, plan.program)
        self._buffer = ReplayBuffer(
            plan.rollout,
            num_groups=plan.num_groups,
            algorithm=self._config.algorithm,
            advantage=plan.advantage,
            agents=self._credit,
            on_no_signal=self._note_no_signal,
        )
        self._source, self.learner = source, Learner(plan, workers, self._credit)
        self.learner.recover_while(lambda: self._stop.signal is None)
        self._league = run_league(plan, source.league, workers.policy)
        self._curriculum = RunCurriculum(source.curriculum)
        self._bound = BoundVersions(self._config, workers)
        self._evaluator = make_evaluator(plan, workers, source)
        self._records: Records | None = None
        self._has_begun = False
        self._metrics = StepMetrics(source, self._buffer, clock=clock)
        self._runner = RolloutRunner(plan, source, self._buffer, metrics=self._metrics)
        self._scaling = RunScaling(plan, workers, self._buffer, step=lambda: self._step)
        self._clock = StepClock()
        self._save_rule = SaveRule(self._config.checkpointing, clock=clock)
        self._ledger_before: dict[str, Any] | None = None
        self._step, self._reward = 0, math.nan
        self._weights_digest: str | None = None
        self._evaluations: list[Evaluation] = []
        self._evaluated_step: int | None = None
        self._last_save: tuple[int, int | None] | None = None
        self._syncing: asyncio.Task[None] | None = None
        self._failed: list[asyncio.Task[None]] = []

    # ---- The whole ------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps taken, those before a resume included."""
        return self._step

    async def run(self) -> GRPOResult:
        """Train until the last step, the goal of the evaluation, or a request to stop."""
        await self._begin()
        try:
            async with self._scaling.open():
                await self._train_with_rollouts()
        except RecordError:
            await self._complete_save()
            raise
        return await self._finish()

    async def _train_with_rollouts(self) -> None:
        self._metrics.begin()
        rollouts = self._stop.watch(self._runner.run(), "rollouts")
        try:
            await self._train()
        finally:
            others = {rollouts} if self._syncing is None else {rollouts, self._syncing}
            for task in others:
                task.cancel()
            await asyncio.wait(others)
        failed = [task for task in (rollouts, *self._failed) if not task.cancelled() and task.exception() is not None]
        if failed and self._stop.signal is not None:  # a scheduler ends all processes of a job at once
            _log.warning("while the run was stopped: %s", failed[0].exception())
        elif failed:
            await self._save()
            failed[0].result()  # raises what ended it

    async def _begin(self) -> None:
        """Resume an earlier run if there is one, open the records, and give the generators their first weights."""
        extra = await self.learner.load(self._config.checkpointing.resume)
        if extra is not None:
            check_continues(self._config, extra, prompts_digest=self._plan.prompts_digest)
            self._ledger_before = ledger_before(self._config, extra)
            report_changes(self._config, run_dir(self._config))
        resume_step = None if extra is None else int(extra["step"])
        self._records = Records(self._plan, prompts=self._source.curriculum, resume_step=resume_step)
        save(self._config, run_dir(self._config))
        if extra is not None:
            self._restore(extra)
            await self._league.restore(extra)
        self._has_begun = True
        self._save_rule.saved()
        if self._stop.is_asked:
            return
        await self._sync()
        self._records.begin_steps(weights=self._weights_digest, trainer=await self._workers.trainer.state())
        await self._bound.pin(self._step, is_resumed=extra is not None)
        if self._config.evaluation.at_start and self._step == 0:
            await self._evaluate()

    def _restore(self, extra: dict[str, Any]) -> None:
        assert self._records is not None
        self._step, self._evaluated_step = int(extra["step"]), extra["evaluated_step"]
        self._last_save = (self._step, self._evaluated_step)
        self._evaluations = [Evaluation.read(each) for each in extra["evaluations"]]
        self._buffer.load(extra["buffer"], committed=self._records.ledger.committed)
        self._credit.load(extra.get("agents", {}))
        self._curriculum.restore(extra)
        _log.info("resuming after step %d; %d groups are back in the queue", self._step, len(self._buffer.pending))

    # ---- Training: batches -> weights; waits for the buffer's batch ------------------------------------------------

    async def _train(self) -> None:
        limit = self._config.training.max_steps
        while not self._stop.is_asked and (limit is None or self._step < limit) and not self._reached_goal():
            self._clock.restart()
            taken = await self._next_batch()
            if taken is None:
                if not self._stop.is_asked:
                    self._buffer.check_any_signal()
                break
            learned = await self._learn(taken)
            if learned is None:
                break
            groups, result = learned
            self._buffer.commit()
            self._league.commit(taken)
            self._step, self._weights_digest = self._step + 1, None
            self._curriculum.commit(taken, step=self._step)
            if not self._stop.is_asked:  # else there is no next step, and the save is urgent
                await self._hand_over()
            with self._clock.part("other"):
                await self._write(taken, groups, result)
            if is_due(self._step, self._config.evaluation.interval):
                await self._evaluate()
            if self._save_rule.is_due(self._step) or self.learner.is_log_full:
                await self._save()
        await self._finish_sync()

    async def _next_batch(self) -> TakenBatch | None:
        """Return the next batch; None at the end, or when the run is asked to stop."""
        generating_before = self._source.generating_s
        with self._clock.part("waiting"), span("wait for batch", step=self._step):
            try:
                taken = await self._stop.unless(
                    self._buffer.take(), reminder=self._reminder(self._runner.describe_wait)
                )
            except RolloutError:  # too many batches in a row had no signal
                await self._save()
                raise
        self._clock.move("waiting", "generating", self._source.generating_s - generating_before)
        return taken

    def _reminder(self, what: Callable[[], str]) -> Reminder:
        """Return what logs, now and then, what a long wait is for."""
        return Reminder(
            self._plan.rollout.report_wait_s, lambda: _log.warning("step %d waits: %s", self._step + 1, what())
        )

    async def _wait(self, work: Coroutine[Any, Any, T], what: str) -> T:
        return await self._reminder(lambda: what).during(work)

    async def _learn(self, taken: TakenBatch) -> tuple[Sequence[Group], StepResult] | None:
        """Learn from a batch; None if there was no time for it. Then its groups stay pending."""
        try:
            with self._clock.part("training"), span("train", step=self._step):
                reminder = self._reminder(lambda: "the trainer learns")
                learning = self.learner.learn(taken.groups, step=self._step)
                groups, result = await self._stop.in_time(learning, self._abandon, reminder=reminder)
        except StepAbandoned:
            return None
        except NonFiniteError:
            if await self.learner.is_before(self._step):
                _log.error("the run stops; its state before this step is in %s", checkpoint_dir(self._config))
                await self._save()
            raise
        self._reward = math.fsum(taken.rewards) / len(taken.rewards)
        return groups, result

    async def _abandon(self) -> None:
        if await self.learner.abandon(step=self._step):
            _log.warning("step %d takes too long: it is abandoned, and the state before it is saved", self._step + 1)

    # ---- Weights: trainer -> store -> generators ------------------------------------------------------------------

    async def _hand_over(self) -> None:
        """Send the new weights to the generators: at once when training is synchronous, else during the next step."""
        await self._finish_sync()
        if self._failed:
            return
        if self._plan.rollout.staleness == 0:
            await self._sync()
            return
        with self._clock.part("syncing"):
            await self._publish()
        self._syncing = self._stop.watch(self._serve(self._step), f"the update to version {self._step}")

    async def _sync(self) -> None:
        with self._clock.part("syncing"):
            await self._publish()
            await self._serve(self._step)

    async def _publish(self) -> None:
        publishing = self._workers.trainer.publish_weights(self._step, name=self._config.generator.weights)
        self._weights_digest = await self._wait(publishing, "the trainer publishes its weights")
        await self._league.grow(self._step)

    async def _serve(self, version: int) -> None:
        with span("update generators", version=version):
            taking = load_version(self._workers, version, name=self._config.generator.weights)
            reports = await self._wait(taking, f"generators load version {version}")
        self._metrics.note_sync(reports)
        self._buffer.serve(version)

    async def _finish_sync(self) -> None:
        """Wait for the update under way. One that failed has asked the run to stop, and is raised at its end, when what
        was learned meanwhile is written and saved."""
        if self._syncing is not None:
            with self._clock.part("syncing"):
                await asyncio.wait({self._syncing})
            if self._syncing.exception() is not None:
                self._failed.append(self._syncing)
            self._syncing = None

    # ---- Records, evaluation, checkpoints, and the end ------------------------------------------------------------

    async def _write(self, taken: TakenBatch, groups: Sequence[Group], result: StepResult) -> None:
        """Write everything of a step, before the checkpoint that depends on it."""
        assert self._records is not None
        batch, weights = self.learner.batch, self._weights_digest
        self._records.step(self._step, groups, dropped=taken.drops, result=result, batch=batch, weights=weights)
        self._source.forget([*(group.number for group in groups), *(number for number, _ in taken.drops)])
        self._league.write(self._step)
        values = self._metrics.of_step(taken, result, clock=self._clock) | self.learner.take_metrics()
        await self._records.metrics(self._step, values)
        self._scaling.after_step(values, generating_s=self._source.generating_s)

    def _note_no_signal(self, no_signal: NoSignalGroup) -> Path | None:
        assert self._records is not None
        return self._records.no_signal(self._buffer.num_taken + 1, no_signal)

    async def _evaluate(self) -> None:
        if self._evaluator is None or self._evaluated_step == self._step:
            return
        assert self._records is not None
        await self._finish_sync()
        record = partial(self._records.evaluation, self._step)
        found = await self._stop.unless(self._evaluator.run(record=record))
        if found is None:
            return
        self._evaluations.append(found)
        self._evaluated_step = self._step
        await self._records.metrics(self._step, found.values())

    def _reached_goal(self) -> bool:
        goal = self._config.evaluation.stop_at
        is_fresh = self._evaluated_step == self._step and self._evaluations
        return goal is not None and bool(is_fresh) and self._evaluations[-1].solved >= goal

    async def _save(self) -> None:
        if self._last_save == (self._step, self._evaluated_step):
            return
        fresh = self._evaluations[-1] if self._evaluated_step == self._step and self._evaluations else None
        extra = {
            "step": self._step,
            "buffer": self._buffer.state(),
            "prompts": self._plan.prompts_digest,
            "group": group_keys(self._config),
            "ledger_before": self._ledger_before,
            "weights": self._weights_digest,
            "evaluated_step": self._evaluated_step,
            "evaluations": [each.plain() for each in (*self._evaluations[:1], *self._evaluations[1:][-1:])],
        }
        extra |= {"agents": self._credit.state()} if self._credit.baselines else {}
        extra |= self._league.state(self._buffer.pending) | self._curriculum.state(self._buffer)
        if self._records is not None:
            self._records.flush()
        with span("save", step=self._step):
            saving = self.learner.save(extra=extra, metric=None if fresh is None else -fresh.reward)
            await self._wait(saving, "the trainer saves its state")
        self._last_save = (self._step, self._evaluated_step)
        self._save_rule.saved()

    async def _complete_save(self) -> None:
        """Wait for a checkpoint that is being written. That it fails is logged: something else ends the run."""
        try:
            await self._workers.trainer.wait_saved()
        except CheckpointError as error:
            _log.warning("%s", error)

    async def _finish(self) -> GRPOResult:
        assert self._records is not None
        if self._config.evaluation.at_end and not self._stop.is_asked:
            await self._evaluate()
        if self._step > 0 or not self._stop.is_asked:  # before the first step there is nothing to save
            await self._save()
        if self._stop.is_asked:
            await self._workers.trainer.wait_saved()
        export = None
        if self._config.checkpointing.export_hf and not self._stop.is_asked:
            export = await self.learner.export(checkpoint_dir(self._config))
        await self._records.last_spans()
        await self._workers.close()
        return GRPOResult(
            step=self._step,
            reward=self._reward,
            first_evaluation=self._evaluations[0] if self._evaluations else None,
            evaluation=self._evaluations[-1] if self._evaluations else None,
            is_stopped=self._stop.is_asked,
            export=export,
            report=self._end(),
            exit_code=self._stop.exit_code,
        )

    def _end(self) -> Path | None:
        """Write what became of the groups since the last step, which a resumed run rolls out again, and the report."""
        assert self._records is not None
        return self._records.end(self._step + 1, dropped=self._buffer.uncommitted_drops)

    def close(self) -> None:
        """Write what is left to write, however the run ended, and close the records."""
        if self._records is None:
            return
        try:
            if self._has_begun and not self._records.is_ended and (report := self._end()) is not None:
                _log.warning("the run ended early; report: %s", report)
        finally:
            self._records.close()
