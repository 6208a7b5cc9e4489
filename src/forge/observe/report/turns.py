"""What a report keeps of the turns of episodes that a program made. Its size is bounded however long they were."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

MAX_TURNS: Final = 20_000
"""Turns of all samples together."""
MAX_CHARACTERS: Final = 4_000_000
"""Characters of what the policy read, all samples together. A text that several turns read counts once."""
CHARACTERS_PER_TOKEN: Final = 8
"""Characters that are shown in place of a token, of text whose tokens cannot be shown."""
_FEWEST_TURNS: Final = 8
_FEWEST_CHARACTERS: Final = 200
_MAX_NAME: Final = 200
_MAX_ARGUMENTS: Final = 4_000
_MAX_CALLS: Final = 64
_MAX_AGENTS: Final = 64

Fields = dict[str, Any]


class TurnTable:
    """Keeps turns within the bounds, with each message once.

    Args:
        episodes: the lines of the episodes to show, those without turns included.
    """

    def __init__(
        self, episodes: Sequence[Fields], *, max_turns: int = MAX_TURNS, max_characters: int = MAX_CHARACTERS
    ) -> None:
        kept = [turns_of(episode) for episode in episodes]
        lengths = [len(turns) for turns in kept if turns]
        self._max_turns = fair_limit(lengths, max_turns, fewest=_FEWEST_TURNS)
        texts = {text for turns in kept for turn in turns[: self._max_turns] for text in _texts(turn)}
        self._max_text = fair_limit([len(text) for text in texts], max_characters, fewest=_FEWEST_CHARACTERS)
        self._numbers: dict[str, int] = {}
        self.messages: list[Fields] = []
        self.notes: list[str] = []
        if any(length > self._max_turns for length in lengths):
            self.notes.append(f"Of long episodes only the first {self._max_turns} turns are shown.")
        if any(len(text) > self._max_text for text in texts):
            self.notes.append(f"Of long messages only the first {self._max_text} characters are shown.")

    def describe(self, episode: Fields, *, limit: int, with_text: bool) -> Fields:
        """Return what an item has more than that of a single completion; nothing for such a one.

        `limit` is how many tokens of the item are shown; `with_text` is for one whose tokens cannot be shown.
        """
        turns = turns_of(episode)
        if not turns:
            return {}
        stats = episode.get("stats")
        return {
            "ending": cut(str(episode.get("ending") or ""), 40),
            "agents": _agents(episode),
            "stats": {
                cut(str(name), _MAX_NAME): number(value)
                for name, value in (stats.items() if isinstance(stats, dict) else ())
            },
            "numTurns": len(turns),
            "turns": [
                self._turn(turn, characters=CHARACTERS_PER_TOKEN * limit if with_text else 0)
                for turn in turns[: self._max_turns]
            ],
        }

    def _turn(self, turn: Fields, *, characters: int) -> Fields:
        context, calls = turn.get("context"), turn.get("calls")
        text = turn.get("text")
        if turn["start"] == turn["end"]:  # another model's turn: its tokens are not known
            characters = self._max_text
        return {
            "index": turn["index"],
            "agent": cut(str(turn.get("agent") or ""), _MAX_NAME),
            "order": whole(turn.get("order")),
            "parent": whole(turn.get("parent")),
            "previous": whole(turn.get("previous")),
            "path": [place for place in _list(turn.get("path")) if type(place) is int][:32],
            "messages": [self._message(each) for each in _list(turn.get("messages")) if isinstance(each, dict)],
            "context": cut(context, self._max_text) if isinstance(context, str) else None,
            "start": turn["start"],
            "end": turn["end"],
            "text": cut(text, characters) if characters and isinstance(text, str) else None,
            "read": whole(turn.get("num_context_tokens")),
            "cached": whole(turn.get("num_cached")),
            "finish": cut(str(turn.get("finish_reason") or ""), 40),
            "break": None if turn.get("prefix_break") is None else cut(str(turn["prefix_break"]), 40),
            "delivered": turn.get("is_delivered") is not False,
            "trained": turn.get("is_trained") is not False,
            "calls": [_call(call) for call in _list(calls)[:_MAX_CALLS] if isinstance(call, dict)],
            "reward": number(turn.get("reward")),
            "advantage": number(turn.get("advantage")),
            "seconds": number(turn.get("seconds")),
        }

    def _message(self, message: Mapping[str, Any]) -> int:
        fields = {
            "role": cut(str(message.get("role", "")), 40),
            "content": cut(content_text(message.get("content")), self._max_text),
            "name": cut(str(message.get("name") or ""), _MAX_NAME),
            "call": cut(str(message.get("tool_call_id") or ""), _MAX_NAME),
            "calls": cut(content_text(message.get("tool_calls")), _MAX_ARGUMENTS),
        }
        place = self._numbers.setdefault(json.dumps(fields), len(self.messages))
        if place == len(self.messages):
            self.messages.append(fields)
        return place


def _agents(episode: Fields) -> dict[str, Fields]:
    """Return what answered for each agent, and what it earned; nothing for an episode with one agent."""
    found = episode.get("agents")
    return {
        cut(str(name), _MAX_NAME): {
            "policy": cut(str(agent.get("policy") or ""), _MAX_NAME),
            "learns": agent.get("learns") is not False,
            "reward": number(agent.get("reward")),
            "advantage": number(agent.get("advantage")),
        }
        for name, agent in (list(found.items())[:_MAX_AGENTS] if isinstance(found, dict) else ())
        if isinstance(agent, dict)
    }


def turns_of(episode: Fields) -> list[Fields]:
    """Return the turns of a line that follow each other over its tokens; none where that is not so."""
    found = [turn for turn in _list(episode.get("turns")) if isinstance(turn, dict)]
    at = 0
    for place, turn in enumerate(found):
        start, end = whole(turn.get("start")), whole(turn.get("end"))
        if turn.get("index") != place or start != at or end is None or end < at:
            return []
        at = end
    return found if at == len(episode["token_ids"]) else []


def untrained_spans(episode: Fields) -> list[tuple[int, int]]:
    """Return (first, end) of the tokens of turns that are never trained on: not delivered, left out by the program, or
    of an agent that does not learn."""
    agents = _agents(episode)
    return [
        (turn["start"], turn["end"])
        for turn in turns_of(episode)
        if turn.get("is_delivered") is False
        or turn.get("is_trained") is False
        or not agents.get(str(turn.get("agent") or ""), {}).get("learns", True)
    ]


def fair_limit(lengths: Sequence[int], total: int, *, fewest: int) -> int:
    """Return the largest length such that all, cut to it, stay within the total; at least `fewest`."""
    left, limit = total, 0
    for place, length in enumerate(sorted(lengths)):
        limit = left // (len(lengths) - place)
        if length > limit:
            return max(limit, fewest)
        left -= length
    return max(lengths, default=0)


def content_text(content: object) -> str:
    """Return a message's content as text: nothing for None, JSON for what is not text."""
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def cut(text: str, limit: int) -> str:
    """Return a text, or its beginning and how much of it is left out."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} more characters)"


def number(value: object) -> float | None:
    """Return a finite number with six digits; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        return None
    return float(f"{value:.6g}")


def whole(value: object) -> int | None:
    """Return a whole number that is not negative; None for anything else."""
    return value if type(value) is int and value >= 0 else None


def _texts(turn: Fields) -> list[str]:
    found = [content_text(each.get("content")) for each in _list(turn.get("messages")) if isinstance(each, dict)]
    more = [turn.get("context"), turn.get("text") if turn["start"] == turn["end"] else None]
    return [*found, *(text for text in more if isinstance(text, str))]


def _call(call: Fields) -> Fields:
    name = cut(str(call.get("id") or ""), _MAX_NAME)
    if "malformed" in call:
        return {"id": name, "malformed": cut(str(call["malformed"]), _MAX_ARGUMENTS)}
    arguments = cut(content_text(call.get("arguments")), _MAX_ARGUMENTS)
    return {"id": name, "name": cut(str(call.get("name") or ""), _MAX_NAME), "arguments": arguments}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
