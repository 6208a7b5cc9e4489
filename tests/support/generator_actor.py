"""A `Generator` in this process, where all of its life can be seen, and weights for it to take."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import generator_models as models
from forge.config import GeneratorConfig, UpdateConfig
from forge.generator.actor import Generator
from forge.store import Weights
from forge.store.canary import Canary, canary_ids, put_canary
from generator_models import FIRST, Kind


def config(**changes: Any) -> GeneratorConfig:
    update = UpdateConfig(max_attempts=2, retry_wait_s=0.01)
    return models.config(FIRST, **{"update": update, "max_seq_len": 2048, "kv_cache_gb": 0.1} | changes)


@contextlib.asynccontextmanager
async def generator(**changes: Any) -> AsyncIterator[Generator]:
    """A generator that is set up, and closed at the end."""
    made = Generator(config(**changes))
    await made.setup()
    try:
        yield made
    finally:
        await made.close()


async def publish(version: int, kind: Kind, *, canary: Kind | None = None) -> None:
    """Publish a model's weights; with `canary`, what transformers computes with that model is kept beside them."""
    if canary is not None:
        ids = canary_ids(512)
        await put_canary("policy", Canary(version, ids, (0.0, *models.logprobs(ids[:1], ids[1:], canary))))
    await Weights("policy", rank=0, world_size=1).publish(models.weights(kind), version=version)
