"""Groups as plain data and columns of numbers, and back, bit for bit.

What belongs to single tokens lies in columns, one after the other in the order of the groups; all else is a document of
plain values. How long something took is left out.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forge.types import (
    AgentResult,
    Episode,
    Group,
    MalformedCall,
    Score,
    Task,
    ToolCall,
    Turn,
    VersionSpan,
)

Column = NDArray[Any]
_INTEGERS: Final = ("context_ids", "token_ids")
_PER_TURN: Final = ("context_ids", "token_ids", "logprobs")
_PER_EPISODE: Final = ("ref_logprobs", "teacher_logprobs", "token_advantages")
_TURN_FIELDS: Final = (
    *("index", "parent", "previous", "text", "finish_reason", "seed", "stop_reason", "prefix_break", "is_delivered"),
    *("is_trained", "num_cached", "agent", "order"),
)
QUANTITIES: Final = ("token ids", "logprobs", "reward", "reference logprobs", "advantage")
"""What each episode has a digest of."""


@dataclass(slots=True)
class ColumnWriter:
    """Collects values of columns by name."""

    _parts: dict[str, list[Sequence[float]]] = field(default_factory=dict)

    def add(self, name: str, values: Sequence[float]) -> int:
        """Append values to a column, and return how many."""
        self._parts.setdefault(name, []).append(values)
        return len(values)

    def columns(self) -> dict[str, Column]:
        """Return the columns, each of the smallest type that holds its values exactly."""
        return {
            name: smallest(list(itertools.chain.from_iterable(parts)), is_integer=name in _INTEGERS)
            for name, parts in self._parts.items()
        }


@dataclass(slots=True)
class ColumnReader:
    """Takes values of columns in the order in which they were written."""

    columns: Mapping[str, Column]
    _places: dict[str, int] = field(default_factory=dict)

    def take(self, name: str, count: int) -> tuple[Any, ...]:
        """Return the next values of a column."""
        start = self._places.get(name, 0)
        self._places[name] = start + count
        return tuple(self.columns[name][start : start + count].tolist()) if count else ()


def smallest(values: Sequence[float], *, is_integer: bool) -> Column:
    """Return numbers as an array of 4-byte elements where that changes none of them, else of 8 bytes."""
    if is_integer:
        wide = np.array(values, dtype=np.int64)
        narrow: Column = wide.astype(np.int32)
    else:
        wide = np.array(values, dtype=np.float64)
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float32)
    is_same = np.array_equal(narrow.astype(wide.dtype), wide, equal_nan=not is_integer)
    return narrow if is_same else wide


def encode_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], dict[str, Column]]:
    """Return groups as a document and columns."""
    writer = ColumnWriter()
    return [_group(group, writer) for group in groups], writer.columns()


def decode_groups(documents: Sequence[Mapping[str, Any]], columns: Mapping[str, Column]) -> list[Group]:
    """Return the groups that `encode_groups` was given."""
    reader = ColumnReader(columns)
    return [_read_group(document, reader) for document in documents]


def episode_digests(episode: Episode) -> tuple[str, ...]:
    """Return a digest of each of `QUANTITIES` of an episode."""
    ids = [each for turn in episode.turns for part in (turn.context_ids, turn.token_ids) for each in part]
    sampled = [each for turn in episode.turns for each in turn.logprobs]
    full = [each for turn in episode.turns for each in turn.full_logprobs or ()]
    rewards = [episode.score.reward, *episode.turn_rewards.values()]
    rewards += [0.0 if result.score is None else result.score.reward for result in episode.agents.values()]
    references = [*(episode.ref_logprobs or ()), *(episode.teacher_logprobs or ())]
    advantages = [episode.advantage, *(episode.token_advantages or ())]
    advantages += [result.advantage for result in episode.agents.values()]
    floats = (_digest([*sampled, *full], np.float64), *(_digest(each, np.float64) for each in (rewards, references)))
    return (_digest(ids, np.int64), *floats, _digest(advantages, np.float64))


def _digest(values: Sequence[float], kind: Any) -> str:
    return hashlib.blake2b(np.array(values, dtype=kind).tobytes(), digest_size=8).hexdigest()


# ---- Writing --------------------------------------------------------------------------------------------------------


def _group(group: Group, writer: ColumnWriter) -> dict[str, Any]:
    task = group.task
    return {
        "number": group.number,
        "epoch": group.epoch,
        "task": {
            "id": task.id,
            "messages": [dict(message) for message in task.messages],
            "text": task.text,
            "answer": task.answer,
            "metadata": dict(task.metadata),
        },
        "episodes": [_episode(episode, writer) for episode in group.episodes],
        **({} if group.temperature is None else {"temperature": group.temperature}),
    }


def _episode(episode: Episode, writer: ColumnWriter) -> dict[str, Any]:
    document: dict[str, Any] = {
        "member": episode.member,
        "score": _score(episode.score),
        "advantage": episode.advantage,
        "outcome": episode.outcome,
        "turns": [_turn(turn, writer, task=episode.task) for turn in episode.turns],
        "digests": episode_digests(episode),
    }
    for name in _PER_EPISODE:
        if (values := getattr(episode, name)) is not None:
            document[name] = writer.add(name, values)
    for name in ("turn_rewards", "stats"):
        if values := getattr(episode, name):
            document[name] = list(values.items())
    if episode.agents:
        document["agents"] = [
            [name, result.score and _score(result.score), result.learns, result.policy, result.advantage]
            for name, result in episode.agents.items()
        ]
    return document


def _score(score: Score) -> list[Any]:
    return [score.reward, dict(score.parts), dict(score.failures), score.unshaped]


def _turn(turn: Turn, writer: ColumnWriter, *, task: Task) -> dict[str, Any]:
    default = _DEFAULT_TURN
    document: dict[str, Any] = {
        name: getattr(turn, name) for name in _TURN_FIELDS if getattr(turn, name) != getattr(default, name)
    }
    for name in _PER_TURN:
        document[name] = writer.add(name, getattr(turn, name))
    if turn.full_logprobs is not None and turn.full_logprobs != turn.logprobs:
        document["full_logprobs"] = writer.add("full_logprobs", turn.full_logprobs)
    elif turn.full_logprobs is not None:
        document["full_logprobs"] = "same"
    if turn.path:
        document["path"] = turn.path
    if turn.messages and tuple(turn.messages) != tuple(task.messages):
        document["messages"] = [dict(message) for message in turn.messages]
    elif turn.messages:
        document["messages"] = "task"
    if turn.calls:
        document["calls"] = [_call(call) for call in turn.calls]
    document["versions"] = [(span.version, span.start, span.end) for span in turn.versions]
    return document


def _call(call: ToolCall | MalformedCall) -> list[Any]:
    if isinstance(call, ToolCall):
        return ["call", call.id, call.name, dict(call.arguments)]
    return ["malformed", call.id, call.text, call.reason]


_DEFAULT_TURN: Final = Turn(
    0, None, None, (), (), (), (), (), None, "", "stop", ()
)  # fields that are as here are not written


# ---- Reading --------------------------------------------------------------------------------------------------------


def _read_group(document: Mapping[str, Any], reader: ColumnReader) -> Group:
    given = document["task"]
    task = Task(given["id"], tuple(given["messages"]), given["text"], given["answer"], given["metadata"])
    episodes = tuple(_read_episode(each, reader, task=task) for each in document["episodes"])
    return Group(int(document["number"]), int(document["epoch"]), episodes, document.get("temperature"))


def _read_episode(document: Mapping[str, Any], reader: ColumnReader, *, task: Task) -> Episode:
    turns = tuple(_read_turn(each, reader, task=task) for each in document["turns"])
    values: dict[str, Any] = {name: reader.take(name, document[name]) for name in _PER_EPISODE if name in document}
    return Episode(
        task=task,
        turns=turns,
        score=_read_score(document["score"]),
        member=document["member"],
        advantage=document["advantage"],
        outcome=document["outcome"],
        turn_rewards={int(index): value for index, value in document.get("turn_rewards", ())},
        stats=dict(document.get("stats", ())),
        agents={
            name: AgentResult(None if score is None else _read_score(score), learns, policy, advantage)
            for name, score, learns, policy, advantage in document.get("agents", ())
        },
        **values,
    )


def _read_score(values: Sequence[Any]) -> Score:
    return Score(*values)


def _read_turn(document: Mapping[str, Any], reader: ColumnReader, *, task: Task) -> Turn:
    taken: dict[str, Any] = {name: reader.take(name, document[name]) for name in _PER_TURN}
    full = document.get("full_logprobs")
    if full is not None:
        full = taken["logprobs"] if full == "same" else reader.take("full_logprobs", full)
    messages = document.get("messages", ())
    fields = {name: document.get(name, getattr(_DEFAULT_TURN, name)) for name in _TURN_FIELDS}
    return Turn(
        **fields,
        **taken,
        full_logprobs=full,
        path=tuple(document.get("path", ())),
        messages=task.messages if messages == "task" else tuple(messages),
        calls=tuple(map(_read_call, document.get("calls", ()))),
        versions=tuple(VersionSpan(*span) for span in document["versions"]),
    )


def _read_call(values: Sequence[Any]) -> ToolCall | MalformedCall:
    kind, *fields = values
    return ToolCall(*fields) if kind == "call" else MalformedCall(*fields)


class Altered(NamedTuple):
    """A quantity of an episode that does not have the digest that it was written with."""

    group: int
    member: int
    quantity: str
    written: str
    found: str


def altered_quantities(groups: Iterable[Group], documents: Iterable[Mapping[str, Any]]) -> list[Altered]:
    """Return what of which episode does not have the digest that it was written with."""
    found = []
    for group, document in zip(groups, documents, strict=True):
        for episode, written in zip(group.episodes, document["episodes"], strict=True):
            rows = zip(QUANTITIES, written["digests"], episode_digests(episode), strict=True)
            found += [Altered(group.number, episode.member, *row) for row in rows if row[1] != row[2]]
    return found
