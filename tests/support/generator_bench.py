"""Engines on the models of `generator_models`, and what their tests wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from torch import Tensor

from forge.config import GeneratorConfig, Sampling, UpdateMode
from forge.generator.engine import GenerationEngine, Request, engine_class
from forge.generator.native.engine import NativeEngine
from forge.models.locate import resolve
from forge.models.tokenizer import ChatTokenizer
from forge.store import Weights
from forge.types import Completion, Delta
from generator_models import FIRST, Kind, config, model, tokenizer, weights

LIMIT_S = 600
MAX_BATCH, MAX_QUEUE = 8, 12


def native_engine(config: GeneratorConfig, kind: Kind = FIRST, **options: Any) -> NativeEngine:
    return NativeEngine(config, model=model(kind), tokenizer=tokenizer(kind), **options)


def make_engine(config: GeneratorConfig, **options: Any) -> Any:
    """Make the engine that a configuration names, as `Generator` does."""
    model = resolve(config.model)
    tokenizer = None if model.folder is None else ChatTokenizer.load(model.folder)
    return engine_class(config.engine)(config, model=model, tokenizer=tokenizer, **options)


class Bench:
    """An engine that was started, the loop that it lives on, and what was published for it."""

    device = "cpu"
    """From where weights are published."""

    def __init__(self, name: str, runner: asyncio.Runner) -> None:
        self.name, self._runner = name, runner
        self.weights = Weights("policy", keep=3, rank=0, world_size=1)
        self.published: dict[int, Kind] = {}

    def run(self, body: Coroutine[Any, Any, Any]) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(LIMIT_S):
                return await body

        return self._runner.run(limited())

    async def open(self, **settings: Any) -> None:
        limits: dict[str, Any] = {"max_seq_len": 2048, "max_batch": MAX_BATCH, "max_queue": MAX_QUEUE} | settings
        made_from = config(FIRST, engine=self.name, kv_cache_gb=0.1, **limits)
        if self.name == "native":
            self.engine: GenerationEngine = native_engine(made_from)
        else:
            self.engine = make_engine(made_from)
        await self.engine.start()

    async def publish(self, kind: Kind, tensors: Mapping[str, Tensor] | None = None) -> int:
        """Publish the weights of a model, or others in their place, as the next version."""
        version = len(self.published) + 1
        chosen = weights(kind) if tensors is None else tensors
        published = {name: tensor.to(self.device) for name, tensor in chosen.items()}
        await self.weights.publish(published, version=version)
        self.published[version] = kind
        return version

    async def serve(self, kind: Kind, mode: UpdateMode = "drain") -> int:
        """Publish the weights of a model as the next version, and update to it."""
        version = await self.publish(kind)
        report = await self.engine.update_weights(version, mode)
        assert (report.version, report.mode, self.engine.version) == (version, mode, version)
        return version

    async def generate(self, prompt_ids: tuple[int, ...], **sampling: Any) -> list[Completion]:
        return await self.engine.generate(request(prompt_ids, **sampling))

    def started(self, prompt_ids: tuple[int, ...], **sampling: Any) -> asyncio.Task[list[Completion]]:
        return asyncio.ensure_future(self.generate(prompt_ids, **sampling))


def request(prompt_ids: tuple[int, ...], **sampling: Any) -> Request:
    """Greedy, and blind to the model's end token, unless asked otherwise."""
    chosen = {"temperature": 0.0, "ignore_eos": True} | sampling
    return Request("test", prompt_ids, Sampling.model_validate(chosen))


async def until(stream: AsyncIterator[Delta], *, num_tokens: int, version: int | None = None) -> None:
    """Read a stream until so many tokens have come, all of them or those of one version."""
    seen = 0
    while seen < num_tokens:
        delta = await anext(stream)
        assert delta.completion is None, "the completion ended before what the test waits for"
        seen += len(delta.token_ids) if version is None or delta.version == version else 0


async def all_begun(bench: Bench, stream: AsyncIterator[Delta], *, num_running: int) -> None:
    """Read a stream until so many completions, its own included, have made a token."""
    await until(stream, num_tokens=1)
    while bench.engine.stats().num_running < num_running:
        await until(stream, num_tokens=1)
    await until(stream, num_tokens=3)


async def last_of(stream: AsyncIterator[Delta]) -> Completion:
    completions = [delta.completion async for delta in stream if delta.completion is not None]
    assert len(completions) == 1
    return completions[0]


def covered(completion: Completion) -> bool:
    ends = [0, *(span.end for span in completion.versions)]
    return ends[-1] == len(completion) and ends[:-1] == [span.start for span in completion.versions]
