"""What a run writes down: metrics, rollouts, the ledger, the trace, and at the end the report."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from forge.errors import ForgeError
from forge.loops.planning import GRPOPlan
from forge.loops.run_paths import run_dir
from forge.observe import make_sinks
from forge.observe.sink import Value
from forge.observe.trace_file import TraceFile
from forge.rollout.ledger import Ledger, LedgerLine, recording
from forge.rollout.record import RolloutRecorder
from forge.rollout.signal import NoSignalGroup
from forge.runtime.collect import collect
from forge.trainer.checkpoint_folder import WriterLock
from forge.types import Group

_log = logging.getLogger("forge.grpo")


class Records:
    """The files of one run. What an earlier run wrote after `resume_step` is moved aside."""

    def __init__(self, plan: GRPOPlan, *, resume_step: int | None) -> None:
        self._plan, self._folder = plan, run_dir(plan.config)
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
        self._trace = TraceFile(self._folder / "trace.json", resume_step=resume_step) if config.record.trace else None
        self._log = make_sinks(
            config.metrics,
            folder=self._folder,
            run_name=config.run.name,
            resume_step=resume_step,
            total_steps=plan.num_steps,
        )

    def rollouts(
        self, step: int, groups: Sequence[Group], trainer_logprobs: Mapping[tuple[int, int], Sequence[float]] | None
    ) -> None:
        """Write the episodes of a step."""
        self._rollouts.write(step, groups, trainer_logprobs)

    def evaluation(self, step: int, groups: Sequence[Group]) -> None:
        """Write the answers of an evaluation."""
        self._rollouts.write_evaluation(step, groups)

    def no_signal(self, step: int, no_signal: NoSignalGroup) -> Path | None:
        """Write a group that taught nothing while a step was being prepared; where groups of this kind can be read."""
        if not no_signal.is_kept:
            return self._rollouts.write_no_signal(step, no_signal)
        return self._rollouts.folder if step > 1 and self._plan.config.record.rollouts != "none" else None

    async def metrics(self, step: int, values: Mapping[str, Value]) -> None:
        """Write the metrics of a step, with whatever any process recorded since the last."""
        observed = await collect()
        self._log.write(step, {**values, **observed.metrics})
        if self._trace is not None:
            self._trace.write(observed.spans)

    async def last_spans(self) -> None:
        """Write what was traced since the last metrics, while everyone is still there to be asked."""
        if self._trace is not None:
            self._trace.write((await collect()).spans)

    def end(self, lines: Iterable[LedgerLine]) -> Path | None:
        """Write the last lines of the ledger and make the page that shows the run, once. A run that has failed already,
        perhaps for want of space, does not fail a second time here."""
        if self.is_ended:
            return self._report
        self.is_ended = True
        self._log.close()
        try:
            self.ledger.write(lines)
        except (ForgeError, OSError) as error:
            _log.warning("%s does not have the groups since the last step: %s", self.ledger.path, error)
        if self._plan.config.record.report:
            from forge.observe.report import write_report

            try:
                self._report = write_report(self._folder).path
            except (ForgeError, OSError) as error:
                _log.warning("the report could not be made: %s", error)
        return self._report

    def close(self) -> None:
        """Close every file."""
        self._log.close()
        self.ledger.close()
        if self._trace is not None:
            self._trace.close()
        self._lock.release()
