"""The files that a run writes: metrics, rollouts, the ledger, the trace, and at the end the report."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.errors import ForgeError
from forge.loops.observing import RunObserver
from forge.loops.planning import GRPOPlan
from forge.loops.replay.session import describe_session
from forge.loops.resuming import kept_steps
from forge.loops.run_paths import checkpoint_dir, run_dir
from forge.loops.sample_tables import sample_table
from forge.observe import make_sinks
from forge.observe.sink import Value
from forge.rollout.ledger import Ledger, LedgerLine, recording
from forge.rollout.record import RolloutRecorder
from forge.rollout.rollouter import Prompts
from forge.rollout.samples import logprobs_by_episode
from forge.rollout.signal import DropReason, NoSignalGroup
from forge.rollout.step_log import FOLDER, StepLog
from forge.rollout.step_record import LearnedBatch
from forge.trainer.checkpoint_folder import WriterLock
from forge.trainer.schedules import is_due
from forge.types import Group, StepResult

_log = logging.getLogger("forge.grpo")


class Records:
    """The files of one run. What an earlier run wrote after `resume_step` is moved aside. `prompts` says what groups
    were asked; None for the plan's order."""

    def __init__(self, plan: GRPOPlan, *, prompts: Prompts | None = None, resume_step: int | None) -> None:
        self._plan, self._folder = plan, run_dir(plan.config)
        self._prompts: Prompts = plan.prompts if prompts is None else prompts
        self.is_ended = False
        self._report: Path | None = None
        with recording(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(self._folder)
        try:
            with recording(self._folder):
                self._open(resume_step)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, resume_step: int | None) -> None:
        plan, config = self._plan, self._plan.config
        self.ledger = Ledger(self._folder / "ledger.jsonl", resume_step=resume_step)
        self._rollouts = RolloutRecorder(
            self._folder / "rollouts",
            decode=plan.tokenizer.decode,
            config=config.record,
            resume_step=resume_step,
        )
        self._step_log: StepLog | None = None
        if config.record.replay.enabled:
            self._step_log = StepLog(
                self._folder / FOLDER,
                config=config.record.replay,
                kept_checkpoints=lambda: kept_steps(checkpoint_dir(config)),
                resume_step=resume_step,
            )
        self._observer = RunObserver(self._folder, config.record, resume_step=resume_step)
        self._log = make_sinks(
            config.metrics,
            folder=self._folder,
            run=config,
            resume_step=resume_step,
            total_steps=plan.num_steps,
        )

    def step(
        self,
        step: int,
        groups: Sequence[Group],
        *,
        dropped: Iterable[tuple[int, DropReason]],
        result: StepResult,
        learned: LearnedBatch | None = None,
        weights: str | None = None,
    ) -> None:
        """Write what became of a step's groups, the episodes with the trainer's logprobs, and what is needed to replay
        the step: what it learned from, and the digest of the weights that it published."""
        trained = [LedgerLine(step, group.number, group.epoch, group.task.id, "trained") for group in groups]
        self.ledger.write([*trained, *self._dropped_lines(step, dropped)])
        self._write_samples("rollouts", step, groups, is_due=is_due(step, self._plan.config.metrics.sample_interval))
        logprobs = result.logprobs
        self._rollouts.write(step, groups, None if logprobs is None else logprobs_by_episode(groups, logprobs))
        if self._step_log is not None and learned is not None:
            self._step_log.write(step, groups, learned=learned, result=result, weights=weights)

    def begin_steps(self, *, weights: str | None, trainer: Mapping[str, Any]) -> None:
        """Record what the steps to come have in common, for `forge replay`: `weights` is the digest of what they start
        from, `trainer` what the trainer says of itself."""
        if self._step_log is not None:
            self._step_log.begin(describe_session(self._plan, weights=weights, trainer=trainer))

    def flush(self) -> None:
        """Wait until everything is written that a checkpoint stands on."""
        if self._step_log is not None:
            self._step_log.flush()

    def _dropped_lines(self, step: int, dropped: Iterable[tuple[int, DropReason]]) -> list[LedgerLine]:
        places = [(self._prompts.at(number), number, outcome) for number, outcome in dropped]
        return [LedgerLine(step, number, epoch, prompt.id, outcome) for (epoch, prompt), number, outcome in places]

    def evaluation(self, step: int, groups: Sequence[Group]) -> None:
        """Write the answers of an evaluation."""
        self._rollouts.write_evaluation(step, groups)
        self._write_samples("evaluation", step, groups, is_due=True)

    def _write_samples(self, name: str, step: int, groups: Sequence[Group], *, is_due: bool) -> None:
        """Give trackers with tables a few episodes."""
        limit = self._plan.config.metrics.samples
        if is_due and limit and self._log.takes_tables:
            self._log.write_table(step, f"samples/{name}", sample_table(groups, limit))

    def no_signal(self, step: int, no_signal: NoSignalGroup) -> Path | None:
        """Write a group that taught nothing while a step was being prepared; where groups of this kind can be read."""
        if not no_signal.is_kept:
            return self._rollouts.write_no_signal(step, no_signal)
        return self._rollouts.folder if step > 1 and self._plan.config.record.rollouts != "none" else None

    async def metrics(self, step: int, values: Mapping[str, Value]) -> None:
        """Write the metrics of a step, with whatever any process recorded since the last."""
        self._log.write(step, {**values, **await self._observer.after_step(step)})

    async def last_spans(self) -> None:
        """Write what was traced since the last metrics, while everyone is still there to be asked."""
        await self._observer.last_spans()

    def note_end(self, failure: BaseException) -> None:
        """Write what ended the run."""
        self._observer.note_end(failure)

    def end(self, step: int, *, dropped: Iterable[tuple[int, DropReason]]) -> Path | None:
        """Write the last lines of the ledger and the report, once. A run that has failed already, perhaps for want of
        space, does not fail a second time here."""
        if self.is_ended:
            return self._report
        self.is_ended = True
        try:
            self.ledger.write(self._dropped_lines(step, dropped))
        except (ForgeError, OSError) as error:
            _log.warning("%s does not have the groups since the last step: %s", self.ledger.path, error)
        if self._plan.config.record.report:
            from forge.observe.report import write_report

            try:
                self._report = write_report(self._folder).path
            except (ForgeError, OSError) as error:
                _log.warning("the report could not be made: %s", error)
            else:
                self._log.link("report", self._report)
        self._log.close()
        return self._report

    def close(self) -> None:
        """Close every file."""
        self._log.close()
        self.ledger.close()
        if self._step_log is not None:
            try:
                self._step_log.close()
            except ForgeError as error:  # something else may have ended the run
                _log.warning("the last steps cannot be replayed: %s", error)
        self._observer.close()
        self._lock.release()
