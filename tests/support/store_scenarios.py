"""A scenario of the store in a run of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import forge

LIMIT_S = 600


def alone(body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a scenario, on one thread of torch, in a run that ends with it."""

    async def inside() -> Any:
        import torch

        torch.set_num_threads(1)
        try:
            async with asyncio.timeout(LIMIT_S):
                return await body()
        finally:
            await forge.shutdown()

    return asyncio.run(inside())
