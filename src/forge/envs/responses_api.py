"""OpenAI's Responses protocol, for programs that use it in place of chat completions.

A request is translated into one of chat completions, so both continue the same branches and follow the same rules. The
server keeps no conversation: `input` is all of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from forge.envs.chat_api.errors import RequestError, parameter_error
from forge.envs.chat_api.requests import read_object, unknown_parameter

if TYPE_CHECKING:
    from forge.envs.endpoint_replies import Answer
    from forge.envs.endpoint_requests import ChatRequest

_SAME: Final = frozenset(
    ("model", "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
) | frozenset(
    ("service_tier", "store", "stream", "temperature", "top_p", "top_logprobs", "user", "chat_template_kwargs")
)
"""Parameters that mean the same in both protocols."""

_TRANSLATED: Final = frozenset(
    ("input", "instructions", "max_output_tokens", "reasoning", "text", "tools", "tool_choice", "stream_options")
) | frozenset(("include",))
_ONLY_AS: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "context_management": (),
    "max_tool_calls": (),
}
"""Known parameters that are not supported, and the only values that are accepted for them, besides null."""

_HARMLESS: Final = ("reasoning.encrypted_content",)
"""What `include` may ask for although there is none of it."""

_TEXT_PARTS: Final = ("input_text", "output_text", "text")


def as_chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a request for chat completions that asks for the same. `RequestError` names what is wrong."""
    _check_names(body)
    found = {name: value for name, value in body.items() if name in _SAME}
    found["messages"] = [*_instructions(body), *_messages(body.get("input"))]
    if body.get("max_output_tokens") is not None:
        found["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("tools") is not None:
        found["tools"] = _tools(body["tools"])
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if choice is not None and not (choice == "auto" and not found.get("tools")):  # its clients always send it
        found["tool_choice"] = choice
    return {**found, **_options(body)}


def _check_names(body: Mapping[str, Any]) -> None:
    known = _SAME | _TRANSLATED | set(_ONLY_AS)
    for name, value in body.items():
        if name not in known:
            raise unknown_parameter(name, known)
        if name in _ONLY_AS and value is not None and value not in _ONLY_AS[name]:
            allowed = " or ".join(json.dumps(one) for one in (*_ONLY_AS[name], None))
            rule = f"is not supported here; it may only be {allowed}. Send the whole conversation as `input`"
            raise parameter_error(name, rule, code="unsupported_value")


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what nested objects ask for. What would have no effect is refused."""
    found: dict[str, Any] = {}
    reasoning = _known(body, "reasoning", ("effort", "summary", "generate_summary"))
    if reasoning.get("effort") is not None:
        found["reasoning_effort"] = reasoning["effort"]
    text = _known(body, "text", ("format", "verbosity"))
    if text.get("format") not in (None, {"type": "text"}):
        found["response_format"] = text["format"]  # refused, or ignored where the program says so
    if text.get("verbosity") not in (None, "medium"):
        raise parameter_error("text.verbosity", 'may only be "medium" or null', code="unsupported_value")
    _known(body, "stream_options", ("include_obfuscation",))
    for wanted in body.get("include") or ():
        if wanted not in _HARMLESS:
            raise parameter_error("include", f"{wanted!r} is not available", code="unsupported_value")
    return found


def _known(body: Mapping[str, Any], name: str, known: Sequence[str]) -> Mapping[str, Any]:
    found = read_object(body, name)
    for each in found:
        if each not in known:
            raise unknown_parameter(f"{name}.{each}", [f"{name}.{one}" for one in known])
    return found


def _instructions(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    text = body.get("instructions")
    if text is None:
        return []
    if not isinstance(text, str):
        raise parameter_error("instructions", "must be text", code="invalid_type")
    return [{"role": "system", "content": text}]


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return `input` as messages. An answer's message and its calls, which are items of their own, become one."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise parameter_error("input", "must be text, or a list of items", code="missing_required_parameter")
    found: list[dict[str, Any]] = []
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            raise parameter_error(where, "must be an object", code="invalid_type")
        kind = item.get("type") or "message"
        if kind == "message":
            found.append({"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")})
        elif kind == "function_call":
            call = _call(item, where)
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = _content(item.get("output"), f"{where}.output")
            found.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": text})
        else:
            rule = f"is {kind!r}; items are of the types message, function_call and function_call_output"
            raise parameter_error(f"{where}.type", rule, code="unsupported_value")
    return found


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
    return {"id": _text(item, "call_id", where), "type": "function", "function": function}


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise parameter_error(f"{where}.{name}", "must be text", code="missing_required_parameter")
    return value


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise parameter_error(where, "must be text, or a list of parts", code="missing_required_parameter")
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str)
        if not is_text:
            rule = f"only parts of the types {', '.join(_TEXT_PARTS)} can be read here"
            raise parameter_error(where, rule, code="unsupported_value")
    return "".join(part["text"] for part in content)


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise parameter_error("tools", "must be a list", code="invalid_type")
    found = []
    for number, tool in enumerate(tools):
        is_function = isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str)
        if not is_function or not tool["name"]:
            text = f'\'tools[{number}]\': must be {{"type": "function", "name": …}}; no other tools run here'
            raise RequestError(text, param=f"tools[{number}]", code="unsupported_value")
        named = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        found.append({"type": "function", "function": named})
    return found


# ---- Answers ---------------------------------------------------------------------------------------------------------


def whole_response(answer: Answer, asked: ChatRequest) -> dict[str, Any]:
    """Return an answer as a response."""
    is_cut = answer.finish_reason == "length"
    return {
        **_head(answer, asked),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _output(answer, "incomplete" if is_cut else "completed"),
        "usage": _usage(answer),
    }


def response_events(answer: Answer, asked: ChatRequest) -> bytes:
    """Return an answer as server-sent events."""
    return b"".join(
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n".encode()
        for number, event in enumerate(_events(answer, asked))
    )


def error_event(error: RequestError) -> bytes:
    """Return an error as the event of a stream that has started."""
    described = {"type": "error", "message": error.message, "code": error.code, "param": error.param}
    return f"event: error\ndata: {json.dumps({**described, 'sequence_number': 0})}\n\n".encode()


def _events(answer: Answer, asked: ChatRequest) -> Iterator[dict[str, Any]]:
    done = whole_response(answer, asked)
    started = {**done, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for number, item in enumerate(done["output"]):
        place = {"output_index": number, "item_id": item["id"]}
        is_call = item["type"] == "function_call"
        empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
        added = {**item, "status": "in_progress", **empty}
        yield {"type": "response.output_item.added", "output_index": number, "item": added}
        if is_call:
            yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
            end = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **place, **end}
        else:
            yield from _text_events(item["content"][0], {**place, "content_index": 0})
        yield {"type": "response.output_item.done", "output_index": number, "item": item}
    yield {"type": f"response.{done['status']}", "response": done}


def _text_events(part: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []}
    yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": part}


def _head(answer: Answer, asked: ChatRequest) -> dict[str, Any]:
    body = asked.body
    return {
        "id": answer.id,
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "model": asked.model,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": not asked.one_call,
        "previous_response_id": None,
        "store": False,
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
    }


def _output(answer: Answer, status: str) -> list[dict[str, Any]]:
    calls = answer.message.get("tool_calls") or ()
    text = answer.message.get("content") or ""
    name = answer.id.removeprefix("resp_")
    found: list[dict[str, Any]] = []
    if text or not calls:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        found.append({"type": "message", "id": f"msg_{name}", "status": status, "role": "assistant", "content": [part]})
    for number, call in enumerate(calls):
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        ids = {"id": f"fc_{name}_{number}", "call_id": call["id"]}
        found.append({"type": "function_call", **ids, **function, "status": "completed"})
    return found


def _usage(answer: Answer) -> dict[str, Any]:
    usage = answer.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
