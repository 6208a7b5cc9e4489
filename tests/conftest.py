"""What every test may use. Actors that tests spawn are in `actors.py`, which the spawned processes import."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import psutil
import pytest

import forge

LIMIT_S = 120
"""No test may hang: what it awaits ends within this time or the test fails."""


@pytest.fixture
def drive() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine inside `forge.run()`."""

    def run(body: Coroutine[Any, Any, Any]) -> Any:
        async def inside() -> Any:
            async with asyncio.timeout(LIMIT_S), forge.run():
                return await body

        return asyncio.run(inside())

    return run


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fail if the test leaves a child process or a shared-memory file behind."""
    before = set(os.listdir("/dev/shm"))
    yield
    children = [child for child in psutil.Process().children(recursive=True) if is_running(child)]
    assert [child.cmdline() for child in children] == []
    assert set(os.listdir("/dev/shm")) - before == set()


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
