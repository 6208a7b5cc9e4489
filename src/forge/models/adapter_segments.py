"""Which rows of a generation step belong to which LoRA adapter, where a step computes several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LIVE: Final = 0
"""The number of what a model computes by itself: with its own adapter where it has one."""
BASE: Final = -1
"""The number of the weights without any adapter."""


@dataclass(frozen=True, slots=True)
class AdapterSegment:
    """The rows [start, end) of a step, which one adapter computes: a loaded one, `LIVE` or `BASE`."""

    adapter: int
    start: int
    end: int


@dataclass(slots=True, eq=False)
class StepSegments:
    """The segments of the step that a model computes now; its layers share this object.

    Attributes:
        current: all rows of the step, in order. Empty for a step that is `LIVE` as a whole.
        revision: counts how often an adapter was attached or detached.
    """

    current: tuple[AdapterSegment, ...] = ()
    revision: int = 0
