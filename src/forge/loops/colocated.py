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
from forge.models.adapter_names import is_adapter
from forge.models.quantized_names import is_quantized
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

    A trainer that computes in bfloat16 keeps what it trains in float32. An engine that generates in bfloat16 cannot
    compute with that, and has a copy, which `copy_weights` renews. Weights below an adapter are shared all the same.
    """

    parameters: Mapping[str, Tensor]
    _is_shared: bool

    def _engine_options(self, world_size: int, devices: Sequence[str]) -> dict[str, Any]:
        shared = shareable(self.config, self.parameters)
        self._is_shared = len(shared) == len(self.parameters)
        return {"shared": shared or None}

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
    version. Otherwise it converts them, inside the device's memory. A step of training pauses generation. On a GPU the
    trainer has the memory of the engine's cache meanwhile.

    Args:
        config: the trainer's configuration.
        loss: what it minimizes.
        generator: the generator's configuration.
        runs_ahead: whether completions are in progress while the trainer works, because rollouts may be stale. Then
            generation stays paused after a step until `publish_weights` has given the new weights their version, and
            completions continue with them. On a GPU what they had in the cache is computed again; on a CPU
            `generator.update.mode` says what happens.
    """

    @classmethod
    def _forge_preload(cls, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        generator = args[2] if len(args) > 2 else kwargs.get("generator")
        return tuple(dict.fromkeys((*super()._forge_preload(), *Generator._forge_preload(generator))))

    def __init__(
        self, config: TrainerConfig, loss: Loss | None, generator: GeneratorConfig, *, runs_ahead: bool = False
    ) -> None:
        super().__init__(config, loss)
        self._generator = _SharedGenerator(generator)
        self._runs_ahead = runs_ahead

    @endpoint
    async def setup(self) -> None:
        """Load the model once, for both."""
        from forge.models.quantized import quantized_tensors

        await super().setup()
        parameters = {name: _whole(tensor) for name, tensor in self.engine.own_parameters().items()}
        self._generator.parameters = parameters | quantized_tensors(self.engine.parts)
        await self._generator.setup()

    @property
    def _native(self) -> NativeEngine:
        return self._generator.engine

    @endpoint
    async def train_step(
        self, batch: Batch, keep_logprobs: bool = False, learning_rate: float | None = None
    ) -> StepResult:
        """Take one optimizer step, between two steps of generation."""
        step = partial(super().train_step, batch, keep_logprobs, learning_rate)
        return await self._between_steps(step, until_published=self._runs_ahead)

    @endpoint(retry=True)
    async def forward_logprobs(
        self, batch: Batch, temperature: float | None = None, base: bool = False
    ) -> list[Tensor] | None:
        """See `Trainer.forward_logprobs`; between two steps of generation."""
        return await self._between_steps(partial(super().forward_logprobs, batch, temperature, base))

    async def _between_steps(self, work: Callable[[], Awaitable[T]], *, until_published: bool = False) -> T:
        """Pause generation for some work of the trainer, which gets the memory of the engine's cache.

        With `until_published`, generation stays paused after work that succeeded: it changed the weights, and tokens
        of them must not be sampled before they have a version. A caller that cancels it waits until the work has
        ended: the thread that does it cannot be stopped.
        """
        async with self._native.paused(self._native.version):
            done = asyncio.ensure_future(self._with_cache_released(work, until_published=until_published))
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                await asyncio.wait([done])
                raise

    async def _with_cache_released(self, work: Callable[[], Awaitable[T]], *, until_published: bool) -> T:
        """Do something while the engine's cache is free for it: on a GPU, unless completions in progress need it."""
        release = partial(self._native.release_cache, preempt=self._runs_ahead)
        is_released = self._native.is_on_gpu and await self._do(release)
        try:
            result = await work()
        except BaseException:
            if is_released:
                await self._try_to_restore()
            raise
        if until_published:
            self._native.stay_paused()
        elif is_released:
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
    ) -> str | None:
        """Give the weights that both compute with their version, and return their digest; None on a GPU, where making
        it would hold up the step. In a run that pins versions they are also published in the store, in the engine's
        precision: what is pinned must not change with the trainer's weights."""
        mode = self._generator.config.update.mode if self._runs_ahead else "keep"
        async with self._native.paused(version, mode):
            await self._do(self._generator.copy_weights)
            self._generator.trust(version)
            if self._generator.config.pinned_versions is not None:
                await self._publish_copy(version, name)
            with span("digest weights"):
                digest = await self._do(self._digest)
            if self._runs_ahead:
                with span("take the cache again"):
                    await self._do(self._native.resume)
        return digest

    def _digest(self) -> str | None:
        from forge.store.digest import state_digest

        if self._native.is_on_gpu:
            return None
        return state_digest({name: _whole(tensor) for name, tensor in self.engine.trained_parameters().items()})

    async def _publish_copy(self, version: int, name: str) -> None:
        import torch

        from forge.store import Weights

        if self._weights is None or self._weights.name != name:
            precision = self._generator.config.precision_on(gpu=self._native.is_on_gpu)
            kind = getattr(torch, precision)
            self._weights = Weights(name, rank=0, world_size=1, dtype=kind, keep=1, on="host")
        await self._weights.publish(await self._do(self.engine.trained_parameters), version=version)

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
        version: int | None = None,
    ) -> list[Completion]:
        """See `Generator.generate`."""
        return await self._generator.generate(
            prompt, messages=messages, token_ids=token_ids, sampling=sampling, n=n, template=template, version=version
        )

    @endpoint(concurrent=True)
    async def unload_version(self, version: int) -> None:
        """See `Generator.unload_version`."""
        await self._generator.unload_version(version)

    @endpoint(concurrent=True)
    async def stats(self) -> EngineStats | None:
        """See `Generator.stats`."""
        return await self._generator.stats()

    @endpoint
    async def close(self) -> None:
        """End the engine, complete what is being saved, and leave the process group."""
        await self._generator.close()
        await super().close()


def shareable(config: GeneratorConfig, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that an engine computes with: of its precision, and where it computes.

    They are all parameters, all but the adapter, or none. Weights in few bits have no precision of computing.
    """
    is_cuda = all(tensor.is_cuda for tensor in parameters.values())
    on_gpu = is_cuda if config.with_gpus is None else config.with_gpus
    wanted = config.precision_on(gpu=on_gpu)
    fitting = {
        name
        for name, tensor in parameters.items()
        if is_quantized(name) or str(tensor.dtype).removeprefix("torch.") == wanted
    }
    needed = {name for name in parameters if not is_adapter(name)}
    if on_gpu != is_cuda or not needed <= fitting:
        return {}
    return {name: tensor for name, tensor in parameters.items() if name in fitting}


def _whole(tensor: Tensor) -> Tensor:
    """Return a parameter of the one rank as a plain tensor, in the same memory: mixed precision makes it a DTensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
