"""Trainer and generator in one process, on one copy of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge.config import GeneratorConfig, Sampling, TrainerConfig
from forge.generator.actor import Generator, Messages
from forge.generator.engine import EngineStats, GenerationEngine
from forge.runtime.endpoints import endpoint
from forge.trainer.actor import Trainer
from forge.types import Batch, Completion, StepResult

if TYPE_CHECKING:
    from torch import Tensor

    from forge.losses import Loss


class _Sharing(Generator):
    """A generator that computes with parameters which somebody else changes."""

    parameters: Mapping[str, Tensor]

    def _make_engine(self, world_size: int, devices: Sequence[str]) -> GenerationEngine:
        from forge.generator.actor import _end_process
        from forge.generator.native.engine import NativeEngine

        return NativeEngine(
            self.config,
            model=self.model,
            tokenizer=self._tokenizer,
            shared=self.parameters,
            on_death=_end_process,
        )


class SharedPolicy(Trainer):
    """A trainer that also generates, with the embedded engine on its own parameters.

    There is nothing to copy: `publish_weights` only gives the weights their version. A step of training holds
    generation up for as long as it takes; completions under way go on afterwards.
    """

    def __init__(self, config: TrainerConfig, loss: Loss | None, generator: GeneratorConfig) -> None:
        super().__init__(config, loss)
        self._generator = _Sharing(generator)

    @endpoint
    async def setup(self) -> None:
        """Load the model once, for both."""
        await super().setup()
        self._generator.parameters = self.engine.own_parameters()
        await self._generator.setup()

    @property
    def _native(self) -> Any:
        return self._generator._engine

    @endpoint
    async def train_step(self, batch: Batch, keep_logprobs: bool = False) -> StepResult:
        """One optimizer step, between two steps of generation."""
        async with self._native.changing(self._native.version):
            return await super().train_step(batch, keep_logprobs)

    @endpoint
    async def load(self, resume: str = "must") -> dict[str, Any] | None:
        """Go on from a checkpoint, between two steps of generation."""
        async with self._native.changing(self._native.version):
            return await super().load(resume)

    @endpoint
    async def publish_weights(self, version: int, name: str = "policy", canary: bool = True) -> None:
        """Give the weights that both compute with their version."""
        async with self._native.changing(version):
            self._generator._sync.trust(version)

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
