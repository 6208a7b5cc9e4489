"""Stand-ins for everyone in a run of reinforcement learning: the loop alone is real, and takes milliseconds."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from forge.config import GRPOConfig, Sampling
from forge.generator.engine import UpdateReport
from forge.loops.grpo import GRPOLoop, GRPOResult
from forge.loops.planning import plan_run
from forge.loops.rollouts import single_turn
from forge.loops.stopping import Stop
from forge.loops.workers import Workers
from forge.types import Batch, Completion, Score, StepResult, Task, VersionSpan


def number_of(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


class StandInTrainer:
    """Its weights are one number, which depends on every token that it ever learned from."""

    is_leader = True
    is_log_full = False

    def __init__(self) -> None:
        self.weights, self.step = number_of("first"), 0
        self.published: dict[int, int] = {}
        self.saved: list[dict[str, Any]] = []
        self.found: dict[str, Any] | None = None

    async def train_step(self, batch: Batch, *, keep_logprobs: bool = False) -> StepResult:
        await asyncio.sleep(0)
        self.step += 1
        self.weights = number_of(self.weights, batch.token_ids.tolist(), batch.fields["advantages"].tolist())
        logprobs = tuple(torch.zeros(int(length)) for length in batch.lengths) if keep_logprobs else None
        return StepResult(self.step, 0.1, 1.0, 1e-3, len(batch.token_ids), 1, seconds=0.01, logprobs=logprobs)

    async def forward_logprobs(self, batch: Batch, *, temperature: float = 1.0) -> list[torch.Tensor]:
        return [torch.zeros(int(length)) for length in batch.lengths]

    async def base_logprobs(self, batch: Batch, temperature: float = 1.0) -> list[torch.Tensor]:
        return await self.forward_logprobs(batch, temperature=temperature)

    async def publish_weights(self, version: int, *, name: str) -> None:
        await asyncio.sleep(0)
        self.published[version] = self.weights

    async def save(self, *, extra: Mapping[str, Any], metric: float | None = None, **options: Any) -> None:
        self.saved.append(dict(extra))

    async def wait_saved(self) -> None: ...

    async def abandon_step(self) -> None: ...

    def take_metrics(self) -> dict[str, float]:
        return {}

    async def agree(self, *flags: bool) -> tuple[bool, ...]:
        return flags

    async def load(self, resume: str) -> dict[str, Any] | None:
        return self.found

    async def export_hf(self, folder: Path, *, overwrite: bool = False) -> None: ...

    async def state(self) -> dict[str, Any]:
        return {"step": self.step, "device_name": "cpu", "compute_dtype": "float32", "num_ranks": 1}

    async def close(self) -> None: ...


class StandInPolicy:
    """Draws tokens that depend on the weights, the seed and the index alone."""

    def __init__(self, trainer: StandInTrainer, *, on_update: Callable[[int], None] = lambda version: None) -> None:
        self._trainer, self._on_update, self.version = trainer, on_update, 0

    async def generate(self, prompt: Task, *, sampling: Sampling) -> list[Completion]:
        await asyncio.sleep(0)
        version = self.choose()
        return [self._drawn(version, sampling.seed, index) for index in range(sampling.n)]

    def choose(self) -> int:
        """The weights of the next request."""
        return self.version

    def _drawn(self, version: int, seed: int | None, index: int) -> Completion:
        weights = self._trainer.published[version]
        tokens = tuple(number_of(weights, seed, index, place) % 500 for place in range(4))
        spans = (VersionSpan(version, 0, 4),)
        return Completion((1, 2), tokens, (-0.5,) * 4, None, "text", "stop", versions=spans, index=index)

    async def extend(self, completion: Completion, *, sampling: Sampling) -> Completion:
        raise AssertionError

    async def update_weights(self, version: int) -> list[UpdateReport]:
        await asyncio.sleep(0)
        self._on_update(version)
        self.version = version
        return [UpdateReport(version, "keep", 0.0, 0.0)]

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


class StandInService:
    """A service of one replica in this process: an endpoint is a method of `actor`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        async def fanout(*args: Any, **kwargs: Any) -> list[Any]:
            return [await method(*args, **kwargs)]

        method = getattr(self._actor, name)
        endpoint = SimpleNamespace(route=method, fanout=fanout)
        endpoint.options = lambda **options: endpoint
        return endpoint

    async def shutdown(self) -> None: ...


class StandInRewards:
    def __init__(self, score: Callable[[Completion], float] | None = None) -> None:
        self._score = score or (lambda completion: float(number_of(completion.token_ids) % 97))

    async def score(self, prompt: Task, completions: Sequence[Completion]) -> list[Score]:
        await asyncio.sleep(0)
        return [Score(self._score(completion), {"all": 1.0}) for completion in completions]

    async def close(self) -> None: ...


def make_loop(
    chosen: GRPOConfig, trainer: Any, policy: Any, rewards: Any, *, critic: Any = None, **options: Any
) -> GRPOLoop:
    """A loop over stand-ins."""
    plan = plan_run(chosen)
    workers = Workers(trainer, policy, StandInService(rewards), None, critic=critic)  # type: ignore[arg-type]
    return GRPOLoop(plan, workers, single_turn(plan, workers), **options)


def run_loop(
    chosen: GRPOConfig,
    trainer: StandInTrainer,
    *,
    policy: StandInPolicy | None = None,
    rewards: StandInRewards | None = None,
    stop: Stop | None = None,
    clock: Callable[[], float] = time.monotonic,
    critic: Any = None,
) -> GRPOResult:
    """Run the loop with stand-ins, in this process alone."""

    async def body() -> GRPOResult:
        workers = (trainer, policy or StandInPolicy(trainer), rewards or StandInRewards())
        loop = make_loop(chosen, *workers, stop=stop, clock=clock, critic=critic)
        try:
            return await asyncio.wait_for(loop.run(), 600)
        finally:
            loop.close()

    return asyncio.run(body())
