"""One interface to a trainer, wherever its ranks are: in processes of their own, or in this one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forge.config import DistributedConfig, TrainerConfig, WorkerConfig
from forge.runtime.placement import num_usable_gpus, wants_gpus
from forge.trainer.actor import Trainer
from forge.types import Batch, StepResult

if TYPE_CHECKING:
    from torch import Tensor

    from forge.losses import Loss
    from forge.service import Service


class TrainerHandle(Protocol):
    """What a loop needs of a trainer. Every answer is that of the whole trainer, not of one rank."""

    is_leader: bool
    """Whether this process speaks for the run: prints, and writes metrics. One process does."""

    async def train_step(self, batch: Batch, *, keep_logprobs: bool = False) -> StepResult: ...

    async def abandon_step(self) -> None:
        """Let the step under way raise `StepAbandoned`, if there is no time to finish it."""
        ...

    async def agree(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag: whether it is set in some process that runs the loop. All call it at the same point."""
        ...

    async def evaluate(self, batch: Batch) -> tuple[float, float]: ...

    async def save(self, *, extra: Mapping[str, Any], metric: float | None = None) -> None: ...

    async def wait_saved(self) -> None:
        """Wait until the last checkpoint is complete; raise what it failed with."""
        ...

    async def load(self, resume: str) -> dict[str, Any] | None: ...

    async def export_hf(self, folder: Path, *, overwrite: bool = False) -> None: ...

    async def state(self) -> dict[str, Any]: ...

    async def close(self) -> None:
        """Complete pending saves and release everything."""
        ...


class PolicyTrainer(TrainerHandle, Protocol):
    """What a loop needs of a trainer whose weights others generate with."""

    async def forward_logprobs(self, batch: Batch, *, temperature: float = 1.0) -> list[Tensor]: ...

    async def publish_weights(self, version: int, *, name: str) -> None: ...

    async def release_memory(self) -> None:
        """Return unused device memory to the driver, for other processes on the same device."""
        ...


NEVER_REPLACED: Mapping[str, Any] = {"max_restarts": 0, "heartbeat_timeout_s": 120.0}
"""Options of a service that holds the state of training: a process in its place would not have it. It is watched, so
that a trainer that hangs ends the run."""


class ServiceTrainer:
    """A trainer in processes of its own, driven from the controller: what `LocalTrainer` is for ranks.

    It publishes weights in `dtype`, None for what it keeps them in, and has memory for `keep` versions.
    """

    is_leader = True

    def __init__(self, service: Service[Trainer], *, dtype: str | None = None, keep: int = 2) -> None:
        self.service, self._dtype, self._keep = service, dtype, keep

    async def train_step(self, batch: Batch, *, keep_logprobs: bool = False) -> StepResult:
        return await self.service.train_step.route(batch, keep_logprobs=keep_logprobs)

    async def abandon_step(self) -> None:
        await self.service.abandon_step.route()

    async def agree(self, *flags: bool) -> tuple[bool, ...]:
        return flags  # this process alone runs the loop

    async def forward_logprobs(self, batch: Batch, *, temperature: float = 1.0) -> list[Tensor]:
        logprobs = await self.service.forward_logprobs.route(batch, temperature=temperature)
        assert logprobs is not None  # rank 0 answers
        return logprobs

    async def publish_weights(self, version: int, *, name: str) -> None:
        await self.service.publish_weights.route(version, name=name, dtype=self._dtype, keep=self._keep)

    async def release_memory(self) -> None:
        await self.service.release_memory.route()

    async def evaluate(self, batch: Batch) -> tuple[float, float]:
        return await self.service.evaluate.route(batch)

    async def save(self, *, extra: Mapping[str, Any], metric: float | None = None) -> None:
        await self.service.save.route(dict(extra), metric)

    async def wait_saved(self) -> None:
        await self.service.wait_saved.route()

    async def load(self, resume: str) -> dict[str, Any] | None:
        return await self.service.load.route(resume)

    async def export_hf(self, folder: Path, *, overwrite: bool = False) -> None:
        await self.service.export_hf.route(folder, overwrite=overwrite)

    async def state(self) -> dict[str, Any]:
        return await self.service.state.route()

    async def close(self) -> None:
        await self.service.close.route()
        await self.service.shutdown()


class LocalTrainer:
    """One rank of a trainer in this process, for programs that are started once per rank, as torchrun does.

    All ranks run the same program with the same data, and meet inside the engine. A step blocks this process, so
    whether it is to be abandoned is asked from inside: `should_abandon`.
    """

    def __init__(
        self, config: TrainerConfig, loss: Loss | None = None, *, should_abandon: Callable[[], bool] = lambda: False
    ) -> None:
        from forge.trainer.checkpointer import Checkpointer
        from forge.trainer.engine import Engine

        self._engine = Engine(config, loss=loss)
        self._checkpointer = Checkpointer(self._engine)
        self.is_leader = self._engine.ranks.rank == 0
        if config.checkpointing.grace_s is not None:
            self._engine.should_abandon = should_abandon

    async def train_step(self, batch: Batch, *, keep_logprobs: bool = False) -> StepResult:
        return self._engine.train_step(batch, keep_logprobs=keep_logprobs)

    async def abandon_step(self) -> None:
        """Do nothing: the engine asks `should_abandon`."""

    async def agree(self, *flags: bool) -> tuple[bool, ...]:
        await asyncio.sleep(0)  # steps block the loop: here it gets its turn
        every = self._engine.ranks.gather(flags)
        return tuple(any(of_ranks) for of_ranks in zip(*every, strict=True))

    async def evaluate(self, batch: Batch) -> tuple[float, float]:
        return self._engine.evaluate(batch)

    async def save(self, *, extra: Mapping[str, Any], metric: float | None = None) -> None:
        self._checkpointer.save(extra=extra, metric=metric)

    async def wait_saved(self) -> None:
        self._checkpointer.wait()

    async def load(self, resume: str) -> dict[str, Any] | None:
        return self._checkpointer.load(resume)

    async def export_hf(self, folder: Path, *, overwrite: bool = False) -> None:
        self._checkpointer.export(folder, overwrite=overwrite)

    async def state(self) -> dict[str, Any]:
        return self._engine.describe()

    async def close(self) -> None:
        self._checkpointer.close()
        self._engine.close()


def is_rank() -> bool:
    """Whether this process was started as one of several ranks, as `forge run --nproc_per_node` does."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ


async def open_trainer(
    config: TrainerConfig,
    loss: Loss | None = None,
    *,
    should_abandon: Callable[[], bool] = lambda: False,
    worker: WorkerConfig | None = None,
) -> TrainerHandle:
    """A trainer for this program: in this process if it is a rank itself, else in as many as the degrees ask for.

    `worker` says how those processes are started.
    """
    if is_rank():
        return LocalTrainer(config, loss, should_abandon=should_abandon)
    options = trainer_options(config.distributed) | ({} if worker is None else worker.options())
    return ServiceTrainer(await Trainer.options(**options).as_service(config, loss))


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
