"""The tokens of an episode: a tree of turns.

A turn holds the tokens appended since its parent's last token (`context_ids`: what the policy read) and the tokens
sampled after them. Concatenated from the root, they are exactly what the engine received and sampled. A turn whose
history extends another turn's is its child; a history that changed starts at a new root.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from forge.envs.tool_calls import MalformedCall, ToolCall
from forge.types import FinishReason, Timings, VersionSpan

Message: TypeAlias = Mapping[str, Any]

PrefixBreakKind: TypeAlias = Literal["template", "retokenization", "client_edit", "compaction"]
"""Why a history could not be extended token by token.

- `template`: the chat template renders earlier messages differently once later ones follow.
- `retokenization`: the text continues the history, but its tokens cannot be joined to the sampled ones.
- `client_edit`: a client of the HTTP endpoint sent another history than it was given.
- `compaction`: the program replaced its history.
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion of an episode.

    Attributes:
        index: the turn's position in the episode, in the order in which turns were requested.
        parent: the index of the turn whose tokens this one extends; None for a root.
        previous: the index of the turn before it in its branch, whose tokens it need not extend; None for the first.
        path: the branch that requested it: () for the agent itself, (0,) for its first fork.
        messages: the messages appended before it.
        context_ids: the tokens appended since the parent's last token; the whole prompt of a root.
        token_ids: the sampled tokens, an end token included.
        logprobs: the sampler's logprob of each sampled token.
        full_logprobs: the same before truncation and penalties; None where the engine does not report them.
        text: the sampled tokens as text, without special tokens and without what ended it.
        finish_reason, stop_reason: why the completion ended.
        versions: the weight versions that produced the sampled tokens.
        seed: the seed that it was sampled with.
        prefix_break: why the turn does not extend the branch's previous turn; None where it does, and for first turns.
        calls: the tool calls in it, where the policy was given tools.
        is_delivered: False for a response that never reached its client: it is not trained on.
        num_cached: context tokens, the parent's included, that the engine did not have to compute again.
        timings: how long the engine took.
    """

    index: int
    parent: int | None
    previous: int | None
    path: tuple[int, ...]
    messages: tuple[Message, ...]
    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    full_logprobs: tuple[float, ...] | None
    text: str
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    seed: int
    stop_reason: int | str | None = None
    prefix_break: PrefixBreakKind | None = None
    calls: tuple[ToolCall | MalformedCall, ...] = ()
    is_delivered: bool = True
    num_cached: int = 0
    timings: Timings = field(default_factory=Timings)

    def __len__(self) -> int:
        return len(self.token_ids)


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
        return tuple(token for turn in self.turns for part in (turn.context_ids, turn.token_ids) for token in part)

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
    """Return one row per leaf, in the order of the leaves. Every delivered sampled token counts exactly once.

    Rows in which nothing counts are left out.
    """
    parents = {turn.parent for turn in turns}
    counted: set[int] = set()
    rows = []
    for leaf in (turn for turn in turns if turn.index not in parents):
        path = path_to(turns, leaf.index)
        counts = tuple(turn.is_delivered and len(turn) > 0 and turn.index not in counted for turn in path)
        counted.update(turn.index for turn, counts_here in zip(path, counts, strict=True) if counts_here)
        if any(counts):
            rows.append(Row(tuple(path), counts))
    return rows
