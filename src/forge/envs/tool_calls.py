"""Tool calls in sampled text, in the formats that models were trained on.

- `hermes` (Hermes, Qwen): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them, with text around.
- `llama` (Llama 3.x): the whole answer is `{"name": …, "parameters": {…}}`, several joined by `;`, after an optional
  `<|python_tag|>`.
- `json`: the whole answer is one `{"name": …, "arguments": {…}}` or a list of them, with or without a code fence.

A call that is cut off or malformed is reported with the reason, so that the model can be told. Nothing is guessed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from forge.types import MalformedCall, ToolCall

ToolFormat: TypeAlias = Literal["hermes", "llama", "json"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG: Final = "<|python_tag|>"
_FENCE: Final = re.compile(r"^```(?:json)?\s*\n(.*?)\n?```$", re.DOTALL)
_EXAMPLE: Final = '{"name": "tool", "arguments": {"x": 1}}'


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer split into what is said and what is called, in order."""

    text: str
    calls: tuple[ToolCall | MalformedCall, ...]


def parse_answer(text: str, tool_format: ToolFormat, *, id_prefix: str) -> ParsedAnswer:
    """Split an answer. Calls get the ids `{id_prefix}_0`, `{id_prefix}_1`, …, the same for the same answer."""
    found: list[_Found]
    if tool_format == "hermes":
        said, found = _parse_hermes(text)
    elif tool_format == "llama":
        said, found = _parse_llama(text)
    else:
        said, found = _parse_json(text)
    calls: list[ToolCall | MalformedCall] = []
    for number, each in enumerate(found):
        call_id = f"{id_prefix}_{number}"
        if isinstance(each, str):
            calls.append(MalformedCall(call_id, text, each))
        else:
            calls.append(ToolCall(call_id, *each))
    return ParsedAnswer(said, tuple(calls))


def detect_format(chat_template: str) -> ToolFormat:
    """Return the format that a chat template teaches: what it writes for the calls of an assistant's message."""
    if _OPEN in chat_template:
        return "hermes"
    if _PYTHON_TAG in chat_template or '"parameters": ' in chat_template:
        return "llama"
    return "json"


_Found: TypeAlias = tuple[str, dict[str, Any]] | str
"""A name and its arguments, or the reason why there are none."""


def _parse_hermes(text: str) -> tuple[str, list[_Found]]:
    said, rest = "", text
    found: list[_Found] = []
    while True:
        before, opening, rest = rest.partition(_OPEN)
        said += before
        if not opening:
            return said.strip(), found
        body, closing, rest = rest.partition(_CLOSE)
        if not closing:
            found.append(f"the call is not closed by {_CLOSE}")
            return said.strip(), found
        found.append(_read_call(body, "arguments"))


def _parse_llama(text: str) -> tuple[str, list[_Found]]:
    body = text.strip()
    is_marked = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).strip()
    if not is_marked and not body.startswith("{"):
        return text.strip(), []
    decoder, found, at = json.JSONDecoder(), list[_Found](), 0
    while at < len(body):
        try:
            value, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            found.append(f"it is not JSON like {_EXAMPLE.replace('arguments', 'parameters')}")
            break
        found.append(_check_call(value, "parameters"))
        while at < len(body) and body[at] in "; \n\t\r":
            at += 1
    return "", found


def _parse_json(text: str) -> tuple[str, list[_Found]]:
    body = text.strip()
    fenced = _FENCE.match(body)
    body = fenced.group(1).strip() if fenced else body
    if not body.startswith(("{", "[")):
        return text.strip(), []
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return "", [f"it is not JSON like {_EXAMPLE}"]
    if isinstance(value, list):
        return "", [_check_call(each, "arguments") for each in value] if value else ["the list of calls is empty"]
    return "", [_check_call(value, "arguments")]


def _read_call(body: str, key: str) -> _Found:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return f"it is not JSON like {_EXAMPLE}"
    return _check_call(value, key)


def _check_call(value: Any, key: str) -> _Found:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return 'it must be an object with the key "name", whose value is text'
    arguments = value.get(key, {})
    if not isinstance(arguments, dict):
        return f'the value of "{key}" must be an object'
    return value["name"], arguments
