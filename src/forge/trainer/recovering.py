"""`RecoveringTrainer`: a trainer in processes of its own that survives their death.

    call ──▶ trainer ──dies──▶ start again ──▶ load the newest checkpoint ──▶ repeat the steps since then ──▶ call again

The loop that makes the calls notices nothing but the time it takes: it keeps its groups, its ledger and its generators.
The restored trainer has the same weights, bit for bit, so a version that was published before stays what it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forge.config import RecoveryConfig
from forge.errors import ActorFailure, CheckpointError, LaunchError, RecoveryError, ServiceStopped, StoreError
from forge.observe import span
from forge.observe.clock import monotonic_s
from forge.service.calls import is_remote
from forge.trainer.checkpoint_folder import clean, find_checkpoint
from forge.trainer.deaths import Deaths
from forge.trainer.handles import ServiceTrainer, reason_of_death
from forge.trainer.publishing import readable_digest, take_back
from forge.trainer.replay_log import SAVE_ID, LoggedSave, LoggedStep, ReplayLog, complete_saves, fingerprint
from forge.types import Batch, Evaluated, StepResult

if TYPE_CHECKING:
    from torch import Tensor

    from forge.service import Service
    from forge.trainer.actor import Trainer

T = TypeVar("T")
_log = logging.getLogger("forge.trainer")
_MAX_PUBLISH_TRIES: Final = 3
LOST: Final = (ActorFailure, ServiceStopped)


@dataclass(frozen=True, slots=True)
class RecoverySetup:
    """How one trainer is brought back.

    Attributes:
        name: what messages call it: `trainer` or `critic`.
        start: starts its processes; their model has its initial weights.
        rules: how often, and how much memory it may cost.
        checkpoints: the folder of the run's checkpoints.
        part: the name of its part in them, for a model that is saved with another one.
        crashes: the folder for batches that it dies on.
    """

    name: str
    start: Callable[[], Awaitable[ServiceTrainer]]
    rules: RecoveryConfig
    checkpoints: Path
    crashes: Path
    part: str | None = None


@dataclass(frozen=True, slots=True)
class _Work:
    """A call: what it is, and the batch that it trains on."""

    what: str
    batch: Batch | None = None


class RecoveringTrainer:
    """What `ServiceTrainer` is, with a log of its steps since the last checkpoints. Make it with `recovering`."""

    is_leader = True

    def __init__(self, trainer: ServiceTrainer, setup: RecoverySetup, *, clock: Callable[[], float] = monotonic_s):
        self._trainer, self._setup, self._clock = trainer, setup, clock
        self._log = ReplayLog()
        self._origin: str | None = None
        self._step = 0
        self._generation = 0
        self._is_closing = False
        self._recovering = asyncio.Lock()
        self._deaths = Deaths(setup.name, setup.rules, setup.crashes, clock=clock)
        self._end: Exception | None = None
        self._published: tuple[str, int, int] | None = None
        self._metrics: dict[str, float] = {}
        self.may_recover: Callable[[], bool] = lambda: True
        """Whether there is time for it: not when the run was asked to stop."""
        self.make_room: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext
        """Frees the device while the trainer is restored, where others use it in turns."""
        self.remake_parts: Callable[[int], Awaitable[Mapping[str, Path] | None]] = _no_parts
        """Saves the other models of a checkpoint of this step again; None if they have learned more since."""

    @property
    def service(self) -> Service[Trainer]:
        """The processes that do the work now."""
        return self._trainer.service

    # ---- Calls --------------------------------------------------------------------------------------------------

    async def _call(self, work: _Work, call: Callable[[ServiceTrainer], Awaitable[T]]) -> T:
        """Make a call, and again after a death."""
        while True:
            async with self._recovering:  # waits while it is being restored
                trainer, generation = self._trainer, self._generation
            try:
                return await call(trainer)
            except LOST as failure:
                if is_remote(failure) or (self._is_closing and work.what != "close"):
                    raise
                await self._recover(work, await _death_of(trainer, failure), generation)

    async def train_step(
        self, batch: Batch, *, keep_logprobs: bool = False, learning_rate: float | None = None
    ) -> StepResult:
        options: dict[str, Any] = {"keep_logprobs": keep_logprobs, "learning_rate": learning_rate}
        result = await self._call(_Work("train_step", batch), lambda trainer: trainer.train_step(batch, **options))
        self._log.add_step(batch, result, learning_rate=learning_rate)
        self._step = result.step
        return result

    async def abandon_step(self) -> None:
        with contextlib.suppress(*LOST):  # the step that is to be abandoned says so
            await self._trainer.abandon_step()

    async def agree(self, *flags: bool) -> tuple[bool, ...]:
        return flags

    async def share(self, value: T) -> T:
        return value

    async def evaluate(self, batch: Batch) -> Evaluated:
        return await self._call(_Work("evaluate"), lambda trainer: trainer.evaluate(batch))

    async def forward_logprobs(self, batch: Batch, *, temperature: float | None = None) -> list[Tensor]:
        work = _Work("forward_logprobs", batch)
        return await self._call(work, lambda trainer: trainer.forward_logprobs(batch, temperature=temperature))

    async def base_logprobs(self, batch: Batch, temperature: float | None = None) -> list[Tensor]:
        return await self._call(
            _Work("base_logprobs", batch), lambda trainer: trainer.base_logprobs(batch, temperature)
        )

    async def forward_values(self, batch: Batch) -> list[Tensor]:
        return await self._call(_Work("forward_values", batch), lambda trainer: trainer.forward_values(batch))

    async def release_memory(self) -> None:
        await self._call(_Work("release_memory"), lambda trainer: trainer.release_memory())

    async def export_hf(self, folder: Path, *, overwrite: bool = False) -> None:
        await self._call(_Work("export_hf"), lambda trainer: trainer.export_hf(folder, overwrite=overwrite))

    async def state(self) -> dict[str, Any]:
        return await self._call(_Work("state"), lambda trainer: trainer.state())

    async def close(self) -> None:
        self._is_closing = True
        if self._end is None:
            await self._call(_Work("close"), lambda trainer: trainer.close())
        else:
            await _shut_down(self._trainer)

    # ---- Weights ------------------------------------------------------------------------------------------------

    async def publish_weights(self, version: int, *, name: str) -> str | None:
        """Publish the weights. What a death or a lost storage volume leaves of the version is taken back first."""
        generation = self._generation

        async def publish(trainer: ServiceTrainer) -> str | None:
            if self._generation != generation:  # a process died meanwhile
                digest = await readable_digest(name, version)
                if digest is not None:  # only the answer was lost
                    return digest
                await take_back(name, version)
            return await trainer.publish_weights(version, name=name)

        num_tries = 0
        while True:
            num_tries += 1
            try:
                digest = await self._call(_Work("publish_weights"), publish)
            except StoreError as error:
                if num_tries == _MAX_PUBLISH_TRIES or await readable_digest(name, version) is not None:
                    raise
                _log.warning("version %d could not be published; it is tried again: %s", version, error.message)
                await take_back(name, version)
            else:
                self._published = name, version, self._step
                return digest

    async def republish(self, version: int, *, name: str) -> bool:
        """Publish a version again whose memory is gone. Return False if the weights are not those any more."""
        if self._published != (name, version, self._step):
            return False
        await take_back(name, version)
        await self.publish_weights(version, name=name)
        return True

    # ---- Checkpoints --------------------------------------------------------------------------------------------

    @property
    def is_log_full(self) -> bool:
        """Whether a checkpoint is due because the batches since the last one take half of the memory for them."""
        return self._log.num_bytes_unsaved > self._setup.rules.max_batches_gb * 2**30 / 2

    async def save(
        self,
        *,
        extra: Mapping[str, Any],
        metric: float | None = None,
        parts: Mapping[str, Path] | None = None,
        step: int | None = None,
    ) -> None:
        save = LoggedSave({"extra": extra, "metric": metric, "parts": parts, "step": step})
        await self._call(_Work("save"), lambda trainer: self._save(trainer, save))
        self._log.add_save(save)

    async def _save(self, trainer: ServiceTrainer, save: LoggedSave) -> bool:
        """Begin a save. Return False if the other models that belong to it have learned more since it was asked for."""
        arguments = dict(save.arguments)
        if not all(path.exists() for path in save.parts.values()):  # a process died that had moved them already
            arguments["parts"] = await self.remake_parts(int(arguments["extra"]["step"]))
            if arguments["parts"] is None:
                return False
        await trainer.save(**arguments | {"extra": {**arguments["extra"], SAVE_ID: save.id}})
        return True

    async def wait_saved(self) -> None:
        await self._call(_Work("wait_saved"), lambda trainer: trainer.wait_saved())

    async def load(self, resume: str) -> dict[str, Any] | None:
        found = find_checkpoint(self._setup.checkpoints, resume=resume)
        self._origin = None if found is None else str(found.path)
        chosen = resume if found is None else str(found.path)
        extra = await self._call(_Work("load"), lambda trainer: trainer.load(chosen))
        self._log, self._step = ReplayLog(), int((await self.state())["step"])
        return extra

    # ---- Recovery -----------------------------------------------------------------------------------------------

    def take_metrics(self) -> dict[str, float]:
        """Return what recovery has cost since the last call; nothing if no process died."""
        taken, self._metrics = self._metrics, {}
        return taken

    def _add(self, name: str, value: float) -> None:
        self._metrics[f"recovery/{name}"] = self._metrics.get(f"recovery/{name}", 0.0) + value

    async def _recover(self, work: _Work, failure: Exception, generation: int) -> None:
        """Bring the trainer back to the state before a call that it died in."""
        async with self._recovering:
            if generation != self._generation:
                return  # another call has done it
            if self._end is not None:
                raise self._end
            if not self.may_recover():
                raise failure
            began = self._clock()
            try:
                self._note_death(work, failure, self._step)
            except RecoveryError as error:
                self._end = error
                raise
            with span(f"recover {self._setup.name}"):
                async with self.make_room():
                    base, num_steps = await self._restore_until_it_lasts(failure)
            seconds = self._clock() - began
            self._generation += 1
            self._add("seconds", seconds)
            self._add("steps_retrained", num_steps)
            _log.warning(
                "the %s is back after %.1f s: restored from %s, %d step(s) trained again",
                *(self._setup.name, seconds, base, num_steps),
            )

    def _note_death(self, work: _Work, failure: Exception, step: int) -> None:
        """Count a death against the step that it happened in; the second one in the same step ends the run."""
        if not isinstance(failure, ServiceStopped):  # else it was dead before the call
            self._deaths.note(failure, what=work.what, step=step, batch=work.batch)

    async def _restore_until_it_lasts(self, failure: Exception) -> tuple[str, int]:
        try:
            while True:
                await self._deaths.wait_to_restart(failure)
                self._add("restarts", 1)
                try:
                    return await self._restore()
                except (*LOST, LaunchError) as again:
                    if is_remote(again) or not self.may_recover():
                        raise
                    failure = again
        except Exception as error:
            self._end = error  # every later call raises it
            raise

    async def _restore(self) -> tuple[str, int]:
        """Start new processes and bring them to the state of the log. Return from where, and by how many steps."""
        await _shut_down(self._trainer)
        trainer = await self._setup.start()
        try:
            complete = self._complete_saves()
            base, entries = self._log.since(complete)
            source = self._origin if base is None else str(complete[base.id])
            if source is not None:
                await trainer.load(source)
            num_steps = await self._replay(trainer, entries)
            await self._restore_published(trainer)
            await trainer.release_memory()  # others may use the device
        except BaseException:
            await _shut_down(trainer)  # no call may reach one that is not whole
            raise
        self._trainer = trainer
        return source or "its initial weights", num_steps

    def _complete_saves(self) -> dict[str, Path]:
        """Return the checkpoints that the lost processes have completed, by their saves. What they were writing is
        removed, or put back where it was to replace a checkpoint of the same step."""
        folder, part = self._setup.checkpoints, self._setup.part
        own = folder if part is None else folder / part
        if own.is_dir():
            clean(own)
        complete = complete_saves(folder, part=part)
        if self._log.since(complete)[0] is None and not self._log.reaches_back:
            raise CheckpointError(
                f"the {self._setup.name} cannot be restored: its last checkpoints are gone",
                path=str(own),
                value=sorted(str(path) for path in complete.values()),
                rule="a checkpoint that this run has completed stays until the next one is complete",
                repair="leave the folder alone while a run writes to it; continue with --resume",
            )
        return complete

    async def _replay(self, trainer: ServiceTrainer, entries: Sequence[LoggedStep | LoggedSave]) -> int:
        """Repeat what the log says. Return how many steps were trained again."""
        num_steps = 0
        for entry in entries:
            if isinstance(entry, LoggedSave):
                if not await self._save(trainer, entry):
                    _log.warning("the checkpoint that was being written is lost; the next one replaces it")
                continue
            if not self.may_recover():
                raise ServiceStopped(f"the {self._setup.name} is not restored: the run was asked to stop")
            before = entry.found[0] - 1
            try:
                result = await trainer.train_step(entry.batch, learning_rate=entry.learning_rate)
            except ActorFailure as failure:
                if not is_remote(failure):
                    self._note_death(_Work("train_step", entry.batch), failure, before)
                raise
            num_steps += 1
            if fingerprint(result) != entry.found:
                _log.warning(
                    "step %d has another result when it is trained again (step, loss, gradient norm): %s, before %s; "
                    "this device does not compute the same twice, and training continues from the new weights",
                    *(before + 1, fingerprint(result), entry.found),
                )
        return num_steps

    async def _restore_published(self, trainer: ServiceTrainer) -> None:
        """Publish the newest version again, if its memory was that of the processes that died."""
        if self._published is None:
            return
        name, version, step = self._published
        if step == self._step and await readable_digest(name, version) is None:
            await take_back(name, version)
            await trainer.publish_weights(version, name=name)


async def _shut_down(trainer: ServiceTrainer) -> None:
    """End processes of which some are dead. What is left of them ends with the run at the latest."""
    with contextlib.suppress(Exception):
        await trainer.service.shutdown()


async def _death_of(trainer: ServiceTrainer, failure: ActorFailure | ServiceStopped) -> ActorFailure | ServiceStopped:
    """Return the failure of a call, with what the processes died of where it only says that they are gone."""
    if isinstance(failure, ServiceStopped) and (reason := await reason_of_death(trainer)) is not None:
        failure.message = reason
        failure.args = (reason,)
    return failure


def add_up(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of what several trainers report."""
    sums: dict[str, float] = {}
    for values in metrics:
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


async def recovering(setup: RecoverySetup) -> ServiceTrainer | RecoveringTrainer:
    """Start a trainer, and let it survive the death of its processes, unless the rules say that it ends the run."""
    trainer = await setup.start()
    return RecoveringTrainer(trainer, setup) if setup.rules.max_restarts else trainer


async def _no_parts(step: int) -> Mapping[str, Path] | None:
    return {}
