"""How large the cache for keys and values is where nobody said it: a choice made of plain numbers, before anything is
allocated. `forge.generator.native.runner` makes it from what a device has, and a plan from what it would have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CPU_SHARE: Final = 0.25
"""Of a machine's free memory: others compute there too."""

FREE_SHARE: Final = 0.8
"""Of a GPU's free memory: activations, recorded steps and the sampler's buffers need the rest."""

ROOM_TO_KEEP: Final = 4
"""With a GPU to itself an engine takes so many times what it needs: what was computed for a prompt stays longer."""


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """What a cache is for, in pages.

    Attributes:
        page_bytes: the memory of one page, over all layers.
        least: pages of one sequence of full length, without which nothing can be generated.
        wanted: pages with which max_batch sequences of full length never run short.
    """

    page_bytes: int
    least: int
    wanted: int


def pages_on_cpu(need: CacheNeed, *, free_bytes: int) -> int:
    """What is wanted, at most a quarter of the free memory, and at least what one sequence needs."""
    return max(need.least, min(need.wanted, int(free_bytes * CPU_SHARE) // need.page_bytes))


def pages_on_gpu(need: CacheNeed, *, free_bytes: int, total_bytes: int, share: float | None = None) -> int:
    """The pages of a cache on a GPU; fewer than `need.least` if there is no room.

    Without `share` the engine has the GPU to itself, and takes up to four times what is wanted. With it a trainer uses
    the same GPU, and will need far more than it holds now: its optimizer's states and activations come with its first
    step. The cache then has what is wanted and no more, and at most that part of *all* the GPU's memory, so that the
    choice does not depend on how far the trainer has come.
    """
    room = int(free_bytes * FREE_SHARE)
    if share is None:
        return min(need.wanted * ROOM_TO_KEEP, room // need.page_bytes)
    return min(need.wanted, min(room, int(total_bytes * share)) // need.page_bytes)
