"""Tool calls in sampled text, in the formats that models were trained on.

- `hermes` (Hermes, Qwen): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them, with text around.
- `llama` (Llama 3.x): the whole answer is `{"name": …, "parameters": {…}}`, several joined by `;`, after an optional
  `<|python_tag|>`.
- `json`: the whole answer is one `{"name": …, "arguments": {…}}` or a list of them, with or without a code fence.

In the last two formats an answer may be JSON without being a call, such as `{"answer": 3}` or `[1, 2]`. Only what has
the shape of a call counts as one: an object with `name` and with `arguments` or `parameters`.

A call that is cut off or malformed is reported with the reason, so that the model can be told. Nothing is guessed.
Reasoning between `<think>` and `</think>` is text, whatever it contains; so is all that follows a `<think>` that is
never closed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from forge.types import MalformedCall, ToolCall

ToolFormat: TypeAlias = Literal["hermes", "llama", "json"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"
_PYTHON_TAG: Final = "<|python_tag|>"
_FENCE: Final = re.compile(r"^```(?:json)?\s*\n(.*?)\n?```$", re.DOTALL)
_NAME_FIRST: Final = re.compile(r"""\[?\s*\{\s*["']name["']\s*:""")
_NAME: Final = re.compile(r"""["']name["']\s*:""")
_ARGUMENTS: Final = re.compile(r"""["'](?:arguments|parameters)["']\s*:""")
_EXAMPLE: Final = '{"name": "tool", "arguments": {"x": 1}}'
_LLAMA_EXAMPLE: Final = '{"name": "tool", "parameters": {"x": 1}}'


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer split into what is said and what is called, in order. Without calls, `text` is the whole answer."""

    text: str
    calls: tuple[ToolCall | MalformedCall, ...]


def parse_answer(text: str, tool_format: ToolFormat, *, id_prefix: str, is_reasoning: bool = False) -> ParsedAnswer:
    """Split an answer. Calls get the ids `{id_prefix}_0`, `{id_prefix}_1`, …, the same for the same answer.

    `is_reasoning` says that the prompt has opened the reasoning (`opens_reasoning`).
    """
    reader = CallReader(tool_format, id_prefix=id_prefix, is_reasoning=is_reasoning)
    parts = [*reader.add(text), *reader.finish()]
    calls = tuple(part for part in parts if not isinstance(part, str))
    said = "".join(part for part in parts if isinstance(part, str))
    return ParsedAnswer(said.strip() if calls else said, calls)


def opens_reasoning(prompt: str) -> bool:
    """Return whether an answer to a prompt starts inside the reasoning: some chat templates write `<think>`."""
    return prompt.rstrip().endswith(_THINK)


class CallReader:
    """Splits an answer that arrives in pieces into what is said and what is called.

    Wherever the pieces are cut, `add` and `finish` return the same parts in the same order. Text that may still become
    a call is held back. White space next to calls is dropped, except between two texts. An answer without calls stays
    exactly as it is. Calls get the ids `{id_prefix}_0`, `{id_prefix}_1`, ….

    Args:
        tool_format: how calls are written.
        id_prefix: what their ids start with.
        is_reasoning: whether the prompt has opened the reasoning, so that the answer starts inside it.
    """

    def __init__(self, tool_format: ToolFormat = "hermes", *, id_prefix: str, is_reasoning: bool = False) -> None:
        self._format, self._id_prefix = tool_format, id_prefix
        self._num_calls = 0
        self._held = ""
        self._space = ""
        self._is_inside = self._after_call = self._has_text = False
        self._is_reasoning = is_reasoning
        self._is_plain = False

    def add(self, text: str) -> list[str | ToolCall | MalformedCall]:
        """Return the parts that are final now."""
        self._held += text
        if self._format == "hermes":
            return [part for part in self._parts() if part != ""]
        if not self._is_plain and _may_be_call(self._held, self._format):
            return []  # such an answer is one call, or none: its end decides
        self._is_plain = True
        text, self._held = self._held, ""
        return [text] if text else []

    def finish(self) -> list[str | ToolCall | MalformedCall]:
        """Return the rest. A call without an end is malformed."""
        rest, self._held = self._held, ""
        if self._format != "hermes":
            found = None if self._is_plain else _parse_whole(rest, self._format)
            return [rest] if found is None and rest else [self._call(each) for each in found or ()]
        if self._is_inside:
            bad = self._call(_Bad(_OPEN + rest, f"the call is not closed by {_CLOSE}"))
            return [self._space, bad] if self._space else [bad]
        return [self._said(rest)] if rest and not (self._after_call and rest.isspace()) else []

    def _parts(self) -> Iterator[str | ToolCall | MalformedCall]:
        while True:
            if self._is_inside:
                body, close, rest = self._held.partition(_CLOSE)
                if not close:
                    return
                self._held, self._is_inside = rest, False
                call = self._call(_read_call(body, raw=_OPEN + body + _CLOSE))
                self._after_call = isinstance(call, ToolCall)
                if isinstance(call, MalformedCall):
                    yield self._said("")
                yield call
            if self._is_reasoning:
                before, close, rest = self._held.partition(_THOUGHT)
                size = len(before) if close else len(before) - _partial(before, _THOUGHT)
                self._held, self._is_reasoning = (rest, False) if close else (before[size:], True)
                yield self._said(before[:size] + close)
                if not close:
                    return
            before, opening, rest = self._held.partition(_first(self._held, _OPEN, _THINK))
            if opening == _THINK:
                self._held, self._is_reasoning = rest, True
                yield self._said(before + opening)
                continue
            size = len(before.rstrip()) if opening else _sure_length(self._held)
            if size:
                yield self._said(before[:size])
            if not opening:
                self._held = self._held[size:]
                return
            self._space += before[size:]
            self._held, self._is_inside = rest, True

    def _said(self, text: str) -> str:
        """Return a text with the white space before it, which is dropped only between a first call and a text."""
        said = text.lstrip() if self._after_call and not self._has_text else self._space + text
        self._space, self._after_call, self._has_text = "", False, True
        return said

    def _call(self, found: _Found) -> ToolCall | MalformedCall:
        call_id = f"{self._id_prefix}_{self._num_calls}"
        self._num_calls += 1
        return MalformedCall(call_id, found.raw, found.reason) if isinstance(found, _Bad) else ToolCall(call_id, *found)


def detect_format(chat_template: str) -> ToolFormat:
    """Return the format that a chat template teaches: what it writes for the calls of an assistant's message."""
    if _OPEN in chat_template:
        return "hermes"
    if _PYTHON_TAG in chat_template or '"parameters": ' in chat_template:
        return "llama"
    return "json"


@dataclass(frozen=True, slots=True)
class _Bad:
    """The text of a call that cannot be read, and the reason."""

    raw: str
    reason: str


_Found: TypeAlias = tuple[str, dict[str, Any]] | _Bad
"""A name and its arguments, or why there are none."""


def _sure_length(text: str) -> int:
    """Return how much of a text is certainly not the start of a call, nor white space before one."""
    end = len(text) - max(_partial(text, _OPEN), _partial(text, _THINK))
    return len(text[:end].rstrip())


def _partial(text: str, tag: str) -> int:
    """Return how many of the last characters of a text are the start of a tag."""
    sizes = range(min(len(text), len(tag) - 1), 0, -1)
    return next((size for size in sizes if tag.startswith(text[-size:])), 0)


def _first(text: str, *tags: str) -> str:
    """Return the tag that comes first in a text; the first of them where there is none."""
    places = {tag: text.find(tag) for tag in tags}
    found = [tag for tag in tags if places[tag] >= 0]
    return min(found, key=places.__getitem__, default=tags[0])


def _may_be_call(text: str, tool_format: ToolFormat) -> bool:
    """Return whether an answer that starts like this can be a call in a format where the whole answer is one."""
    body = text.strip()
    starts = ("{", _PYTHON_TAG) if tool_format == "llama" else ("{", "[", "```")
    return not body or body.startswith(starts) or any(start.startswith(body) for start in starts)


def _parse_whole(text: str, tool_format: ToolFormat) -> list[_Found] | None:
    """Return the calls that an answer is, or None for an answer that is none."""
    return _parse_llama(text) if tool_format == "llama" else _parse_json(text)


def _parse_llama(text: str) -> list[_Found] | None:
    body = text.strip()
    is_marked = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).strip()
    if not is_marked and not body.startswith("{"):
        return None
    if not is_marked and not _looks_like_call(body):
        return None
    decoder, found, at = json.JSONDecoder(), list[_Found](), 0
    while at < len(body):
        try:
            value, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            found.append(_Bad(body[at:] if found else text, f"it is not JSON like {_LLAMA_EXAMPLE}"))
            break
        found.append(_check_call(value, "parameters", raw=body[at:end]))
        at = end
        while at < len(body) and body[at] in "; \n\t\r":
            at += 1
    if len(found) == 1 and isinstance(found[0], _Bad):
        return [_Bad(text, found[0].reason)]  # the answer stays as it is
    return found or [_Bad(text, f"it is not JSON like {_LLAMA_EXAMPLE}")]


def _parse_json(text: str) -> list[_Found] | None:
    body = text.strip()
    fenced = _FENCE.match(body)
    body = fenced.group(1).strip() if fenced else body
    if not body.startswith(("{", "[")) or not _looks_like_call(body):
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return [_Bad(text, f"it is not JSON like {_EXAMPLE}")]
    if not isinstance(value, list):
        return [_check_call(value, "arguments", raw=text)]
    return [_check_call(each, "arguments", raw=json.dumps(each, ensure_ascii=False)) for each in value]


def _looks_like_call(body: str) -> bool:
    """Return whether JSON, or text that was meant as JSON, has the shape of a call: a name and arguments."""
    try:
        value, _ = json.JSONDecoder().raw_decode(body)
    except (ValueError, RecursionError):  # cut off, or written wrong: its keys decide
        return bool(_NAME_FIRST.match(body) or (_NAME.search(body) and _ARGUMENTS.search(body)))
    return any(_has_call_keys(each) for each in (value if isinstance(value, list) else [value]))


def _has_call_keys(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and ("arguments" in value or "parameters" in value)


def _read_call(body: str, *, raw: str) -> _Found:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return _Bad(raw, f"it is not JSON like {_EXAMPLE}")
    return _check_call(value, "arguments", raw=raw)


def _check_call(value: Any, key: str, *, raw: str) -> _Found:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return _Bad(raw, 'it must be an object with the key "name", whose value is text')
    other = "parameters" if key == "arguments" else "arguments"
    if key not in value and other in value:
        return _Bad(raw, f'the arguments must be in "{key}", not in "{other}"')
    arguments = value.get(key, {})
    if not isinstance(arguments, dict):
        return _Bad(raw, f'the value of "{key}" must be an object')
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # Python reads NaN, 1e999 and halves of surrogate pairs
        return _Bad(raw, "it has a number or a character that JSON does not allow")
    return value["name"], arguments
