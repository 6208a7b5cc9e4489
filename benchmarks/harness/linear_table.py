"""The routing table as it was before `SlotIndex`: it looks at every replica for each call and each change.

The peer of `control_plane.py`, and the reference that the table's choices are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forge.service.routing_table import RoutingTable
from forge.service.targets import Entry, Target


class LinearTable(RoutingTable):
    """Chooses with the routers as functions of all replicas that have a free slot."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self._listed: list[Target] = []

    def update(self, entry: Entry, calls: Any = None) -> None:
        super().update(entry, calls)
        known = sorted(self.entries.items())
        self._listed = [self.targets[index] for index, each in known if each.health == "healthy"]

    def _note_slot(self, index: int) -> None:
        """Keep no order."""

    def _check_hope(self) -> None:
        _ = [entry.health for entry in self.entries.values()]
        super()._check_hope()

    def _find(self, session: str | None) -> Target | None:
        candidates = self._candidates(session)
        if not candidates:
            return None
        if len(candidates) > 1 and session in self._pins:
            fewest = min(self._num_pinned[target.index] for target in candidates)
            candidates = [target for target in candidates if self._num_pinned[target.index] == fewest]
        return candidates[0] if len(candidates) == 1 else self.targets[self._router(candidates)]

    def _candidates(self, session: str | None) -> Sequence[Target]:
        live = [target for target in self._listed if target.calls.failure is None]
        if self._held_back:
            live = [target for target in live if target.index not in self._held_back] or live
        if session is not None:
            pinned = self._pins.get(session)
            if pinned in self._draining and self.entries[pinned].keeps_sessions:
                leaving = self.targets[pinned]
                live = [leaving] if leaving.calls.failure is None else live
            live = [target for target in live if target.index == pinned] or live
        if self._limit is None:
            return live
        return [target for target in live if target.in_flight < self._limit]
