"""Trainer and generator in one process, on one copy of the weights where both compute in the same precision."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from forge.config import GeneratorConfig, Sampling, TrainerConfig
from forge.generator.actor import Generator, Messages
from forge.generator.engine import EngineStats
from forge.observe import span
from forge.runtime.device_memory import DeviceMemoryError
from forge.runtime.endpoints import endpoint
from forge.trainer.actor import Trainer
from forge.types import Batch, Completion, StepResult

if TYPE_CHECKING:
    from torch import Tensor

    from forge.generator.native.engine import NativeEngine
    from forge.losses import Loss

_log = logging.getLogger("forge.grpo")

T = TypeVar("T")


class _SharedGenerator(Generator):
    """A generator that computes with the trainer's parameters.

    A trainer that computes in bfloat16 keeps its weights in float32. An engine that generates in bfloat16 cannot
    compute with those, and has a copy, which `copy_weights` renews.
    """

    parameters: Mapping[str, Tensor]
    _is_shared: bool

    def _engine_options(self, world_size: int, devices: Sequence[str]) -> dict[str, Any]:
        self._is_shared = can_share(self.config, self.parameters)
        return {"shared": self.parameters if self._is_shared else None}

    @property
    def engine(self) -> NativeEngine:
        return cast("NativeEngine", self._engine)

    def copy_weights(self) -> None:
        """Bring the engine's copy up to date, if it has one. Nothing may be generated meanwhile."""
        if not self._is_shared:
            self.engine.copy_weights(self.parameters)

    def trust(self, version: int) -> None:
        """Accept a version without proof: the engine computes with the trainer's own weights."""
        self._sync.trust(version)


class SharedPolicy(Trainer):
    """A trainer that also generates, with the native engine on its own parameters.

    Where both compute in the same precision there is nothing to copy: `publish_weights` only gives the weights their
    version. Otherwise it converts them, inside the device's memory. A step of training pauses generation; completions
    in progress continue afterwards. On a GPU, if there are none, the trainer has the memory of the engine's cache.
    """

    def __init__(self, config: TrainerConfig, loss: Loss | None, generator: GeneratorConfig) -> None:
        super().__init__(config, loss)
        self._generator = _SharedGenerator(generator)

    @endpoint
    async def setup(self) -> None:
        """Load the model once, for both."""
        await super().setup()
        self._generator.parameters = {name: _whole(tensor) for name, tensor in self.engine.own_parameters().items()}
        await self._generator.setup()

    @property
    def _native(self) -> NativeEngine:
        return self._generator.engine

    @endpoint
    async def train_step(self, batch: Batch, keep_logprobs: bool = False) -> StepResult:
        """Take one optimizer step, between two steps of generation."""
        return await self._between_steps(partial(super().train_step, batch, keep_logprobs))

    @endpoint(retry=True)
    async def forward_logprobs(self, batch: Batch, temperature: float = 1.0) -> list[Tensor] | None:
        """See `Trainer.forward_logprobs`; between two steps of generation."""
        return await self._between_steps(partial(super().forward_logprobs, batch, temperature))

    async def _between_steps(self, work: Callable[[], Awaitable[T]]) -> T:
        """Pause generation for some work of the trainer, which gets the memory of the engine's cache.

        A caller that cancels it waits until the work has ended: the thread that does it cannot be stopped.
        """
        async with self._native.paused(self._native.version):
            done = asyncio.ensure_future(self._with_cache_released(work))
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                await asyncio.wait([done])
                raise

    async def _with_cache_released(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something while the engine's cache is free for it: on a GPU, unless completions in progress need it."""
        is_released = self._native.is_on_gpu and await self._do(self._native.release_cache)
        try:
            result = await work()
        except BaseException:
            if is_released:
                await self._try_to_restore()
            raise
        if is_released:
            with span("take the cache again"):
                await self._do(self._native.restore_cache)
        return result

    async def _try_to_restore(self) -> None:
        """Restore the cache after work that failed. Log a failure: the error of the work is the one to raise."""
        try:
            await self._do(self._native.restore_cache)
        except DeviceMemoryError as error:
            _log.warning("after a failed step the generator sleeps until the next one: %s", error)

    @endpoint
    async def load(self, resume: str = "must") -> dict[str, Any] | None:
        """Resume from a checkpoint, between two steps of generation."""
        async with self._native.paused(self._native.version):
            return await super().load(resume)

    @endpoint
    async def publish_weights(
        self, version: int, name: str = "policy", canary: bool = True, dtype: str | None = None, keep: int = 2
    ) -> None:
        """Give the weights that both compute with their version."""
        async with self._native.paused(version):
            await self._do(self._generator.copy_weights)
            self._generator.trust(version)

    @endpoint(concurrent=True)
    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        n: int | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """See `Generator.generate`."""
        return await self._generator.generate(
            prompt, messages=messages, token_ids=token_ids, sampling=sampling, n=n, template=template
        )

    @endpoint(concurrent=True)
    async def stats(self) -> EngineStats | None:
        """See `Generator.stats`."""
        return await self._generator.stats()

    @endpoint
    async def close(self) -> None:
        """End the engine, complete what is being saved, and leave the process group."""
        await self._generator.close()
        await super().close()


def can_share(config: GeneratorConfig, parameters: Mapping[str, Tensor]) -> bool:
    """Whether an engine computes with these very tensors: they are of its precision, and where it computes."""
    is_cuda = all(tensor.is_cuda for tensor in parameters.values())
    on_gpu = is_cuda if config.with_gpus is None else config.with_gpus
    wanted = config.precision_on(gpu=on_gpu)
    kept_in = {str(tensor.dtype).removeprefix("torch.") for tensor in parameters.values()}
    return on_gpu == is_cuda and kept_in == {wanted}


def _whole(tensor: Tensor) -> Tensor:
    """Return a parameter of the one rank as a plain tensor, in the same memory: mixed precision makes it a DTensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
