"""Tool calls in a model's text, as Hermes and Qwen3 write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

A malformed call stays text: the client sees what the model sampled, and nothing is guessed.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made. `arguments` is an object as JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def as_message_part(self) -> dict[str, Any]:
        """Return the entry in `tool_calls` of a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallReader:
    """Splits text that arrives in pieces into plain text and tool calls.

    Wherever the pieces are cut, `add` and `finish` return the same parts in the same order. White space around a call
    is dropped. Text that may still become a call is held back.
    """

    def __init__(self) -> None:
        self._held = ""
        self._space = ""
        self._is_inside = False
        self._after_call = False

    def add(self, text: str) -> list[str | ToolCall]:
        """Return the parts that are final now."""
        self._held += text
        return [part for part in self._parts() if part != ""]

    def finish(self) -> list[str | ToolCall]:
        """Return the rest: a call without an end is text."""
        rest, self._held = self._held, ""
        if self._is_inside:
            rest = f"{self._space}{_OPEN}{rest}"
        return [rest] if rest else []

    def _parts(self) -> Iterator[str | ToolCall]:
        while True:
            if self._is_inside:
                body, close, rest = self._held.partition(_CLOSE)
                if not close:
                    return
                self._held, self._is_inside = rest, False
                call = _read_call(body)
                self._after_call = call is not None
                yield call if call is not None else f"{self._space}{_OPEN}{body}{_CLOSE}"
                continue
            if self._after_call:
                self._held = self._held.lstrip()
            before, opening, rest = self._held.partition(_OPEN)
            size = len(before.rstrip()) if opening else _sure_length(self._held)
            text, self._space = before[:size], before[size:]
            self._held = rest if opening else self._held[size:]
            self._is_inside = bool(opening)
            self._after_call = self._after_call and not text
            yield text
            if not opening:
                return


def _sure_length(text: str) -> int:
    """Return how much of a text is certainly not the start of a call, nor white space before one."""
    end = len(text)
    for size in range(min(len(text), len(_OPEN) - 1), 0, -1):
        if _OPEN.startswith(text[-size:]):
            end -= size
            break
    return len(text[:end].rstrip())


def _read_call(body: str) -> ToolCall | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return None
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(found["name"], json.dumps(arguments, ensure_ascii=False))


def message_key(message: Mapping[str, Any]) -> str | None:
    """Return a key for an assistant's message with tool calls that does not depend on how its JSON is formatted."""
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, Sequence) or not calls:
        return None
    listed = [
        (call.get("id"), call["function"].get("name"), parsed_arguments(call["function"].get("arguments")))
        for call in calls
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
    ]
    return json.dumps([message.get("content") or "", listed], sort_keys=True) if len(listed) == len(calls) else None


def parsed_arguments(arguments: Any) -> Any:
    """Return arguments as an object, which chat templates expect, if they are JSON text of one; else unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
