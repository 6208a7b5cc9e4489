"""`Trainer`: an engine behind endpoints. Every rank runs the same call; rank 0's answer is the one to read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from forge.config import TrainerConfig
from forge.observe import span
from forge.observe.gauges import add_gauges, of_process
from forge.observe.phases import phase
from forge.runtime.actor import COMMON_PRELOAD
from forge.runtime.endpoints import endpoint
from forge.runtime.placement import num_usable_gpus
from forge.service.actor import ForgeActor
from forge.types import Batch, Evaluated, Sample, StepResult

if TYPE_CHECKING:
    from torch import Tensor

    from forge.losses import AnyLoss
    from forge.trainer.checkpointer import Checkpointer
    from forge.trainer.engine import Engine

P = ParamSpec("P")
T = TypeVar("T")


class Trainer(ForgeActor):
    """A model that learns, on as many ranks as the configuration's degrees ask for.

    `config.frozen` makes it one that only scores; see `ReferenceModel`.

    Example:
        >>> trainer = await Trainer.options(procs=2).as_actor(config)
        >>> results = await trainer.train_step.call(batch)  # one StepResult per rank, all equal
    """

    @classmethod
    def _forge_preload(cls, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        if num_usable_gpus():  # TorchTitan starts CUDA while it is imported: a fork could not use it then
            return COMMON_PRELOAD
        return (*COMMON_PRELOAD, "forge.trainer.engine", "forge.trainer.checkpointer")

    def __init__(self, config: TrainerConfig, loss: AnyLoss | None = None) -> None:
        self.config, self.loss = config, loss
        self._abandoned = threading.Event()

    @endpoint
    async def setup(self) -> None:
        """Load the model. Everything that touches it runs on one thread, so that the actor answers meanwhile."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forge-engine")
        await self._do(self._open)

    def _open(self) -> None:
        with phase("importing the trainer"):
            from forge.trainer.checkpointer import Checkpointer
            from forge.trainer.engine import Engine

        self.engine: Engine = Engine(self.config, loss=self.loss)
        self.checkpointer: Checkpointer = Checkpointer(self.engine)
        self._weights: Any = None
        self._version: int | None = None
        add_gauges(self, Trainer._gauges)
        if self.config.checkpointing.grace_s is not None and not self.config.frozen:
            self.engine.should_abandon = self._abandoned.is_set

    async def _do(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    @endpoint
    async def train_step(
        self, batch: Batch, keep_logprobs: bool = False, learning_rate: float | None = None
    ) -> StepResult:
        """Take one optimizer step on the global batch. With `keep_logprobs`, rank 0 returns the tokens' before it.
        `learning_rate` is the highest rate of the schedule; None for that of the configuration."""
        with span("train_step", num_samples=len(batch.lengths), num_tokens=len(batch.token_ids)):
            result = await self._do(
                self.engine.train_step, batch, keep_logprobs=keep_logprobs, learning_rate=learning_rate
            )
        return result if self.engine.ranks.rank == 0 else replace(result, logprobs=None)

    @endpoint(concurrent=True)
    async def abandon_step(self) -> None:
        """Let the training step under way raise `StepAbandoned`, and every later one: there is no time to finish it."""
        self._abandoned.set()

    @endpoint(retry=True)
    async def evaluate(self, batch: Batch) -> Evaluated:
        """Return the sums of the batch's loss and metrics, and what each is divided by; no gradient."""
        return await self._do(self.engine.evaluate, batch)

    @endpoint(retry=True)
    async def forward_logprobs(
        self, batch: Batch, temperature: float | None = None, base: bool = False
    ) -> list[Tensor] | None:
        """Return the logprobs of every sample's tokens, float32 [L] each; None on ranks other than 0.

        See `Engine.forward_logprobs`. With `base` they are those of the model without its adapter.
        """
        with span("forward_logprobs", num_samples=len(batch.lengths), num_tokens=len(batch.token_ids)):
            logprobs = await self._do(self.engine.forward_logprobs, batch, temperature=temperature, base=base)
        return logprobs if self.engine.ranks.rank == 0 else None

    @endpoint(retry=True)
    async def forward_top_logprobs(self, batch: Batch, k: int) -> list[tuple[Tensor, Tensor]] | None:
        """Return the k likeliest tokens at the place of each token that counts; see `forge.trainer.top_logprobs`."""
        from forge.trainer.top_logprobs import top_logprobs

        with span("forward_top_logprobs", num_samples=len(batch.lengths), num_tokens=len(batch.token_ids)):
            found = await self._do(top_logprobs, self.engine, batch, k)
        return found if self.engine.ranks.rank == 0 else None

    @endpoint(retry=True)
    async def forward_values(self, batch: Batch) -> list[Tensor] | None:
        """Return the values of every sample's tokens, float32 [L] each, of a model with a scalar head.

        `values[t]` is the value after token t; see `Engine.forward_values`. None on ranks other than 0.
        """
        with span("forward_values", num_samples=len(batch.lengths), num_tokens=len(batch.token_ids)):
            values = await self._do(self.engine.forward_values, batch)
        return values if self.engine.ranks.rank == 0 else None

    @endpoint
    async def publish_weights(
        self, version: int, name: str = "policy", canary: bool = True, dtype: str | None = None, keep: int = 2
    ) -> str | None:
        """Publish the weights, or the adapter alone, as a version of `name` in the store.

        Returns the version's digest when readers can fetch it.

        With `canary`, the logprobs that this model gives a few tokens are kept with the version, so that generators
        can prove that they compute with the same weights. `dtype`, such as bfloat16, is what they are published in,
        from the first version of a name on; None for what they are kept in. The store has memory for `keep` versions.
        """
        import torch

        from forge.store import Weights

        ranks = self.engine.ranks
        if self._weights is None or self._weights.name != name:
            kind = None if dtype is None else getattr(torch, dtype)
            self._weights = Weights(name, rank=ranks.rank, world_size=ranks.size, dtype=kind, keep=keep)
        with span("publish_weights", version=version):
            if canary:
                with span("keep canary"):
                    await self._keep_canary(version, name)
            state = await self._do(self.engine.trained_parameters)
            published = await self._weights.publish(state, version=version)
            self._version = version
            return str(published.digest)

    def _gauges(self) -> dict[str, float]:
        return {} if self._version is None else of_process({"version": self._version})

    async def _keep_canary(self, version: int, name: str) -> None:
        import torch

        from forge.store.canary import Canary, canary_ids, put_canary

        training = self.config.training
        longest = training.microbatch_tokens or training.max_seq_len
        token_ids = torch.tensor(canary_ids(self.engine.model.architecture.vocab_size or 1, most=longest))
        sample = Sample(token_ids, torch.zeros(len(token_ids)), identity="canary")
        logprobs = await self._do(self.engine.forward_logprobs, Batch.of([sample]))
        if self.engine.ranks.rank == 0:
            await put_canary(name, Canary(version, tuple(token_ids.tolist()), tuple(logprobs[0].tolist())))

    @endpoint
    async def save(
        self,
        extra: Mapping[str, Any] | None = None,
        metric: float | None = None,
        parts: Mapping[str, Path] | None = None,
        step: int | None = None,
    ) -> None:
        """Save a checkpoint; see `Checkpointer.save`."""
        await self._do(self.checkpointer.save, extra=extra, metric=metric, parts=parts, step=step)

    @endpoint
    async def load(self, resume: str = "must") -> dict[str, Any] | None:
        """Resume from a checkpoint, and return what its `save` was given as `extra`; None if there is none."""
        return await self._do(self.checkpointer.load, resume)

    @endpoint
    async def wait_saved(self) -> None:
        """Return when the last checkpoint is complete."""
        await self._do(self.checkpointer.wait)

    @endpoint
    async def export_hf(self, folder: Path, dtype: str | None = None, overwrite: bool = False) -> None:
        """Write the weights as a Hugging Face folder."""
        await self._do(self.checkpointer.export, Path(folder), dtype=dtype, overwrite=overwrite)

    @endpoint
    async def export_adapter(self, folder: Path) -> bool:
        """Write the adapter as a PEFT folder. Returns whether there is one."""
        if self.engine.adapter is not None:
            await self._do(self.checkpointer.export_adapter, Path(folder))
        return self.engine.adapter is not None

    @endpoint
    async def release_memory(self) -> None:
        """Release the device's memory that is kept for later steps and holds nothing now.

        PyTorch keeps what a step has used, activations above all, for the next one; no other process can have it.
        """
        with span("release_memory"):
            await self._do(_empty_cache)

    @endpoint
    async def state(self) -> dict[str, Any]:
        """Return where training is: step, layout, device, parameters, memory, and what its bits depend on."""
        from forge.trainer.hardware import hardware_of

        return await self._do(lambda: {**self.engine.describe(), "hardware": hardware_of(self.engine.ranks.device)})

    @endpoint
    async def close(self) -> None:
        """Complete what is being saved and leave the process group."""
        await self._do(self.checkpointer.close)
        await self._do(self.engine.close)
        self._thread.shutdown(wait=False)


def _empty_cache() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class ReferenceModel(Trainer):
    """A model that only scores, for a policy to be held to. As a service it may have several replicas.

    With `model.head: scalar` it gives values (`forward_values`), as a reward model or the copy of a critic does.

    Example:
        >>> reference = await ReferenceModel.options(num_replicas=2).as_service(config)
        >>> logprobs = await reference.forward_logprobs.route(batch, temperature=1.0)
    """

    def __init__(self, config: TrainerConfig) -> None:
        super().__init__(config.model_copy(update={"frozen": True}))
