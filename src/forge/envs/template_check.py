"""Which conversations a tokenizer's chat template lets an agent continue token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forge.envs.history import ChatCodec, History
from forge.envs.trace import Message
from forge.errors import ForgeError
from forge.types import PrefixBreakKind

_USER: Final = {"role": "user", "content": "What is the weather in Oslo?"}
_NEXT: Final = {"role": "user", "content": "And in Rome?"}
_SYSTEM: Final = {"role": "system", "content": "You are helpful."}
_TOOL: Final = {"role": "tool", "content": "12 degrees", "name": "weather", "tool_call_id": "call_0"}
_SCHEMA: Final = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_PLAIN: Final = "It is warm."
_REASONED: Final = "<think>\nOslo is in the north.\n</think>\n\nIt is warm."
_CALLS: Final = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": {"city": "Oslo"}}',
    "json": '{"name": "weather", "arguments": {"city": "Oslo"}}',
}


@dataclass(frozen=True, slots=True)
class Continuation:
    """One way to continue a conversation.

    Attributes:
        name: what is continued with what.
        is_exact: whether the sampled tokens stay as they are.
        prefix_break: why they do not; None where they do, and where the template refuses the conversation.
        detail: what differs, or the template's refusal.
    """

    name: str
    is_exact: bool
    prefix_break: PrefixBreakKind | None = None
    detail: str = ""


def check_template(codec: ChatCodec, *, tool_format: str, end: str) -> list[Continuation]:
    """Try every continuation that agents use. `end` is the text of the token that ends a turn."""
    call = _CALLS[tool_format]
    tools = {"tools": [_SCHEMA]}
    cases: list[tuple[str, Sequence[Message], str, Sequence[Message], Mapping[str, Any]]] = [
        ("an answer, then a question", [_USER], _PLAIN + end, [_NEXT], {}),
        ("with a system message", [_SYSTEM, _USER], _PLAIN + end, [_NEXT], {}),
        ("an answer that was cut off, then a question", [_USER], _PLAIN[:5], [_NEXT], {}),
        ("an answer with reasoning, then a question", [_USER], _REASONED + end, [_NEXT], {}),
        ("an answer that starts with a line break", [_USER], "\n" + _PLAIN + end, [_NEXT], {}),
        ("an answer that ends with a space", [_USER], _PLAIN + " " + end, [_NEXT], {}),
        ("a tool call, then its result", [_USER], call + end, [_TOOL], tools),
        ("two tool calls, then their results", [_USER], call + "\n" + call + end, [_TOOL, _TOOL], tools),
        ("reasoning and a tool call, then its result", [_USER], _REASONED + "\n" + call + end, [_TOOL], tools),
    ]
    return [_try(codec, *case) for case in cases]


def _try(
    codec: ChatCodec,
    name: str,
    first: Sequence[Message],
    answer: str,
    then: Sequence[Message],
    template: Mapping[str, Any],
) -> Continuation:
    try:
        opened = History().extend(first, codec, template=template)
        history = History().after(opened, first, codec.encode_rendered(answer), codec)
        extension = history.extend(then, codec, template=template)
    except ForgeError as error:
        return Continuation(name, is_exact=False, detail=f"{error.message} {error.rule or ''}".strip())
    if not extension.starts_over:
        return Continuation(name, is_exact=True)
    return Continuation(name, False, extension.prefix_break, _difference(history.text or "", extension.text))


def _difference(had: str, has: str) -> str:
    at = next((place for place, (a, b) in enumerate(zip(had, has, strict=False)) if a != b), min(len(had), len(has)))
    return f"sampled {had[at : at + 24]!r}, the template writes {has[at : at + 24]!r}"
