"""A tiny model behind the OpenAI-compatible endpoint, with its engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import forge
from forge.config import ModelConfig, PolicyConfig, ServeConfig, load
from forge.generator.actor import start_policy
from forge.generator.openai import OpenAIServer, serve_openai
from forge.models.locate import resolve
from forge.models.tokenizer import ChatTokenizer
from local_services import services_here

LIMIT_S = 600


def tiny() -> Path:
    """The folder of the tiny model."""
    folder = resolve(ModelConfig(preset="tiny")).folder
    assert folder is not None
    return folder


def with_tiny_served(body: Callable[[OpenAIServer], Awaitable[None]], *overrides: str) -> None:
    """Run `body` while the tiny model is served."""

    async def run() -> None:
        config = load(PolicyConfig, overrides=["model.preset=tiny", *overrides])
        async with asyncio.timeout(LIMIT_S), forge.run():
            service = await start_policy(config)
            try:
                tokenizer = ChatTokenizer.load(tiny())
                async with serve_openai(service, ServeConfig(port=0), tokenizer=tokenizer) as server:
                    await body(server)
            finally:
                await service.shutdown()

    with services_here():
        asyncio.run(run())
