"""What every test may use. Actors that tests spawn are in `actors.py`, which the spawned processes import."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import forge
from forge.runtime.forking import SCOPE
from leftovers import lasting_children, lasting_orphans, running_children, shared_memory_files

pytest_plugins = ["bounded_tests"]

os.environ[SCOPE] = f"{uuid.uuid4().hex}:{os.getpid()}"  # tests share what ranks import

LIMIT_S = 600
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
    before, children = shared_memory_files(), running_children()
    yield
    assert lasting_children(children) == []
    assert lasting_orphans(before) == set()


@pytest.fixture
def held_port() -> Iterator[Callable[[], int]]:
    """Choose ports of 127.0.0.1 for servers that start later. While the test runs, the kernel gives them to nobody
    else; a server can listen there if it sets SO_REUSEADDR, as workers do."""
    with contextlib.ExitStack() as held:

        def hold() -> int:
            bound = held.enter_context(socket.socket())
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(("127.0.0.1", 0))
            return int(bound.getsockname()[1])

        yield hold


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread of this process."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
