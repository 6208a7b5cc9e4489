"""Supervised fine-tuning.

    files ──Sample──▶ data.BatchLoader ──Batch──▶ trainer.train_step ──StepResult──▶ observe
                            │                          │
                            └── position ──▶ checkpoint ◀── weights, optimizer, random state

The loop asks the loader for a batch, hands it to the trainer, writes down what came back, and now and then validates
and saves. It holds no state that a checkpoint does not.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.config import SFTConfig, WorkerConfig, save
from forge.errors import ActorFailure, NonFiniteError, ServiceStopped, StepAbandoned
from forge.loops.preflight import PreparedSFT, prepare_sft
from forge.loops.resuming import SaveRule, report_changes, where_it_stopped
from forge.loops.run_paths import checkpoint_dir, run_dir
from forge.loops.stopping import Stop, stopped_by_signals
from forge.models.sizes import flops_per_token, mean_context, model_flops_utilization
from forge.observe import (
    MetricsLog,
    Throughput,
    device_peak_flops,
    make_sinks,
    step_values,
)
from forge.observe.sink import VALIDATION_BEST, VALIDATION_LOSS, Value
from forge.rollout.ledger import recording
from forge.runtime.lifetime import run
from forge.trainer import schedules
from forge.trainer.checkpoint_folder import WriterLock
from forge.trainer.handles import TrainerHandle, is_rank, open_trainer
from forge.types import Batch, StepResult

_log = logging.getLogger("forge.sft")


@dataclass(frozen=True, slots=True)
class SFTResult:
    """How a run ended.

    Attributes:
        step: optimizer steps taken, those before a resume included.
        loss: of the last step; NaN if there was none.
        validation_loss: the last one, if there was any; `best_validation_loss` the lowest.
        export: the Hugging Face folder, if one was written.
        is_stopped: whether it was stopped by a signal before its end.
        exit_code: what a program exits with: 0, or 128 plus the number of the signal that stopped it.
    """

    step: int
    loss: float
    validation_loss: float | None
    best_validation_loss: float | None
    export: Path | None
    is_stopped: bool = False
    exit_code: int = 0


async def run_sft(config: SFTConfig, *, clock: Callable[[], float] = time.monotonic) -> SFTResult:
    """Fine-tune as a configuration says. In every rank of `forge run --nproc_per_node`, or once as the controller.

    SIGINT, SIGTERM and SIGHUP end it after a checkpoint; a second signal ends it at once, with SystemExit. `clock`
    gives the seconds between two checkpoints.
    """
    with prepare_sft(config) as prepared:
        hint, grace_s = "this step is finished and saved", config.checkpointing.grace_s
        async with stopped_by_signals(save_hint=hint, grace_s=grace_s, is_rank=is_rank()) as (stop, is_late):
            loop = _Loop(config, prepared, stop=stop, clock=clock)
            try:
                if is_rank():
                    result = await _drive(loop, prepared, is_late=is_late, worker=config.workers.trainer)
                else:
                    async with run(config.launcher):
                        result = await _drive(loop, prepared, is_late=is_late, worker=config.workers.trainer)
            except BaseException:
                loop.log_where_it_stopped()
                raise
            if result.is_stopped:
                loop.log_where_it_stopped()
            return result


async def _drive(loop: _Loop, prepared: PreparedSFT, *, is_late: Callable[[], bool], worker: WorkerConfig) -> SFTResult:
    trainer = await loop.stop.unless(
        open_trainer(prepared.trainer, prepared.loss, should_abandon=is_late, worker=worker)
    )
    if trainer is None:
        return SFTResult(loop.step, math.nan, None, None, None, True, loop.stop.exit_code)
    try:
        result = await loop.run(trainer)
    except BaseException:
        loop.close()
        with contextlib.suppress(ActorFailure, ServiceStopped):  # of a lost trainer; what it died of is raised
            await trainer.close()
        raise
    loop.close()
    await trainer.close()
    return result


class _Loop:
    """One run, from its first batch or from where a checkpoint left it."""

    def __init__(
        self, config: SFTConfig, prepared: PreparedSFT, *, stop: Stop, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._trainer_config, self._loaders = config, prepared.trainer, prepared.loaders
        self.stop = stop
        self._save_rule = SaveRule(config.checkpointing, clock=clock)
        self._trainer: TrainerHandle
        self._log: MetricsLog | None = None
        self._lock: WriterLock | None = None
        self._step = 0 if prepared.checkpoint is None else prepared.checkpoint.step
        self._loss = math.nan
        self._validation_loss: float | None = None
        self._best: float | None = None
        self._last_save: int | None = None
        self._validated_step: int | None = None
        self._throughput = Throughput()
        self._peak_flops: float | None = None
        self._num_devices = 1

    @property
    def step(self) -> int:
        """Optimizer steps taken, those before a resume included."""
        return self._step

    async def run(self, trainer: TrainerHandle) -> SFTResult:
        """Train until the last step or a request to stop."""
        self._trainer = trainer
        resumed = await self._resume()
        self._open_log(resume_step=self._step if resumed else None)
        state = await self._trainer.state()
        self._num_devices = state["num_ranks"]
        self._peak_flops = device_peak_flops(state["device_name"], state["compute_dtype"])
        self._throughput = Throughput()
        self._save_rule.saved()
        for batch, position in self._batches():
            # Only now it is known that the last step was not the end, where validation comes first.
            is_asked, is_due = await self._trainer.agree(self.stop.is_asked, self._save_rule.is_due(self._step))
            if is_due or (is_asked and self._step > 0):
                await self._save(position=position)
            if is_asked:
                return await self._stopped()
            result = await self._train(batch, position)
            if result is None:
                return await self._stopped()
            self._write_step(result, batch)
            if schedules.is_due(self._step, self._config.validation.interval):
                await self._validate()
        return await self._finish()

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
            result = await self.stop.in_time(self._trainer.train_step(batch), self._trainer.abandon_step)
        except StepAbandoned:
            if self._trainer.is_leader:
                _log.warning(
                    "step %d takes too long: it is abandoned, and the state before it is saved", self._step + 1
                )
            if self._step > 0:
                await self._save(position=position)
            return None
        except NonFiniteError:
            _log.error("the run stops; its state before this step is kept in %s", checkpoint_dir(self._config))
            await self._save(position=position)
            raise
        self._step, self._loss = result.step, result.loss
        return result

    # ---- Validation, checkpoints, and the end ---------------------------------------------------------------------

    async def _validate(self) -> None:
        loader = self._loaders.validation
        if loader is None or self._validated_step == self._step:
            return
        with self._throughput.paused():
            loader.rewind()
            loss = weight = 0.0
            for batch in loader:
                if await self._is_asked():
                    return
                batch_loss, batch_weight = await self._trainer.evaluate(batch)
                loss, weight = loss + batch_loss, weight + batch_weight
            self._validation_loss, self._validated_step = loss / weight, self._step
            is_best = self._validation_loss < (math.inf if self._best is None else self._best)  # never for NaN
            if is_best:
                self._best = self._validation_loss
            self._write({VALIDATION_LOSS: self._validation_loss, VALIDATION_BEST: int(is_best)})
            if is_best and self._config.checkpointing.keep_best:
                await self._save(metric=self._validation_loss)

    async def _save(self, *, metric: float | None = None, position: dict[str, Any] | None = None) -> None:
        if self._last_save == self._step:
            return
        with self._throughput.paused():
            extra = {
                "data": position or self._loaders.train.state_dict(),
                "best_validation_loss": self._best,
                "validation_loss": _finite(self._validation_loss),
                "validated_step": self._validated_step,
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
        self._validated_step = extra.get("validated_step")
        self._step = self._last_save = (await self._trainer.state())["step"]
        if self._trainer.is_leader:
            _log.info("resuming after step %d", self._step)
            report_changes(self._config, run_dir(self._config))
        return True

    async def _finish(self) -> SFTResult:
        await self._validate()
        await self._save()
        if await self._is_asked():
            return await self._stopped()
        export = None
        if self._config.checkpointing.export_hf:
            export = checkpoint_dir(self._config) / "hf"
            await self._trainer.export_hf(export, overwrite=True)
            if self._trainer.is_leader:
                _log.info("the model is in %s", export)
        return SFTResult(self._step, self._loss, self._validation_loss, self._best, export)

    async def _stopped(self) -> SFTResult:
        """End before the last step, with what was saved complete."""
        await self._trainer.wait_saved()
        code = self.stop.exit_code
        return SFTResult(self._step, self._loss, self._validation_loss, self._best, None, True, code)

    # ---- Metrics --------------------------------------------------------------------------------------------------

    def _open_log(self, *, resume_step: int | None) -> None:
        if not self._trainer.is_leader:
            return
        folder = run_dir(self._config)
        with recording(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(folder)
            save(self._config, folder)
            self._log = make_sinks(
                self._config.metrics,
                folder=folder,
                run_name=self._config.run.name,
                resume_step=resume_step,
                total_steps=self._trainer_config.total_steps,
                num_epochs=self._config.training.num_epochs,
            )

    def _write_step(self, result: StepResult, batch: Batch) -> None:
        self._throughput.add(result.num_tokens)
        rate = self._throughput.tokens_per_s
        names = result.metrics.get("bad_samples")
        if result.skipped and self._trainer.is_leader:
            _log.warning("step %d was skipped: loss or gradient is not finite; samples: %s", result.step, names)
        values = step_values(
            result,
            epoch=self._loaders.train.epoch + 1,
            tokens_per_s=rate,
            mfu=self._utilization(batch, rate),
        )
        self._write(values)

    def _utilization(self, batch: Batch, rate: float | None) -> float | None:
        """Return which part of the devices' peak goes into the model, where the peak is known."""
        if self._peak_flops is None:
            return None
        return model_flops_utilization(
            rate,
            flops_per_token=flops_per_token(self._trainer_config.model, mean_context(batch.lengths)),
            peak_flops=self._peak_flops,
            num_devices=self._num_devices,
        )

    def _write(self, values: Mapping[str, Value]) -> None:
        if self._log is not None:
            self._log.write(self._step, values)

    def log_where_it_stopped(self) -> None:
        """Log what a resume continues after. Called when no process can complete a checkpoint any more."""
        if os.environ.get("RANK", "0") == "0" or not is_rank():
            _log.warning("%s", where_it_stopped(self._step, checkpoint_dir(self._config)))

    def close(self) -> None:
        """Close the metrics' files."""
        if self._log is not None:
            self._log.close()
        if self._lock is not None:
            self._lock.release()


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None
