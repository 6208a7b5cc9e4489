"""The order in which versions of the weights compute, where requests ask for several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from forge.generator.native.pinned import PinnedWeights
from forge.generator.native.schedule import Scheduler

ROUND_STEPS: Final = 16
"""Steps that one version computes before the others have their round."""


class VersionOrder:
    """Says which weights the next step computes with: the live ones (None) or those of a pinned version.

    A step computes sequences of one version. Versions with sequences have rounds of at most `ROUND_STEPS` steps, the
    one whose last round is longest ago first: with V versions none waits for more than (V - 1) rounds of others.
    Urgent sequences are of the live weights, which are then next.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.current: PinnedWeights | None = None
        self._num_left = ROUND_STEPS
        self._last: dict[PinnedWeights | None, int] = {}
        self._num_steps = 0
        self.is_mixed = False
        """Whether there may be sequences of pinned versions; set it when one comes."""

    @property
    def continues(self) -> bool:
        """Whether the step after the current one may be of the same version."""
        return not self.is_mixed or self._num_left > 0

    def candidates(self) -> Sequence[PinnedWeights | None]:
        """Return the versions that have sequences: first the one that should compute, then those that may instead."""
        if not self.is_mixed:
            return (None,)
        scheduler = self._scheduler
        present = dict.fromkeys(each.weights for each in (*scheduler.running, *scheduler.waiting))
        if not present.keys() - {None}:
            self.is_mixed, self._last = False, {}
            return (None,)
        self._last = {weights: step for weights, step in self._last.items() if weights in present}
        order = sorted(present, key=lambda weights: self._last.get(weights, -1))
        if self.current in present and self._num_left > 0:
            order = [self.current, *(weights for weights in order if weights is not self.current)]
        return [None, *(each for each in order if each is not None)] if scheduler.urgent else order

    def computes(self, weights: PinnedWeights | None) -> None:
        """Note that a step of this version is computed."""
        if weights is not self.current or self._num_left <= 0:
            self.current, self._num_left = weights, ROUND_STEPS
        self._num_left -= 1
        self._num_steps += 1
        self._last[weights] = self._num_steps
