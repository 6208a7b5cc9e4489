"""Which branch of an episode a request continues.

Clients of the chat protocol send the whole conversation every time. A request whose messages start with a conversation
that the client was given (its own messages and the answers as they were delivered) continues it, with the tokens that
were sampled. Where several do, the longest wins. Everything else starts a new root.

Conversations are compared by digests of their messages, so an index stays small however long they are.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from forge.envs.chat_api.requests import message_key
from forge.envs.history import History
from forge.envs.trace import Message
from forge.types import Turn

_ANSWER_FIELDS: Final = ("role", "content", "name")
"""What identifies an answer without calls. Clients send back whatever else they were given, or leave it out."""


@dataclass(slots=True)
class AnswerNode:
    """An answer that a client was given: the end of a conversation that later requests may continue.

    Attributes:
        turn: the index of its turn.
        session: the session that the turn was sampled in.
        template: a digest of the chat template's arguments.
        is_continued: whether a request continued it.
    """

    turn: int
    session: str
    template: str
    raw: Message
    is_continued: bool = False
    _history: History = field(default_factory=History)
    _child: AnswerNode | None = None
    _length: int = 0

    @property
    def history(self) -> History:
        """The branch up to this answer."""
        last = self
        while last._child is not None:
            last = last._child
        return (
            self._history if last is self else replace(self._history, text=(last._history.text or "")[: self._length])
        )

    def release_text(self, child: AnswerNode) -> None:
        """Drop the text, which is the start of the text of a longer branch. Memory stays linear in a conversation."""
        if self._child is None:
            self._length = len(self._history.text or "")
            self._history, self._child = replace(self._history, text=""), child


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """Where a request continues.

    Attributes:
        node: the answer that it continues; None for a root.
        edited: the answer whose conversation the client changed; None where it changed none.
        messages: what to append to the history, with answers of this episode as they were sampled.
        key: (digest, occurrence): the request's identity, from which its seed derives. It depends on what is asked and
            on how often the same was asked before, never on the order of different requests.
        template: a digest of the chat template's arguments.
        session: the session to sample in.
        chain: a digest of all messages.
    """

    node: AnswerNode | None
    edited: AnswerNode | None
    messages: tuple[Message, ...]
    key: tuple[int, int]
    template: str
    session: str
    chain: str

    @property
    def history(self) -> History:
        """The history to extend."""
        if self.node is not None:
            return self.node.history
        return History(text="", edit="client_edit") if self.edited is not None else History()

    @property
    def last(self) -> int | None:
        """The turn before it in its branch."""
        before = self.node or self.edited
        return None if before is None else before.turn


class BranchIndex:
    """The conversations that the clients of one endpoint were given. `name` starts the names of its sessions."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ends: dict[str, list[AnswerNode]] = {}
        self._asked: dict[str, AnswerNode] = {}
        self._answers: dict[str, AnswerNode] = {}
        self._same: dict[int, list[AnswerNode]] = {}
        self._num_asked: Counter[int] = Counter()
        self._free: dict[int, list[int]] = {}
        self._num_sessions = 0
        self._keys: dict[int, tuple[int, int]] = {}

    def find(self, messages: Sequence[Message], template: Mapping[str, Any], options: Mapping[str, Any]) -> BranchPoint:
        """Return where a request continues, and count it."""
        keys = [_key_of(message) for message in messages]
        chain = _chain(keys)
        shape = _digest(template)
        identity = int(_digest([chain[-1], shape, dict(options)])[:15], 16)
        occurrence = self._next_occurrence(identity)
        node, length = self._continued(chain)
        edited = self._edited(messages, keys, chain, length)
        if node is not None and not node.is_continued:
            session, node.is_continued = node.session, True
        else:
            session = f"{self._name}.{self._num_sessions}"
            self._num_sessions += 1
        appended = tuple(self._as_sampled(messages[at], keys[at]) for at in range(length, len(messages)))
        return BranchPoint(node, edited, appended, (identity, occurrence), shape, session, chain[-1])

    def add(self, point: BranchPoint, turn: Turn, history: History, answer: Message) -> None:
        """Remember the answer to a request: `answer` as it is delivered, and the history with it as it was sampled."""
        node = AnswerNode(turn.index, point.session, point.template, history.messages[-1], _history=history)
        key = _key_of(answer)
        self._ends.setdefault(_link(point.chain, key), []).append(node)
        self._asked[point.chain] = self._answers[key] = node
        self._same.setdefault(point.key[0], []).append(node)
        self._keys[turn.index] = point.key
        if point.node is not None and turn.parent == point.node.turn:
            point.node.release_text(node)

    def release(self, point: BranchPoint) -> None:
        """Take back a request that got no answer: when it is sent again, it has the same key and so the same seed."""
        heapq.heappush(self._free.setdefault(point.key[0], []), point.key[1])

    def unused(self, point: BranchPoint) -> list[int]:
        """Return the turns that answered the same request before and that nothing continued."""
        return [node.turn for node in self._same.get(point.key[0], ()) if not node.is_continued]

    def paths(self, turns: Iterable[Turn], base: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        """Return the branch of each turn, by index. It does not depend on the order in which requests arrived.

        Roots are numbered in the order of their keys. The first turn after another one, in that order, stays in its
        branch; the others start branches of their own.
        """
        after: dict[int | None, list[int]] = {}
        for turn in turns:
            if turn.index in self._keys:
                before = turn.previous if turn.previous in self._keys else None
                after.setdefault(before, []).append(turn.index)
        found: dict[int, tuple[int, ...]] = {}
        open_: list[tuple[int | None, tuple[int, ...]]] = [(None, base)]
        while open_:
            before, path = open_.pop()
            for number, index in enumerate(sorted(after.get(before, ()), key=self._keys.__getitem__)):
                stays = before is not None and number == 0
                found[index] = path if stays else (*path, number if before is None else number - 1)
                open_.append((index, found[index]))
        return found

    def _next_occurrence(self, identity: int) -> int:
        if self._free.get(identity):
            return heapq.heappop(self._free[identity])
        self._num_asked[identity] += 1
        return self._num_asked[identity] - 1

    def _continued(self, chain: Sequence[str]) -> tuple[AnswerNode | None, int]:
        """Return the longest known conversation that a chain starts with, and its number of messages."""
        for length in range(len(chain) - 1, 0, -1):
            nodes = self._ends.get(chain[length])
            if nodes:
                return next((node for node in nodes if not node.is_continued), nodes[0]), length
        return None, 0

    def _edited(
        self, messages: Sequence[Message], keys: Sequence[str], chain: Sequence[str], start: int
    ) -> AnswerNode | None:
        """Return the answer that a request moved or replaced; None where it is a client's own conversation.

        Answers in a conversation that the client wrote itself, such as examples, are no edits.
        """
        for at in range(start, len(messages)):
            if messages[at].get("role") == "assistant":
                known = self._answers.get(keys[at]) or self._asked.get(chain[at])
                if known is not None:
                    return known
        return None

    def _as_sampled(self, message: Message, key: str) -> Message:
        known = self._answers.get(key) if message.get("role") == "assistant" else None
        return message if known is None else known.raw


def _key_of(message: Message) -> str:
    if message.get("role") != "assistant":
        return _digest(message)
    trimmed = {**message, "content": str(message.get("content") or "").strip()}  # many clients trim what they keep
    return _digest(message_key(trimmed) or {name: trimmed.get(name) for name in _ANSWER_FIELDS})


def _chain(keys: Sequence[str]) -> list[str]:
    """Return a digest of every start of a conversation: the first of none of its messages, the last of all of them."""
    chain = [""]
    for key in keys:
        chain.append(_link(chain[-1], key))
    return chain


def _link(before: str, key: str) -> str:
    return _hash(before + key)


def _digest(value: object) -> str:
    return _hash(json.dumps(value, sort_keys=True, default=str))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
