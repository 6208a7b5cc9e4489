"""Services whose replicas are objects in this process.

A run of `run_grpo` under `services_here()` makes the real trainer, generators, rewards and reference model from the
same configuration, and its weights go through the store; but a run takes one CPU second instead of twelve, because no
rank process imports torch. For tests of what a run computes, records and raises, not of processes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import forge
from forge.loops import restarting, supervised
from forge.loops.evals import running
from forge.loops.replay import steps
from forge.service.actor import ServiceSpawner


class LocalService:
    """A service of replicas in this process: endpoints are called in turns, as plain methods."""

    def __init__(self, replicas: list[Any], make: Callable[[], Awaitable[Any]] | None = None) -> None:
        self._replicas, self._turns = replicas, itertools.cycle(replicas)
        self._make, self._left = make, list[Any]()
        self._is_closed = False

    def __getattr__(self, name: str) -> Any:
        return self._endpoint(name, is_partial=False)

    def _endpoint(self, name: str, *, is_partial: bool) -> SimpleNamespace:
        async def route(*args: Any, **kwargs: Any) -> Any:
            self._is_closed |= name == "close"
            return await getattr(next(self._turns), name)(*args, **kwargs)

        async def fanout(*args: Any, **kwargs: Any) -> list[Any]:
            self._is_closed |= name == "close"
            values = await asyncio.gather(*(getattr(replica, name)(*args, **kwargs) for replica in self._replicas))
            return [SimpleNamespace(ok=True, value=value) for value in values] if is_partial else values

        def options(*, partial: bool = False, session: str | None = None) -> SimpleNamespace:
            return self._endpoint(name, is_partial=partial)

        return SimpleNamespace(route=route, fanout=fanout, options=options)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[str]:
        """Yield a name that changes nothing: no replica holds anything for the calls of a session."""
        yield "session"

    async def resize(self, num_replicas: int) -> None:
        """Add replicas, or close the last ones. What runs on those ends as it would with another replica."""
        while len(self._replicas) < num_replicas:
            self._replicas.append(await self._make())
        self._left += self._replicas[num_replicas:]
        del self._replicas[num_replicas:]
        self._turns = itertools.cycle(list(self._replicas))

    async def shutdown(self) -> None:
        """Close the replicas, unless that was done."""
        for replica in self._left:
            await replica.close()
        if not self._is_closed:
            await self._endpoint("close", is_partial=False).fanout()


@contextmanager
def services_here() -> Iterator[None]:
    """Let the services of `run_grpo` and `forge.evaluate` have replicas here. They are closed where a run ends its
    processes."""
    import torch

    made: list[LocalService] = []

    async def start(cls: type, num_replicas: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalService:
        async def make() -> Any:
            replica = cls(*args, **kwargs)
            if hasattr(replica, "setup"):
                await replica.setup()
            return replica

        made.append(LocalService([await make() for _ in range(num_replicas)], make))
        return made[-1]

    def as_service(spawner: ServiceSpawner[Any], *args: Any, **kwargs: Any) -> Any:
        return start(spawner.cls, spawner.chosen.num_replicas, args, kwargs)

    @asynccontextmanager
    async def run(*args: Any) -> AsyncIterator[None]:
        async with forge.run(*args):
            try:
                yield
            finally:
                for service in reversed(made):
                    await service.shutdown()

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            mock.patch.object(ServiceSpawner, "as_service", as_service),
            mock.patch.object(restarting, "run", run),
            mock.patch.object(supervised, "run", run),
            mock.patch.object(running, "run", run),
            mock.patch.object(steps, "run", run),
        ):
            yield
    finally:
        torch.set_num_threads(num_threads)
