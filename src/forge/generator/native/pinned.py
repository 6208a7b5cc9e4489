"""Pinned versions in the native engine: fetched once, and served beside the live weights."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forge.config.generator import Verify
from forge.errors import StoreKeyError

if TYPE_CHECKING:
    from torch import Tensor

    from forge.store import Fetched, VersionInfo


@dataclass(frozen=True, slots=True, eq=False)
class PinnedWeights:
    """The weights of a pinned version, where the store has them: on the same host views of its shared memory.

    Attributes:
        version: its number.
        digest: of the whole version.
        tensors: by name.
        root: the mark of the empty prefix in the cache, so that no other version's keys and values are found.
    """

    version: int
    digest: str
    tensors: Mapping[str, Tensor]
    root: int

    @property
    def key(self) -> tuple[int, str]:
        """What it is known by: a number may be pinned again for other weights, and the same weights have two numbers
        where a step changed nothing."""
        return self.version, self.digest


@dataclass(slots=True, eq=False)
class _Held:
    weights: PinnedWeights
    fetched: Fetched
    num_open: int = 0
    is_unloaded: bool = False


@dataclass(slots=True, eq=False)
class FetchedVersions:
    """The pinned versions that an engine has fetched: those with requests in progress, and the last ones used.

    They lie in the store's shared memory, so that having fetched them costs no memory on the same host.

    Args:
        name: of the live weights.
        verify: how what is fetched is checked.
        most: how many are kept without requests.
        check: raises for weights of another model.
        drop: called before weights are let go, which must not be used afterwards.
    """

    name: str
    verify: Verify
    most: int
    check: Callable[[Mapping[str, Tensor]], None]
    drop: Callable[[PinnedWeights], Awaitable[None]]
    _held: OrderedDict[tuple[int, str], _Held] = field(default_factory=OrderedDict)
    _roots: dict[str, int] = field(default_factory=dict)
    _next_root: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def opened(self, version: int) -> AsyncIterator[PinnedWeights]:
        """Fetch a version if need be, and keep it while the block runs. `StoreKeyError` if it is not pinned."""
        async with self._changing:
            held = await self._find(version)
            held.num_open += 1
        try:
            yield held.weights
        finally:
            held.num_open -= 1
            await self._trim()

    async def _find(self, version: int) -> _Held:
        info = await self._pinned(version)
        if info is None:
            raise await self._not_pinned(version)
        held = self._held.get((version, info.digest)) or await self._fetch(version)
        self._held.move_to_end(held.weights.key)
        held.is_unloaded = False
        return held

    async def _pinned(self, version: int) -> VersionInfo | None:
        from forge.store import Weights
        from forge.store.records import pinned_name

        found = await Weights(pinned_name(self.name, version)).versions()
        return next((info for info in found if info.number == version), None)

    async def _fetch(self, version: int) -> _Held:
        from forge.store import Weights
        from forge.store.records import pinned_name

        fetched = await Weights(pinned_name(self.name, version), verify=self.verify).fetch(version=version)
        try:
            self.check(fetched.tensors)
        except BaseException:
            fetched.release()
            raise
        root = self._roots.setdefault(fetched.digest, next(self._next_root))
        held = _Held(PinnedWeights(version, fetched.digest, fetched.tensors, root), fetched)
        self._held[held.weights.key] = held
        return held

    async def _not_pinned(self, version: int) -> StoreKeyError:
        from forge.store import Weights

        pinned = [info.number for info in await Weights(self.name).pinned()]
        return StoreKeyError(
            f"version {version} of {self.name!r} is not pinned",
            path="generate(version=)",
            value=version,
            rule=f"one of the pinned versions: {pinned}" if pinned else "a pinned version; none is pinned",
            repair="pin it while it is published: `await PinnedVersions(name).add(version)`; or leave version out for "
            "the live weights",
        )

    async def _trim(self) -> None:
        """Let go of versions that were unloaded, and of those that were used least recently, beyond `most`."""
        async with self._changing:
            idle = [held for held in self._held.values() if not held.num_open]
            for held in [each for each in idle if each.is_unloaded]:
                idle.remove(held)
                await self._release(held)
            for held in idle[: max(0, len(idle) - self.most)]:
                await self._release(held)

    async def unload(self, version: int) -> None:
        """Let go of a version: now, or with the last of the requests that need it."""
        async with self._changing:
            for held in [each for each in self._held.values() if each.weights.version == version]:
                held.is_unloaded = True
                if not held.num_open:
                    await self._release(held)

    async def _release(self, held: _Held) -> None:
        del self._held[held.weights.key]
        await self.drop(held.weights)
        held.fetched.release()

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that are fetched now."""
        return tuple(sorted(held.weights.version for held in tuple(self._held.values())))
