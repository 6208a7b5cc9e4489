"""One engine for the tests of a file, on one event loop: starting one takes as long as all tests that share it.

The fixtures have the scope of a file. pytest-xdist runs whole files in an order of its own, so that tests of other
folders may run between two files of this one. They end the runtime of the process, with the store and the rendezvous
server that the engine's workers fetch weights from.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psutil
import pytest

import forge

LIMIT_S = 600
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}  # one more than are loaded: see the guide


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed: scripts/install.sh --dev --vllm adds it"
        for item in items:
            if "vllm_engine" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def on_loop() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """Run coroutines, all on the same loop, in a runtime that no other file uses."""
    with asyncio.Runner() as runner:
        runner.run(forge.shutdown())  # what an earlier file left

        async def limited(work: Awaitable[Any]) -> Any:
            async with asyncio.timeout(LIMIT_S):
                return await work

        yield lambda work: runner.run(limited(work))
        runner.run(forge.shutdown())


@pytest.fixture(scope="module")
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
