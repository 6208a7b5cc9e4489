"""Search in the texts of rollouts: prompts, messages, completions, tool calls.

There is no index of words: the lines are read again, in small parts, until all are searched or nobody asks any more.

Most lines are passed over by a search of their bytes. Those in which the bytes are found are parsed, because they may
stand in something that is not text of the rollout.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from forge.observe.report.turns import content_text, turns_of
from forge.ui.rollouts.columns import Array
from forge.ui.rollouts.index import RolloutIndex, RolloutRows
from forge.ui.rollouts.lines import Fields, parse_line

UNKNOWN, NO, YES = 0, 1, 2
_BLOCK: Final = 1 << 21
_MOST_ROWS: Final = 20_000
"""Rows that are planned to be read at a time."""


class TextSearch:
    """Searches for one text. May be used by several threads."""

    def __init__(self, index: RolloutIndex, text: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._index, self._clock = index, clock
        self._text = text.lower()
        escaped = json.dumps(self._text, ensure_ascii=False)[1:-1]
        self._forms = tuple(dict.fromkeys((escaped, self._text)))
        """How it may stand in a line: arguments of tool calls are not text in it, and are shown as they stand there."""
        self._lock = threading.Lock()
        self._generation = -1
        self._known = np.zeros(0, np.uint8)

    def known(self, rows: RolloutRows) -> Array:
        """Return for each row whether it has the text: `UNKNOWN`, `NO` or `YES`."""
        with self._lock:
            if rows.generation != self._generation:
                self._generation, self._known = rows.generation, np.zeros(len(rows), np.uint8)
            elif len(rows) > len(self._known):
                room = np.zeros(len(rows) - len(self._known), np.uint8)
                self._known = np.concatenate([self._known, room])
            return self._known[: len(rows)]

    def advance(self, rows: RolloutRows, order: Array, *, seconds: float) -> None:
        """Search rows, in an order, for about so long."""
        end, known = self._clock() + seconds, self.known(rows)
        while self._clock() < end:
            left = order[known[order] == UNKNOWN][:_MOST_ROWS]
            if not len(left):
                return
            for first, last in _runs(rows, np.sort(left)):
                known[first : last + 1] = self._search(rows, first, last)
                if self._clock() >= end:
                    return

    def _search(self, rows: RolloutRows, first: int, last: int) -> Array:
        """Return what is known of rows that follow each other in a file."""
        found = np.full(last - first + 1, NO, np.uint8)
        data = self._index.read_lines(rows, first, last, limit=max(_BLOCK, int(rows.columns["length"][first])))
        starts = rows.columns["offset"][first : last + 1] - rows.columns["offset"][first]
        ends = starts + rows.columns["length"][first : last + 1]
        for number in self._candidates(data, starts, ends):
            fields = parse_line(data[starts[number] : ends[number]])
            if fields is not None and self._text in text_of(fields).lower():
                found[number] = YES
        return found

    def _candidates(self, data: bytes, starts: Array, ends: Array) -> Iterator[int]:
        """Yield the lines whose bytes have the text somewhere."""
        if not self._text.isascii():
            for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
                line = data[start:end].decode("utf-8", "replace").lower()
                if any(form in line for form in self._forms):
                    yield number
            return
        lower = data.lower()
        for form in self._forms:
            at, text = 0, form.encode()
            while (at := lower.find(text, at)) >= 0:
                number = int(np.searchsorted(starts, at, "right")) - 1
                yield number
                at = int(ends[number])


def _runs(rows: RolloutRows, chosen: Array) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of rows that follow each other in one file, at most a block of them, if more than one."""
    files, offsets = rows.columns["file"][chosen], rows.columns["offset"][chosen]
    ends = offsets + rows.columns["length"][chosen]
    follows = (np.diff(chosen) == 1) & (np.diff(files) == 0) & (offsets[1:] == ends[:-1])
    breaks = np.flatnonzero(~follows) + 1
    for start, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(chosen)], strict=True):
        while start < end:
            fits = int(np.searchsorted(ends[start:end], offsets[start] + _BLOCK, "right"))
            stop = start + max(1, fits)
            yield int(chosen[start]), int(chosen[stop - 1])
            start = stop


def text_of(fields: Fields) -> str:
    """Return all text of an episode that a reader sees."""
    prompt, pieces = fields.get("prompt"), fields.get("pieces")
    messages = prompt if isinstance(prompt, list) else []
    texts: list[object] = [fields.get("prompt_id"), prompt, fields.get("answer"), fields["text"]]
    texts += [content_text(each.get("content")) for each in messages if isinstance(each, dict)]
    if isinstance(pieces, list):
        texts.append("".join(piece for piece in pieces if isinstance(piece, str)))
    for turn in turns_of(fields):
        texts += [turn.get("context"), turn.get("text")]
        heard = turn.get("messages")
        for message in heard if isinstance(heard, list) else ():
            if isinstance(message, dict):
                texts += [content_text(message.get("content")), content_text(message.get("tool_calls"))]
        calls = turn.get("calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                texts += [call.get("name"), content_text(call.get("arguments")), call.get("malformed")]
    return "\n".join(text for text in texts if isinstance(text, str))
