"""What the index keeps of one line of rollouts. Lines may be damaged, or written by others: nothing is trusted."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pydantic_core import from_json

from forge.observe.report.samples import is_episode
from forge.observe.report.turns import turns_of

Fields = dict[str, Any]

MAX_LINE: Final = 16 << 20
"""Bytes of the longest line that is read."""
NO_VERSION: Final = -(1 << 31)
_LARGEST: Final = (1 << 31) - 1
_MAX_NAME: Final = 200
_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")

CUT, FAILED, MIXED, LIMIT, TOOL_ERROR, BREAK, FORKED, LOST = (1 << place for place in range(8))
FLAGS: Final[Mapping[str, int]] = {
    "cut": CUT,
    "failed": FAILED,
    "mixed": MIXED,
    "limit": LIMIT,
    "tools": TOOL_ERROR,
    "broken": BREAK,
    "forked": FORKED,
    "lost": LOST,
}
"""By the name in an address: cut off by length; a reward failed; sampled by several versions; ended by a limit or
truncated; a tool call failed; a prefix break; several branches; an answer was not delivered."""

COLUMNS: Final[Mapping[str, type[np.generic]]] = {
    "group": np.int64,
    "index": np.int32,
    "prompt": np.uint64,
    "reward": np.float64,
    "advantage": np.float32,
    "gap": np.float32,
    "tokens": np.int32,
    "turns": np.int32,
    "oldest": np.int32,
    "newest": np.int32,
    "flags": np.uint32,
    "tools": np.uint32,
    "ending": np.uint8,
    "outcome": np.uint8,
    "counted": np.int32,
    "masked": np.int32,
    "parts": np.uint8,
    "masked_parts": np.uint8,
}
"""What is kept of a line. `prompt` is a digest of the prompt's name; `gap` the largest difference between the logprobs
of trainer and sampler; `oldest` and `newest` the versions that sampled it; `tools`, `ending` and `outcome` numbers of
words; `counted` the tokens that are trained on, and `masked` those of them in parts that were cut off; `parts` the
sequences of the loss, and `masked_parts` those that were cut off."""

Facts = tuple[Any, ...]
"""One value for each of `COLUMNS`."""


class Words:
    """Numbers of words, from 0 on, of which there are at most `limit`: the last stands for all others."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._numbers: dict[str, int] = {}

    def number(self, word: str) -> int:
        """Return the number of a word."""
        found = self._numbers.get(word)
        if found is None:
            if len(self._numbers) >= self._limit - 1:
                return self._limit - 1
            found = self._numbers[word] = len(self._numbers)
        return found

    def find(self, word: str) -> int | None:
        """Return the number of a word that was met; None for another."""
        return self._limit - 1 if word == OTHERS else self._numbers.get(word)

    def all(self) -> list[str]:
        """Return the words in the order of their numbers."""
        words = list(self._numbers)
        return [*words, OTHERS] if len(words) == self._limit - 1 else words


OTHERS: Final = "(others)"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words of all lines of a run."""

    outcomes: Words
    endings: Words
    tools: Words

    @classmethod
    def empty(cls) -> Vocabulary:
        """Return one without words."""
        return cls(Words(32), Words(64), Words(32))


@dataclass(frozen=True, slots=True)
class LossPart:
    """The tokens of an episode that are one sequence of the loss: all of them, or those of one agent.

    Attributes:
        agent: whose they are; empty where agents have no names.
        spans: (first, end) of the tokens that are trained on.
        is_truncated: whether it was cut off.
    """

    agent: str
    spans: tuple[tuple[int, int], ...]
    is_truncated: bool

    @property
    def num_tokens(self) -> int:
        """How many tokens are trained on, unless cut-off sequences are left out."""
        return sum(end - start for start, end in self.spans)

    def places(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return where its tokens are among those of the line."""
        return np.concatenate([np.arange(start, end) for start, end in self.spans])


def parse_line(line: bytes) -> Fields | None:
    """Return the fields of an episode's line; None for a line that is not one."""
    try:
        fields = from_json(line)
    except ValueError:
        fields = _parse_slowly(line)
    return fields if isinstance(fields, dict) and is_episode(fields) else None


def parse_start(data: bytes) -> Fields:
    """Return the fields that the beginning of a line has in full, and of a text what there is."""
    try:
        fields = from_json(data, allow_partial="trailing-strings")
    except ValueError:
        fields = _parse_start_slowly(data)
    return fields if isinstance(fields, dict) else {}


def _parse_start_slowly(data: bytes) -> object:
    """Parse what has half a character in it, with another character in its place."""
    try:
        return from_json(_HALF.sub(rb"\\ufffd", data), allow_partial="trailing-strings")
    except ValueError:
        return None


def _parse_slowly(line: bytes) -> object:
    """Parse what the fast parser refuses: escapes of half a character, which text of a tokenizer may have.

    It must accept the line without them: it bounds how deep values are nested.
    """
    try:
        from_json(_HALF.sub(rb"\\ufffd", line))
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def facts_of(fields: Fields, words: Vocabulary) -> Facts | None:
    """Return what is kept of an episode; None where a number is out of range."""
    group, index = fields["group"], fields["index"]
    num_tokens = len(fields["token_ids"])
    if not (0 <= group < 1 << 62 and 0 <= index <= _LARGEST and num_tokens <= _LARGEST):
        return None
    turns = turns_of(fields)
    parts = loss_parts(fields, turns)
    masked = [part for part in parts if part.is_truncated]
    versions = [span[0] for span in _spans(fields.get("versions"))]
    ending = str(fields.get("ending") or fields.get("finish_reason") or "")
    return (
        group,
        index,
        prompt_digest(str(fields.get("prompt_id", ""))),
        _number(fields.get("reward")),
        _number(fields.get("advantage")),
        _gap(fields, parts),
        num_tokens,
        len(turns) or 1,
        min(versions, default=NO_VERSION),
        max(versions, default=NO_VERSION),
        _flags(fields, turns, num_versions=len(set(versions))),
        _tools(turns, words.tools),
        words.endings.number(ending[:_MAX_NAME]),
        words.outcomes.number(str(fields.get("outcome", "trained"))[:_MAX_NAME]),
        sum(part.num_tokens for part in parts),
        sum(part.num_tokens for part in masked),
        min(len(parts), 255),
        min(len(masked), 255),
    )


def loss_parts(fields: Fields, turns: Sequence[Fields]) -> list[LossPart]:
    """Return the sequences of the loss that an episode gives. `turns` are those of the line, in order."""
    num_tokens = len(fields["token_ids"])
    if not turns:
        return [LossPart("", ((0, num_tokens),), fields.get("finish_reason") == "length")] if num_tokens else []
    agents = fields.get("agents")
    named = [(str(name), each) for name, each in agents.items()] if isinstance(agents, dict) else []
    learners = [name for name, each in named if isinstance(each, dict) and each.get("learns") is not False]
    found = []
    for agent in learners if named else [None]:
        own = [turn for turn in turns if agent is None or turn.get("agent") == agent]
        spans = [(turn["start"], turn["end"]) for turn in own if is_trained(turn)]
        if spans:
            found.append(LossPart(agent or "", tuple(spans), _is_truncated(fields, own)))
    return found


def is_trained(turn: Mapping[str, Any]) -> bool:
    """Whether the tokens of a turn are trained on, if its episode is."""
    left_out = turn.get("is_delivered") is False or turn.get("is_trained") is False
    return not left_out and bool(turn["end"] > turn["start"])


def prompt_digest(name: str) -> int:
    """Return a number for the name of a prompt."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def numbers_of(values: object, count: int) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Return a list of `count` numbers as an array, with NaN for null; None for anything else."""
    if not isinstance(values, list) or len(values) != count:
        return None
    try:
        found = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found.shape == (count,) else None


def _is_truncated(fields: Fields, turns: Sequence[Fields]) -> bool:
    last = next((turn for turn in reversed(turns) if turn.get("is_delivered") is not False), {})
    return fields.get("ending", "finished") != "finished" or last.get("finish_reason") == "length"


def _flags(fields: Fields, turns: Sequence[Fields], *, num_versions: int) -> int:
    stats = fields.get("stats")
    num_errors = stats.get("num_tool_errors") if isinstance(stats, dict) else 0
    found = {
        CUT: fields.get("finish_reason") == "length",
        FAILED: bool(fields.get("failures")),
        MIXED: num_versions > 1,
        LIMIT: bool(turns) and fields.get("ending") != "finished",
        TOOL_ERROR: isinstance(num_errors, int | float) and num_errors > 0,
        BREAK: any(turn.get("prefix_break") is not None for turn in turns),
        FORKED: len({str(turn.get("path")) for turn in turns}) > 1,
        LOST: any(turn.get("is_delivered") is False for turn in turns),
    }
    return sum(bit for bit, is_set in found.items() if is_set)


def _tools(turns: Sequence[Fields], words: Words) -> int:
    found = 0
    for turn in turns:
        calls = turn.get("calls")
        for call in calls if isinstance(calls, list) else ():
            name = call.get("name") if isinstance(call, dict) else None
            if isinstance(name, str):
                found |= 1 << words.number(name[:_MAX_NAME])
    return found


def _gap(fields: Fields, parts: Sequence[LossPart]) -> float:
    count = len(fields["token_ids"])
    sampler, trainer = (numbers_of(fields.get(name), count) for name in ("logprobs", "trainer_logprobs"))
    if sampler is None or trainer is None or not parts:
        return math.nan
    gaps = np.abs(trainer - sampler)
    if sum(part.num_tokens for part in parts) < count:
        gaps = gaps[np.concatenate([part.places() for part in parts])]
    known = gaps[~np.isnan(gaps)]
    return float(known.max()) if len(known) else math.nan


def _spans(value: object) -> list[list[int]]:
    spans = value if isinstance(value, list) else ()
    return [
        span for span in spans if isinstance(span, list) and span and type(span[0]) is int and abs(span[0]) <= _LARGEST
    ]


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number else math.nan  # type: ignore[arg-type]
