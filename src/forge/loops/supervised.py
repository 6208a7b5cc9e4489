"""The loop of every supervised run: fine-tuning, preference optimisation, and whatever else learns from files.

    files ──Sample──▶ data.BatchLoader ──Batch──▶ trainer.train_step ──StepResult──▶ observe
                            │                          │
                            └── position ──▶ checkpoint ◀── weights, optimizer, random state

The loop asks the loader for a batch, hands it to the trainer, writes down what came back, and now and then validates
and saves. It holds no state that a checkpoint does not. What one kind of run has of its own, its data, its loss and its
name, is in `forge.loops.run_kinds`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from forge.config import SupervisedConfig, save
from forge.errors import ActorFailure, NonFiniteError, ServiceStopped, StepAbandoned
from forge.loops.early_imports import early_imports
from forge.loops.observing import RunObserver, tracing
from forge.loops.preflight import PreparedRun, prepare_supervised
from forge.loops.results import SupervisedResult
from forge.loops.resuming import SaveRule, newest_checkpoint, report_changes, saved_name, where_it_stopped
from forge.loops.run_kinds import CompleteBatch, unchanged
from forge.loops.run_paths import checkpoint_dir, crash_dir, run_dir
from forge.loops.runtime_changes import is_continued
from forge.loops.showing import shown_run
from forge.loops.stopping import Stop, stopped_by_signals
from forge.loops.supervised_control import SupervisedControl
from forge.loops.utilization import Utilization
from forge.loops.waits import SAVING, TRAINING, Work
from forge.observe import (
    MetricsLog,
    Throughput,
    make_sinks,
    span,
    step_values,
)
from forge.observe.clock import monotonic_s
from forge.observe.monitor import note_started
from forge.observe.phases import phase
from forge.observe.sink import VALIDATION_BEST, VALIDATION_LOSS, Value
from forge.rollout.ledger import recording
from forge.runtime.lifetime import run
from forge.trainer import schedules
from forge.trainer.checkpoint_folder import WriterLock
from forge.trainer.handles import TrainerHandle, death_of, is_rank, open_trainer
from forge.trainer.recovering import RecoveringTrainer
from forge.types import Batch, Evaluated, StepResult

__all__ = ["SupervisedLoop", "SupervisedResult", "run_supervised"]


async def run_supervised(config: SupervisedConfig, *, clock: Callable[[], float] = monotonic_s) -> SupervisedResult:
    """Train as a configuration says. In every rank of `forge run --nproc_per_node`, or once as the controller.

    SIGINT, SIGTERM and SIGHUP end it after a checkpoint; a second signal ends it at once, with SystemExit. `clock`
    gives the seconds between two checkpoints.
    """
    is_leader = not is_rank() or os.environ.get("RANK", "0") == "0"
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(shown_run(config, is_leader=is_leader))
        stack.enter_context(early_imports(config))
        with phase("reading model and data"):
            prepared = stack.enter_context(prepare_supervised(config))
        shown.open_files(is_leader=is_leader)
        stack.enter_context(tracing(config.record.trace))  # before workers start: they inherit it
        hint, grace_s = "this step is finished and saved", config.checkpointing.grace_s
        async with stopped_by_signals(save_hint=hint, grace_s=grace_s, is_rank=is_rank()) as (stop, is_late):
            loop = SupervisedLoop(config, prepared, stop=stop, clock=clock)
            try:
                if is_rank():
                    result = await _drive(loop, prepared, config, is_late=is_late)
                else:
                    async with run(config.launcher):
                        result = await _drive(loop, prepared, config, is_late=is_late)
            except BaseException:
                loop.log_where_it_stopped()
                raise
            if result.is_stopped:
                loop.log_where_it_stopped()
            return result


async def _drive(
    loop: SupervisedLoop, prepared: PreparedRun, config: SupervisedConfig, *, is_late: Callable[[], bool]
) -> SupervisedResult:
    stop, worker = loop.stop, config.workers.trainer
    recovery = config.recovery, crash_dir(config)
    opening = open_trainer(prepared.trainer, prepared.loss, should_abandon=is_late, worker=worker, recovery=recovery)
    trainer = await stop.unless(opening)
    if trainer is None:
        return _not_started(loop)
    if isinstance(trainer, RecoveringTrainer):
        trainer.may_recover = lambda: stop.signal is None
    try:
        reference = prepared.kind.open_reference(config, prepared, trainer, should_stop=lambda: stop.is_asked)
        async with reference as complete:
            result = _not_started(loop) if complete is None else await loop.run(trainer, complete)
    except BaseException as error:
        failure = await death_of(trainer, error) if isinstance(error, ServiceStopped) else error
        loop.close(failure)
        with contextlib.suppress(ActorFailure, ServiceStopped):  # of a lost trainer; what it died of is raised
            await trainer.close()
        if failure is error:
            raise
        raise failure from error
    loop.close()
    await trainer.close()
    return result


def _not_started(loop: SupervisedLoop) -> SupervisedResult:
    """Return the result of a run that was stopped before its first step."""
    return SupervisedResult(loop.step, math.nan, None, None, None, True, loop.stop.exit_code)


class SupervisedLoop:
    """One run, from its first batch or from where a checkpoint left it."""

    def __init__(
        self,
        config: SupervisedConfig,
        prepared: PreparedRun,
        *,
        stop: Stop,
        clock: Callable[[], float] = monotonic_s,
    ) -> None:
        self._config, self._trainer_config, self._loaders = config, prepared.trainer, prepared.loaders
        self.stop, self._kind = stop, prepared.kind
        self._logger = prepared.kind.logger
        self._save_rule = SaveRule(config.checkpointing, clock=clock)
        self._trainer: TrainerHandle
        self._complete: CompleteBatch = unchanged
        self._log: MetricsLog | None = None
        self._lock: WriterLock | None = None
        self._step = 0 if prepared.checkpoint is None else prepared.checkpoint.step
        self._loss = math.nan
        self._validation_loss: float | None = None
        self._validation_metrics: Mapping[str, float] = {}
        self._best: float | None = None
        self._last_save: int | None = None
        self._validated_step: int | None = None
        self._saved_settings: Mapping[str, Any] | None = None
        self._control = SupervisedControl(config, prepared, stop=stop, step=lambda: self._step)
        self._throughput = Throughput()
        self._utilization: Utilization | None = None
        self._observer: RunObserver | None = None

    @property
    def step(self) -> int:
        """Optimizer steps taken, those before a resume included."""
        return self._step

    async def run(self, trainer: TrainerHandle, complete: CompleteBatch = unchanged) -> SupervisedResult:
        """Train until the last step or a request to stop. `complete` adds what other models compute to batches."""
        self._trainer, self._complete = trainer, complete
        resumed = await self._resume()
        self._open_log(resume_step=self._step if resumed else None)
        await self._control.begin(trainer)
        self._utilization = Utilization(self._trainer_config.model, await self._trainer.state())
        self._throughput = Throughput()
        self._save_rule.saved()
        async with self._control.open():
            result = await self._train_all()
        if self._observer is not None:
            await self._observer.last_spans()
        return result

    async def _train_all(self) -> SupervisedResult:
        for batch, position in self._batches():
            # Only now it is known that the last step was not the end, where validation comes first.
            if await self._between_steps(position):
                return await self._stopped()
            await self._control.profiles.begin(self._step + 1)
            result = await self._train(await self._complete(batch), position)
            if result is None:
                return await self._stopped()
            self._write_step(result, batch)
            await self._observe()
            await self._control.profiles.end()
            if schedules.is_due(self._step, self._config.validation.interval):
                await self._validate()
        return await self._finish()

    async def _between_steps(self, position: dict[str, Any]) -> bool:
        """Save if that is due, and do what commands ask for. Returns whether the run is to stop."""
        is_due = self._save_rule.is_due(self._step) or self._trainer.is_log_full
        agreed = await self._control.agree(is_save_due=is_due)
        if agreed.evaluates:
            await self._control.carry_out("evaluate", partial(self._validate_now, position))
        if agreed.is_save_due or (agreed.is_stopping and self._step > 0):
            await self._save(position=position)
        if agreed.saves:
            await self._control.carry_out("save", partial(self._save_now, position))
        return agreed.is_stopping

    async def _validate_now(self, position: dict[str, Any] | None) -> dict[str, Any]:
        await self._validate(position=position)
        if self._validated_step != self._step:  # the run was asked to stop meanwhile
            return {"evaluation": None}
        return {"evaluation": {"loss": self._validation_loss, **self._validation_metrics}}

    async def _save_now(self, position: dict[str, Any] | None) -> dict[str, Any]:
        """Save, and return where the checkpoint is when it is complete."""
        await self._save(position=position)
        await self._trainer.wait_saved()
        return {"checkpoint": str(newest_checkpoint(checkpoint_dir(self._config)))}

    def _batches(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Yield batches, each with the loader's position before it."""
        limit = self._config.training.max_steps
        loader = self._loaders.train
        while limit is None or self._step < limit:
            position = loader.state_dict()
            batch = next(loader, None)
            if batch is None:
                return
            yield batch, position

    async def _train(self, batch: Batch, position: dict[str, Any]) -> StepResult | None:
        """Take a step; None if there was no time for it. Then the state before it is saved."""
        try:
            training = self._trainer.train_step(batch, **self._control.step_options)
            with self._control.waits.shown(TRAINING), span("train", step=self._step):
                result = await self.stop.in_time(training, self._trainer.abandon_step)
        except StepAbandoned:
            if self._trainer.is_leader:
                self._logger.warning(
                    "step %d takes too long: it is abandoned, and the state before it is saved", self._step + 1
                )
            if self._step > 0:
                await self._save(position=position)
            return None
        except NonFiniteError:
            self._logger.error("the run stops; its state before this step is kept in %s", checkpoint_dir(self._config))
            await self._save(position=position)
            raise
        self._step, self._loss = result.step, result.loss
        note_started()
        return result

    # ---- Validation, checkpoints, and the end ---------------------------------------------------------------------

    async def _validate(self, *, position: dict[str, Any] | None = None) -> None:
        loader = self._loaders.validation
        if loader is None or self._validated_step == self._step:
            return
        waits, total = self._control.waits, loader.count_batches()
        sums = _Sums()
        count = None if total is None else lambda: (sums.num_batches, max(total.total, sums.num_batches))
        work = Work("the validation", "validating", "first validation", count, "batches")
        with self._throughput.paused(), waits.shown(work), span("validate"):
            loader.rewind()
            for batch in loader:
                if await self._is_asked():
                    return
                sums.add(await self._trainer.evaluate(await self._complete(batch)))
                waits.changed()
            self._validation_loss, self._validated_step = sums.loss / sums.weight, self._step
            is_best = self._validation_loss < (math.inf if self._best is None else self._best)  # never for NaN
            if is_best:
                self._best = self._validation_loss
            means = sums.means() if self._kind.validates_metrics else {}
            self._validation_metrics = self._kind.summarize(means, is_validation=True)
            named = {f"validation/{name}": value for name, value in self._validation_metrics.items()}
            self._write({VALIDATION_LOSS: self._validation_loss, VALIDATION_BEST: int(is_best), **named})
            if is_best and self._config.checkpointing.keep_best:
                await self._save(metric=self._validation_loss, position=position)

    async def _save(self, *, metric: float | None = None, position: dict[str, Any] | None = None) -> None:
        if self._last_save == self._step:
            return
        with self._throughput.paused(), self._control.waits.shown(SAVING), span("save", step=self._step):
            extra = {
                **saved_name(self._kind.name),
                "data": position or self._loaders.train.state_dict(),
                "best_validation_loss": self._best,
                "validation_loss": _finite(self._validation_loss),
                "validated_step": self._validated_step,
                "settings": self._control.settings.values,
            }
            await self._trainer.save(extra=extra, metric=metric)
        self._last_save = self._step
        self._save_rule.saved()

    async def _is_asked(self) -> bool:
        """Whether the run was asked to stop, in any of its ranks."""
        (is_asked,) = await self._trainer.agree(self.stop.is_asked)
        return is_asked

    async def _resume(self) -> bool:
        extra = await self._trainer.load(self._config.checkpointing.resume)
        if extra is None:
            return False
        self._loaders.train.load_state_dict(extra["data"])
        self._best, self._validation_loss = extra["best_validation_loss"], extra["validation_loss"]
        self._validated_step, self._saved_settings = extra.get("validated_step"), extra.get("settings")
        self._step = self._last_save = (await self._trainer.state())["step"]
        if self._trainer.is_leader:
            self._logger.info("resuming after step %d", self._step)
        return True

    async def _finish(self) -> SupervisedResult:
        await self._validate()
        await self._save()
        agreed = await self._control.agree()
        if agreed.evaluates:
            await self._control.carry_out("evaluate", partial(self._validate_now, None))
        if agreed.saves:
            await self._control.carry_out("save", partial(self._save_now, None))
        if agreed.is_stopping:
            return await self._stopped()
        export = None
        if self._config.checkpointing.export_hf:
            export = checkpoint_dir(self._config) / "hf"
            await self._trainer.export_hf(export, overwrite=True)
            if self._trainer.is_leader:
                self._logger.info("the model is in %s", export)
        return self._result(export=export)

    async def _stopped(self) -> SupervisedResult:
        """End before the last step, with what was saved complete."""
        await self._control.stop_all()
        await self._trainer.wait_saved()
        return self._result(is_stopped=True, exit_code=self.stop.exit_code)

    def _result(self, **how: Any) -> SupervisedResult:
        ended = {"export": None, "validation_metrics": self._validation_metrics, "folder": run_dir(self._config), **how}
        return SupervisedResult(self._step, self._loss, self._validation_loss, self._best, **ended)

    # ---- Metrics --------------------------------------------------------------------------------------------------

    def _open_log(self, *, resume_step: int | None) -> None:
        if not self._trainer.is_leader:
            return
        folder = run_dir(self._config)
        with recording(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(folder)
            is_resumed = is_continued(self._config, has_checkpoint=resume_step is not None)
            self._control.settings.begin(self._step, is_resumed=is_resumed, saved=self._saved_settings)
            config = self._control.settings.config
            if resume_step is not None:
                report_changes(config, folder, other_than=self._control.settings.repeated)
            save(config, folder)
            self._log = make_sinks(
                self._config.metrics,
                folder=folder,
                run=self._config,
                resume_step=resume_step,
                total_steps=self._trainer_config.total_steps,
                num_epochs=self._config.training.num_epochs,
            )
            self._observer = RunObserver(folder, self._config.record, resume_step=resume_step)

    def _write_step(self, result: StepResult, batch: Batch) -> None:
        self._throughput.add(result.num_tokens)
        rate = self._throughput.tokens_per_s
        result = replace(result, metrics=self._kind.summarize(result.metrics, is_validation=False))
        names = result.metrics.get("bad_samples")
        if result.skipped and self._trainer.is_leader:
            self._logger.warning("step %d was skipped: loss or gradient is not finite; samples: %s", result.step, names)
        values = step_values(
            result,
            epoch=self._loaders.train.epoch + 1,
            tokens_per_s=rate,
            mfu=None if self._utilization is None else self._utilization.of(batch.lengths, rate),
        )
        self._write({**values, **self._trainer.take_metrics()})

    async def _observe(self) -> None:
        """Write what processes have recorded since the last step, and how they are."""
        if self._observer is not None:
            recorded = await self._observer.after_step(self._step)
            if recorded:
                self._write(recorded)

    def _write(self, values: Mapping[str, Value]) -> None:
        if self._log is not None:
            self._log.write(self._step, values)

    def log_where_it_stopped(self) -> None:
        """Log what a resume continues after. Called when no process can complete a checkpoint any more."""
        if os.environ.get("RANK", "0") == "0" or not is_rank():
            self._logger.warning("%s", where_it_stopped(self._step, checkpoint_dir(self._config)))

    def close(self, failure: BaseException | None = None) -> None:
        """Write what ended the run, if something did, and close the files."""
        if self._observer is not None:
            if failure is not None:
                self._observer.note_end(failure)
            self._observer.close()
        if self._log is not None:
            self._log.close()
        if self._lock is not None:
            self._lock.release()


class _Sums:
    """The loss and the metrics of all batches of a validation."""

    def __init__(self) -> None:
        self.loss = self.weight = 0.0
        self.num_batches = 0
        self._metrics: dict[str, tuple[float, float]] = {}

    def add(self, found: Evaluated) -> None:
        self.loss, self.weight = self.loss + found.loss, self.weight + found.weight
        self.num_batches += 1
        for name, (total, divisor) in found.metrics.items():
            before = self._metrics.get(name, (0.0, 0.0))
            self._metrics[name] = before[0] + total, before[1] + divisor

    def means(self) -> dict[str, float]:
        return {name: total / divisor for name, (total, divisor) in self._metrics.items() if divisor}


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None
