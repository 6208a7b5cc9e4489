"""Replicas with a free slot, in the order in which a built-in router takes them.

As functions, the routers look at every replica for each call. What they choose is the replica with the smallest key, so
a heap finds the same one, in time that grows with the logarithm of the number of replicas.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from forge.service.targets import Target

_SLACK: Final = 64
"""Outdated entries that are kept, besides one for each replica, before all are dropped."""


class SlotIndex:
    """A heap whose outdated entries are dropped when they come to the top.

    It is right as long as `note` is called after every change that lets a replica become free or changes its key.

    Args:
        key: what the router compares; never equal for two replicas.
        is_free: whether a call may go to a replica now.
        members: all replicas that may be free.
    """

    def __init__(
        self,
        key: Callable[[Target], tuple[int, ...]],
        is_free: Callable[[Target], bool],
        members: Callable[[], Iterable[Target]],
    ) -> None:
        self._key, self._is_free, self._members = key, is_free, members
        self._serial = itertools.count()
        self._heap: list[tuple[tuple[int, ...], int, Target]] = []
        self._limit = 0
        self._rebuild()

    def __len__(self) -> int:
        return len(self._heap)

    def note(self, target: Target) -> None:
        """Take in a replica whose key may have changed, or that may have become free."""
        if self._is_free(target):
            heapq.heappush(self._heap, (self._key(target), next(self._serial), target))
            if len(self._heap) > self._limit:
                self._rebuild()

    def first(self) -> Target | None:
        """Return the free replica with the smallest key."""
        while self._heap:
            key, _, target = self._heap[0]
            if self._is_free(target) and self._key(target) == key:
                return target
            heapq.heappop(self._heap)
        return None

    def _rebuild(self) -> None:
        members = list(self._members())
        self._heap = [(self._key(each), next(self._serial), each) for each in members if self._is_free(each)]
        heapq.heapify(self._heap)
        self._limit = 3 * len(members) + _SLACK
