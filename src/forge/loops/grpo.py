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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.config import GRPOConfig, save
from forge.envs.episode import EpisodeProgram
from forge.errors import NonFiniteError, RecordError, RolloutError, StepAbandoned
from forge.generator.engine import UpdateReport
from forge.loops.agents import agent_credit
from forge.loops.bound_versions import BoundVersions
from forge.loops.curriculum import RunCurriculum
from forge.loops.early_imports import early_imports
from forge.loops.evaluation import RunEvaluations, make_evaluator
from forge.loops.grpo_control import GRPOControl
from forge.loops.league import run_league
from forge.loops.learning import Learner
from forge.loops.observing import tracing
from forge.loops.planning import GRPOPlan
from forge.loops.preflight import check_grpo
from forge.loops.recording import Records
from forge.loops.restarting import run_with_restarts
from forge.loops.results import GRPOResult
from forge.loops.resuming import (
    SaveRule,
    check_continues,
    group_keys,
    ledger_before,
    newest_checkpoint,
    report_changes,
)
from forge.loops.rollouts import RolloutRunner, RolloutSource, make_source
from forge.loops.run_paths import checkpoint_dir, run_dir
from forge.loops.runtime_changes import is_continued
from forge.loops.showing import shown_run
from forge.loops.step_metrics import StepClock, StepMetrics
from forge.loops.stopping import Stop
from forge.loops.waits import SAVING, TRAINING, WRITING, Waits
from forge.loops.weight_updates import WeightUpdates
from forge.loops.workers import Workers
from forge.observe import span
from forge.observe.clock import monotonic_s
from forge.observe.monitor import note_started
from forge.observe.phases import phase
from forge.rollout.buffer import ReplayBuffer
from forge.rollout.credit import AdvantageFunction
from forge.rollout.signal import NoSignalGroup
from forge.rollout.taken_batch import TakenBatch
from forge.trainer.schedules import is_due
from forge.types import Group, StepResult

if TYPE_CHECKING:
    from forge.losses import Loss

__all__ = ["GRPOLoop", "GRPOResult", "run_grpo"]

_log = logging.getLogger("forge.grpo")


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
    with shown_run(config) as shown, early_imports(config):
        with phase("reading model and data"):
            plan = check_grpo(config, program=episode)
        if loss is not None:
            from forge.losses.build import check_loss

            check_loss(loss, temperature=plan.temperature)
            plan = replace(plan, loss=loss, own_loss=True)
        if advantage is not None:
            plan = replace(plan, advantage=advantage, own_advantage=True)
        shown.open_files()
        shown.monitor.begin_steps(step=plan.resume_step, total=plan.num_steps)
        with tracing(config.record.trace):  # before workers start: they inherit it
            return await run_with_restarts(plan, _make_loop)


def _make_loop(plan: GRPOPlan, workers: Workers, stop: Stop) -> GRPOLoop:
    return GRPOLoop(plan, workers, make_source(plan, workers), stop=stop)


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
        self._records: Records | None = None
        self._has_begun = False
        self._metrics = StepMetrics(source, self._buffer, clock=clock)
        self._runner = RolloutRunner(plan, source, self._buffer, metrics=self._metrics)
        self._clock = StepClock()
        self._save_rule = SaveRule(self._config.checkpointing, clock=clock)
        self._ledger_before: dict[str, Any] | None = None
        self._step, self._reward = 0, math.nan
        self._last_save: tuple[int, int | None] | None = None
        step, evaluator = lambda: self._step, make_evaluator(plan, workers, source)
        self._waits = waits = Waits(self._stop, report_s=plan.rollout.report_wait_s, step=step)
        self._runner.on_change = waits.changed
        self._evaluations = RunEvaluations(evaluator, self._config.evaluation, waits=waits)
        name = self._config.generator.weights
        self._weights = WeightUpdates(
            workers, name=name, waits=waits, clock=self._clock, published=self._league.grow, served=self._note_served
        )
        self._control = GRPOControl(
            plan, workers, buffer=self._buffer, source=source, learner=self.learner, waits=waits, step=step
        )

    # ---- The whole ------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps taken, those before a resume included."""
        return self._step

    async def run(self) -> GRPOResult:
        """Train until the last step, the goal of the evaluation, or a request to stop."""
        await self._begin()
        try:
            async with self._control.open():
                await self._train_with_rollouts()
        except RecordError:
            await self.learner.complete_save()
            raise
        return await self._finish()

    async def _train_with_rollouts(self) -> None:
        self._metrics.begin()
        rollouts = self._stop.watch(self._runner.run(), "rollouts")
        try:
            await self._train()
        finally:
            others = {rollouts} if self._weights.under_way is None else {rollouts, self._weights.under_way}
            for task in others:
                task.cancel()
            await asyncio.wait(others)
        ended = (rollouts, *self._weights.failed)
        failed = [task for task in ended if not task.cancelled() and task.exception() is not None]
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
        resume_step = None if extra is None else int(extra["step"])
        self._records = Records(self._plan, prompts=self._source.curriculum, resume_step=resume_step)
        if extra is not None:
            self._restore(extra)
            await self._league.restore(extra)
        is_resumed = is_continued(self._config, has_checkpoint=extra is not None)
        config = self._control.begin(is_resumed=is_resumed, saved=None if extra is None else extra.get("settings"))
        if extra is not None:
            report_changes(config, run_dir(config), other_than=self._control.settings.repeated)
        save(config, run_dir(config))
        self._has_begun = True
        self._save_rule.saved()
        if self._stop.is_asked:
            return
        await self._weights.sync(self._step)
        self._records.begin_steps(weights=self._weights.digest, trainer=await self._workers.trainer.state())
        await self._bound.pin(self._step, is_resumed=extra is not None)
        if self._config.evaluation.at_start and self._step == 0:
            await self._evaluate()

    def _restore(self, extra: dict[str, Any]) -> None:
        assert self._records is not None
        self._step = int(extra["step"])
        self._evaluations.restore(extra)
        self._last_save = (self._step, self._evaluations.step)
        self._buffer.load(extra["buffer"], committed=self._records.ledger.committed)
        self._credit.load(extra.get("agents", {}))
        self._curriculum.restore(extra)
        _log.info("resuming after step %d; %d groups are back in the queue", self._step, len(self._buffer.pending))

    # ---- Training: batches -> weights; waits for the buffer's batch ------------------------------------------------

    async def _train(self) -> None:
        while not self._is_done():
            self._clock.restart()
            await self._control.profiles.begin(self._step + 1)
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
            self._step, self._weights.digest = self._step + 1, None
            self._curriculum.commit(taken, step=self._step)
            self._control.change()  # before the next weights are served, with which the next rollouts begin
            if not self._stop.is_asked:  # else there is no next step, and the save is urgent
                await self._weights.hand_over(self._step, at_once=self._buffer.staleness == 0)
            note_started()
            with self._clock.part("other"):
                await self._write(taken, groups, result)
            await self._control.profiles.end()
            if is_due(self._step, self._config.evaluation.interval):
                await self._evaluate()
            await self._control.commands.carry_out("evaluate", self._evaluate_now)
            if self._save_rule.is_due(self._step) or self.learner.is_log_full:
                await self._save()
            await self._control.commands.carry_out("save", self._save_now)
        await self._weights.finish()

    def _is_done(self) -> bool:
        limit = self._config.training.max_steps
        is_last = limit is not None and self._step >= limit
        return is_last or self._stop.is_asked or self._evaluations.has_reached_goal(self._step)

    async def _next_batch(self) -> TakenBatch | None:
        """Return the next batch; None at the end, or when the run is asked to stop."""
        generating_before = self._source.generating_s
        with self._clock.part("waiting"), span("wait for batch", step=self._step):
            try:
                taken = await self._waits.unless(self._buffer.take(), self._runner.work)
            except RolloutError:  # too many batches in a row had no signal
                await self._save()
                raise
        self._clock.move("waiting", "generating", self._source.generating_s - generating_before)
        return taken

    async def _learn(self, taken: TakenBatch) -> tuple[Sequence[Group], StepResult] | None:
        """Learn from a batch; None if there was no time for it. Then its groups stay pending."""
        try:
            with self._clock.part("training"), span("train", step=self._step):
                learning = self.learner.learn(taken.groups, step=self._step)
                groups, result = await self._waits.in_time(learning, self._abandon, TRAINING)
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

    def _note_served(self, version: int, reports: Sequence[UpdateReport]) -> None:
        self._metrics.note_sync(reports)
        self._buffer.serve(version)

    # ---- Records, evaluation, checkpoints, and the end ------------------------------------------------------------

    async def _write(self, taken: TakenBatch, groups: Sequence[Group], result: StepResult) -> None:
        """Write everything of a step, before the checkpoint that depends on it."""
        assert self._records is not None
        self._records.step(
            self._step,
            groups,
            dropped=taken.drops,
            result=result,
            learned=self.learner.learned,
            weights=self._weights.digest,
        )
        self._source.forget([*(group.number for group in groups), *(number for number, _ in taken.drops)])
        self._league.write(self._step)
        values = self._metrics.of_step(taken, result, clock=self._clock) | self.learner.take_metrics()
        await self._records.metrics(self._step, values)
        self._control.scaling.after_step(values, generating_s=self._source.generating_s)

    def _note_no_signal(self, no_signal: NoSignalGroup) -> Path | None:
        assert self._records is not None
        return self._records.no_signal(self._buffer.num_taken + 1, no_signal)

    async def _evaluate(self) -> None:
        if not self._evaluations.is_due(self._step):
            return
        assert self._records is not None
        await self._weights.finish()
        found = await self._evaluations.run(self._step, record=partial(self._records.evaluation, self._step))
        if found is not None:
            await self._records.metrics(self._step, found.values())

    async def _evaluate_now(self) -> Mapping[str, Any]:
        await self._evaluate()
        found = self._evaluations.of_step(self._step)
        return {"evaluation": None if found is None else found.plain()}

    async def _save_now(self) -> Mapping[str, Any]:
        """Save, and return where the checkpoint is when it is complete."""
        await self._save()
        await self._waits.during(self._workers.trainer.wait_saved(), WRITING)
        return {"checkpoint": str(newest_checkpoint(checkpoint_dir(self._config)))}

    async def _save(self) -> None:
        if self._last_save == (self._step, self._evaluations.step):
            return
        fresh = self._evaluations.of_step(self._step)
        extra = {
            "step": self._step,
            "buffer": self._buffer.state(),
            "prompts": self._plan.prompts_digest,
            "group": group_keys(self._config),
            "ledger_before": self._ledger_before,
            "weights": self._weights.digest,
            "settings": self._control.settings.values,
            **self._evaluations.state(),
        }
        extra |= {"agents": self._credit.state()} if self._credit.baselines else {}
        extra |= self._league.state(self._buffer.pending) | self._curriculum.state(self._buffer)
        if self._records is not None:
            self._records.flush()
        with span("save", step=self._step):
            saving = self.learner.save(extra=extra, metric=None if fresh is None else -fresh.reward)
            await self._waits.during(saving, SAVING)
        self._last_save = (self._step, self._evaluations.step)
        self._save_rule.saved()

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
            first_evaluation=self._evaluations.first,
            evaluation=self._evaluations.last,
            is_stopped=self._stop.is_asked,
            export=export,
            report=self._end(),
            exit_code=self._stop.exit_code,
            folder=run_dir(self._config),
        )

    def _end(self) -> Path | None:
        """Write what became of the groups since the last step, which a resumed run rolls out again, and the report."""
        assert self._records is not None
        return self._records.end(self._step + 1, dropped=self._buffer.uncommitted_drops)

    def close(self, failure: BaseException | None = None) -> None:
        """Write what is left to write, and what ended the run if something did, and close the records."""
        if self._records is None:
            return
        try:
            if failure is not None:
                self._records.note_end(failure)
            if self._has_begun and not self._records.is_ended and (report := self._end()) is not None:
                _log.warning("the run ended early; report: %s", report)
        finally:
            self._records.close()
