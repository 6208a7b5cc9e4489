"""One engine for most tests, on one event loop: starting one takes as long as all tests that share it."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psutil
import pytest

import forge

LIMIT_S = 600
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "vllm_engine" in item.path.parts)  # the engine they share lives to the end of the run
    if importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed: scripts/install.sh --dev --vllm adds it"
        for item in items:
            if "vllm_engine" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="package")
def on_loop() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """Runs coroutines, all on the same loop."""
    with asyncio.Runner() as runner:

        async def limited(work: Awaitable[Any]) -> Any:
            async with asyncio.timeout(LIMIT_S):
                return await work

        yield lambda work: runner.run(limited(work))
        runner.run(forge.shutdown())


@pytest.fixture(scope="package")
def engine(on_loop: Callable[[Awaitable[Any]], Any]) -> Iterator[Any]:
    """The shared engine. It has the tiny model's own weights until a test updates them."""
    from generator_bench import make_engine
    from vllm_kit import config

    made = make_engine(config(engine_args=LORA))
    on_loop(made.start())
    pids = made.stats().more["pids"]
    yield made
    on_loop(made.close())
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
