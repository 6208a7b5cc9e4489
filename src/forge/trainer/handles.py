"""One interface to a trainer, wherever its ranks are: in processes of their own, or in this one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from forge.config import DistributedConfig, RecoveryConfig, TrainerConfig, WorkerConfig
from forge.errors import ActorFailure, ForgeError, ServiceStopped
from forge.runtime.placement import num_usable_gpus, wants_gpus
from forge.trainer.actor import Trainer
from forge.types import Batch, Evaluated, StepResult

if TYPE_CHECKING:
    from torch import Tensor

    from forge.losses import AnyLoss
    from forge.service import Service

T = TypeVar("T")


class TrainerHandle(Protocol):
    """What a loop needs of a trainer. Every answer is that of the whole trainer, not of one rank."""

    is_leader: bool
    """Whether this process speaks for the run: prints, and writes metrics. One process does."""

    async def train_step(
        self, batch: Batch, *, keep_logprobs: bool = False, learning_rate: float | None = None
    ) -> StepResult:
        """Take an optimizer step; see `Engine.train_step`."""
        ...

    async def abandon_step(self) -> None:
        """Let the step under way raise `StepAbandoned`, if there is no time to finish it."""
        ...

    async def agree(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag: whether it is set in some process that runs the loop. All call it at the same point."""
        ...

    async def share(self, value: T) -> T:
        """Return the leader's value in all processes that run the loop. All call it at the same point."""
        ...

    async def evaluate(self, batch: Batch) -> Evaluated: ...

    async def forward_logprobs(self, batch: Batch, *, temperature: float | None = None) -> list[Tensor]:
        """Return the logprobs of every sample's tokens; see `Engine.forward_logprobs`."""
        ...

    async def base_logprobs(self, batch: Batch, temperature: float | None = None) -> list[Tensor]:
        """Return the logprobs of the model without its adapter: the policy's own reference model."""
        ...

    async def forward_values(self, batch: Batch) -> list[Tensor]:
        """Return the values of every sample's tokens, of a model with a scalar head; see `Engine.forward_values`."""
        ...

    async def save(self, *, extra: Mapping[str, Any], metric: float | None = None) -> None: ...

    async def wait_saved(self) -> None:
        """Wait until the last checkpoint is complete; raise what it failed with."""
        ...

    async def load(self, resume: str) -> dict[str, Any] | None: ...

    async def export_hf(self, folder: Path, *, overwrite: bool = False) -> None:
        """Write the weights as a Hugging Face folder, and an adapter also as a PEFT folder `adapter` beside it."""
        ...

    async def state(self) -> dict[str, Any]: ...

    async def close(self) -> None:
        """Complete pending saves and release everything."""
        ...

    @property
    def is_log_full(self) -> bool:
        """Whether a checkpoint is due, so that what a restored trainer would train again stays bounded."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Return what recovery has cost since the last call."""
        ...


class ServedTrainer(TrainerHandle, Protocol):
    """What a loop needs of a trainer in processes of its own, on devices that others may use."""

    async def release_memory(self) -> None:
        """Return unused device memory to the driver, for other processes on the same device."""
        ...


class PolicyTrainer(ServedTrainer, Protocol):
    """What a loop needs of a trainer whose weights others generate with."""

    async def publish_weights(self, version: int, *, name: str) -> str | None:
        """Publish the weights as a version, and return its digest; None where it is not computed."""
        ...

    async def save(
        self,
        *,
        extra: Mapping[str, Any],
        metric: float | None = None,
        parts: Mapping[str, Path] | None = None,
        step: int | None = None,
    ) -> None:
        """Save a checkpoint, with complete ones of other models inside (see `Checkpointer.save`)."""
        ...


ADAPTER_FOLDER: Final = "adapter"
"""Where a run's adapter is written at its end, beside the merged model."""

NEVER_REPLACED: Mapping[str, Any] = {"max_restarts": 0, "heartbeat_timeout_s": 120.0}
"""Options of a service that holds the state of training: a process in its place would not have it, so that no call may
reach one before `RecoveringTrainer` has restored it. It is watched: a trainer that hangs is lost, too."""


class ServiceTrainer:
    """A trainer in processes of its own, driven from the controller: what `LocalTrainer` is for ranks.

    It publishes weights in `dtype`, None for what it keeps them in, and has memory for `keep` versions. When its
    processes die, calls raise; see `RecoveringTrainer`.
    """

    is_leader = True
    is_log_full = False

    def __init__(self, service: Service[Trainer], *, dtype: str | None = None, keep: int = 2) -> None:
        self.service, self._dtype, self._keep = service, dtype, keep

    async def train_step(
        self, batch: Batch, *, keep_logprobs: bool = False, learning_rate: float | None = None
    ) -> StepResult:
        return await self.service.train_step.route(batch, keep_logprobs=keep_logprobs, learning_rate=learning_rate)

    async def abandon_step(self) -> None:
        await self.service.abandon_step.route()

    async def agree(self, *flags: bool) -> tuple[bool, ...]:
        return flags  # this process alone runs the loop

    async def share(self, value: T) -> T:
        return value

    async def forward_logprobs(self, batch: Batch, *, temperature: float | None = None) -> list[Tensor]:
        logprobs = await self.service.forward_logprobs.route(batch, temperature=temperature)
        assert logprobs is not None  # rank 0 answers
        return logprobs

    async def base_logprobs(self, batch: Batch, temperature: float | None = None) -> list[Tensor]:
        logprobs = await self.service.forward_logprobs.route(batch, temperature=temperature, base=True)
        assert logprobs is not None  # rank 0 answers
        return logprobs

    async def forward_values(self, batch: Batch) -> list[Tensor]:
        values = await self.service.forward_values.route(batch)
        assert values is not None  # rank 0 answers
        return values

    async def publish_weights(self, version: int, *, name: str) -> str | None:
        return await self.service.publish_weights.route(version, name=name, dtype=self._dtype, keep=self._keep)

    async def release_memory(self) -> None:
        await self.service.release_memory.route()

    async def evaluate(self, batch: Batch) -> Evaluated:
        return await self.service.evaluate.route(batch)

    async def save(
        self,
        *,
        extra: Mapping[str, Any],
        metric: float | None = None,
        parts: Mapping[str, Path] | None = None,
        step: int | None = None,
    ) -> None:
        await self.service.save.route(dict(extra), metric, parts, step)

    async def wait_saved(self) -> None:
        await self.service.wait_saved.route()

    async def load(self, resume: str) -> dict[str, Any] | None:
        return await self.service.load.route(resume)

    async def export_hf(self, folder: Path, *, overwrite: bool = False) -> None:
        await self.service.export_hf.route(folder, overwrite=overwrite)
        await self.service.export_adapter.route(folder.with_name(ADAPTER_FOLDER))

    async def state(self) -> dict[str, Any]:
        return await self.service.state.route()

    async def close(self) -> None:
        await self.service.close.route()
        await self.service.shutdown()

    def take_metrics(self) -> dict[str, float]:
        return {}


class LocalTrainer:
    """One rank of a trainer in this process, for programs that are started once per rank, as torchrun does.

    All ranks run the same program with the same data, and meet inside the engine. A step blocks this process, so
    whether it is to be abandoned is asked from inside: `should_abandon`. What starts the ranks starts them again.
    """

    is_log_full = False

    def __init__(
        self, config: TrainerConfig, loss: AnyLoss | None = None, *, should_abandon: Callable[[], bool] = lambda: False
    ) -> None:
        from forge.trainer.checkpointer import Checkpointer
        from forge.trainer.engine import Engine

        self._engine = Engine(config, loss=loss)
        self._checkpointer = Checkpointer(self._engine)
        self.is_leader = self._engine.ranks.rank == 0
        if config.checkpointing.grace_s is not None:
            self._engine.should_abandon = should_abandon

    async def train_step(
        self, batch: Batch, *, keep_logprobs: bool = False, learning_rate: float | None = None
    ) -> StepResult:
        return self._engine.train_step(batch, keep_logprobs=keep_logprobs, learning_rate=learning_rate)

    async def abandon_step(self) -> None:
        """Do nothing: the engine asks `should_abandon`."""

    async def agree(self, *flags: bool) -> tuple[bool, ...]:
        await asyncio.sleep(0)  # steps block the loop: here it gets its turn
        every = self._engine.ranks.gather(flags)
        return tuple(any(of_ranks) for of_ranks in zip(*every, strict=True))

    async def share(self, value: T) -> T:
        shared: T = self._engine.ranks.gather(value)[0]
        return shared

    async def evaluate(self, batch: Batch) -> Evaluated:
        return self._engine.evaluate(batch)

    async def forward_logprobs(self, batch: Batch, *, temperature: float | None = None) -> list[Tensor]:
        return self._engine.forward_logprobs(batch, temperature=temperature)

    async def base_logprobs(self, batch: Batch, temperature: float | None = None) -> list[Tensor]:
        return self._engine.forward_logprobs(batch, temperature=temperature, base=True)

    async def forward_values(self, batch: Batch) -> list[Tensor]:
        return self._engine.forward_values(batch)

    async def save(self, *, extra: Mapping[str, Any], metric: float | None = None) -> None:
        self._checkpointer.save(extra=extra, metric=metric)

    async def wait_saved(self) -> None:
        self._checkpointer.wait()

    async def load(self, resume: str) -> dict[str, Any] | None:
        return self._checkpointer.load(resume)

    async def export_hf(self, folder: Path, *, overwrite: bool = False) -> None:
        self._checkpointer.export(folder, overwrite=overwrite)
        if self._engine.adapter is not None:
            self._checkpointer.export_adapter(folder.with_name(ADAPTER_FOLDER))

    async def state(self) -> dict[str, Any]:
        return self._engine.describe()

    async def close(self) -> None:
        self._checkpointer.close()
        self._engine.close()

    def take_metrics(self) -> dict[str, float]:
        return {}


def is_rank() -> bool:
    """Whether this process was started as one of several ranks, as `forge run --nproc_per_node` does."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ


async def open_trainer(
    config: TrainerConfig,
    loss: AnyLoss | None = None,
    *,
    should_abandon: Callable[[], bool] = lambda: False,
    worker: WorkerConfig | None = None,
    recovery: tuple[RecoveryConfig, Path] | None = None,
) -> TrainerHandle:
    """A trainer for this program: in this process if it is a rank itself, else in as many as the degrees ask for.

    `worker` says how those processes are started, and `recovery` how often they are started again, with the folder for
    batches that they die on; None for never.
    """
    if is_rank():
        return LocalTrainer(config, loss, should_abandon=should_abandon)
    options = trainer_options(config.distributed) | ({} if worker is None else worker.options())

    async def start() -> ServiceTrainer:
        return ServiceTrainer(await Trainer.options(**options).as_service(config, loss))

    if recovery is None or config.checkpoint_dir is None:
        return await start()
    from forge.trainer.recovering import RecoverySetup, recovering

    rules, crashes = recovery
    return await recovering(RecoverySetup("trainer", start, rules, config.checkpoint_dir, crashes))


async def death_of(trainer: TrainerHandle | PolicyTrainer, failure: ServiceStopped) -> ForgeError:
    """Return what a trainer died of where a call found it dead already; else the failure of the call."""
    if not isinstance(trainer, ServiceTrainer) or failure.path != trainer.service.name:
        return failure
    reason = await reason_of_death(trainer)
    return failure if reason is None else ActorFailure(reason, path=failure.path)


async def reason_of_death(trainer: ServiceTrainer) -> str | None:
    """Return what the processes of a trainer died of, before the call that found them dead; None if it is not known."""
    replicas = (await trainer.service.get_metrics()).replicas
    reasons = [replica.last_failure for replica in replicas if replica.last_failure]
    return f"{trainer.service.name} was lost before this call: {reasons[0]}" if reasons else None


def trainer_options(distributed: DistributedConfig) -> dict[str, Any]:
    """Return the options of a trainer's service: one replica with the ranks that the degrees ask for."""
    return {
        **NEVER_REPLACED,
        "mesh_name": "trainer",
        "procs": planned_ranks(distributed) // (distributed.hosts or 1),
        "hosts": distributed.hosts,
        "with_gpus": wants_gpus(distributed.with_gpus),
        "num_threads": distributed.num_threads,
    }


def planned_ranks(distributed: DistributedConfig) -> int:
    """How many ranks the controller starts: the product of the degrees, where a shard of -1 takes all GPUs."""
    return distributed.ranks_on(num_usable_gpus() if wants_gpus(distributed.with_gpus) else 0)
