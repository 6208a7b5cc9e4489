"""The messages and tools of a chat request, checked and brought into the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from forge.generator.openai.errors import RequestError, refuse
from forge.generator.openai.parameters import read_object
from forge.generator.openai.tool_calls import parsed_arguments

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TAKEN: Final = ("messages", "conversation", "conversations", "tools", "documents", "chat_template")


def read_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation: text as text, arguments of calls as objects, and no empty fields."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refuse("messages", "must be a list with at least one message", code="missing_required_parameter")
    found = [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not any(message["content"] or message.get("tool_calls") for message in found):
        raise refuse("messages", "must say something: every message is empty")
    return found


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise refuse(where, "must be an object with a role")
    if message["role"] not in _ROLES:
        raise refuse(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    found = {name: value for name, value in message.items() if value is not None}
    if "content" not in found and not (found["role"] == "assistant" and found.get("tool_calls")):
        rule = "is missing; only an assistant's message with tool_calls may be without"
        raise refuse(f"{where}.content", rule, code="missing_required_parameter")
    if found["role"] == "developer":
        found["role"] = "system"
    found["content"] = _read_content(found.get("content"), f"{where}.content")
    calls = found.get("tool_calls", [])
    if not isinstance(calls, list):
        raise refuse(f"{where}.tool_calls", "must be a list")
    if calls:
        found["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    elif found["role"] == "assistant":
        found.pop("tool_calls", None)
    return found


def _read_content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refuse(where, "must be text, or a list of parts")
    if not content:
        raise refuse(where, "must have at least one part")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise refuse(where, 'only parts of the type "text" can be read here', code="unsupported_value")
        texts.append(part["text"])
    return "".join(texts)


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refuse(where, "must be an object with function.name")
    return {**call, "function": {**function, "arguments": parsed_arguments(function.get("arguments", {}))}}


def read_template(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the chat template is given besides the messages. `tool_choice: none` leaves the tools out of it."""
    template = dict(read_object(body, "chat_template_kwargs"))
    for name in _TAKEN:
        if name in template:
            raise refuse("chat_template_kwargs", f"may not hold {name!r}")
    if body.get("reasoning_effort") is not None:
        template["reasoning_effort"] = body["reasoning_effort"]
    tools = _read_tools(body.get("tools"))
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        rule = 'may be "none" or "auto": a call cannot be forced here'
        raise refuse("tool_choice", rule, code="unsupported_value")
    if choice == "auto" and not tools:
        raise refuse("tool_choice", "is only allowed when tools are given")
    if tools and choice != "none":
        template["tools"] = list(tools)
    return template


def _read_tools(tools: Any) -> Sequence[Mapping[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise refuse("tools", "must be a list")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            text = f'\'tools[{index}]\': must be {{"type": "function", "function": {{"name": …}}}}'
            raise RequestError(text, param=f"tools[{index}]", code="invalid_value")
    return tools
