"""The tokens of an episode: a tree of turns.

A turn holds the tokens appended since its parent's last token (`context_ids`: what the policy read) and the tokens
sampled after them. Concatenated from the root, they are exactly what the engine received and sampled. A turn whose
history extends another turn's is its child; a history that changed starts at a new root.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from forge.types import Turn

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One root-to-leaf path, as a trainer reads it.

    Attributes:
        turns: the turns of the path, from the root.
        counted: for each turn, whether its sampled tokens count in this row. A turn that several rows share counts in
            the first of them only.
    """

    turns: tuple[Turn, ...]
    counted: tuple[bool, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the engine received and sampled, in order."""
        parts = ((turn.context_ids, turn.token_ids) for turn in self.turns)
        return tuple(chain.from_iterable(chain.from_iterable(parts)))

    def sampled_spans(self) -> Iterator[tuple[int, int, Turn, bool]]:
        """Yield (start, end, turn, whether it counts) for the sampled tokens of each turn."""
        start = 0
        for turn, is_counted in zip(self.turns, self.counted, strict=True):
            start += len(turn.context_ids)
            yield start, start + len(turn), turn, is_counted
            start += len(turn)

    def __len__(self) -> int:
        return sum(len(turn.context_ids) + len(turn) for turn in self.turns)


def path_to(turns: Sequence[Turn], index: int | None) -> list[Turn]:
    """Return the turns from the root to turn `index`, both included."""
    found: list[Turn] = []
    while index is not None:
        found.append(turns[index])
        index = turns[index].parent
    return found[::-1]


def rows_of(turns: Sequence[Turn]) -> list[Row]:
    """Return one row per leaf, in the order of the leaves. Every token of a turn that counts does so exactly once.

    Turns of which nothing counts are in a row only where a turn that counts extends them.
    """
    learned = [turn for turn in turns if turn.counts]
    extended = {before.index for turn in learned for before in path_to(turns, turn.parent)}
    counted: set[int] = set()
    rows = []
    for leaf in (turn for turn in learned if turn.index not in extended):
        path = path_to(turns, leaf.index)
        counts = tuple(turn.counts and turn.index not in counted for turn in path)
        counted.update(turn.index for turn, counts_here in zip(path, counts, strict=True) if counts_here)
        rows.append(Row(tuple(path), counts))
    return rows
