"""Read and check the body of a request: parameters that both endpoints share, messages and tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from forge.config import Sampling
from forge.config.diagnosis import diagnose
from forge.errors import did_you_mean
from forge.generator.openai.errors import RequestError, parameter_error
from forge.generator.openai.tool_calls import parsed_arguments

CONVERSATION_HEADER: Final = "x-forge-conversation"

_SAMPLING: Final = {
    **{
        name: name
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed", "stop")
    },
    **{name: name for name in ("frequency_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "adapter")},
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "include_stop_str_in_output": "include_stop",
}
"""Parameters of a request, and the fields of `Sampling` that they are. Later ones win."""

_SHARED: Final = frozenset(
    ("model", "n", "stream", "stream_options", "logprobs", "return_token_ids", "response_format", "metadata")
)
_WITHOUT_EFFECT: Final = frozenset(
    ("user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
_ONLY_AS: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
"""Known parameters that are not supported, and the only values that are accepted for them, besides null."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a client asks for, besides the prompt.

    Attributes:
        sampling: the keys of `Sampling` that it gave.
        n: completions of each prompt.
        stream, include_usage: whether they come piece by piece, and what they cost at the end.
        logprobs: whether it wants the logprob of each token.
        return_token_ids: whether it wants token ids, and the weights that made them.
        conversation: what it calls the conversation.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    conversation: str | None = None


def read_options(
    body: Mapping[str, Any], *, own: frozenset[str], has_structured_output: bool, logprobs: bool, header: str | None
) -> RequestOptions:
    """Check everything but the prompt. `own` are the parameters that only one endpoint has, `header` the conversation
    that the request's headers name."""
    _check_names(body, own)
    sampling = {
        target: body[name] for name, target in _SAMPLING.items() if body.get(name) is not None and name != "stop"
    }
    if body.get("stop") is not None:
        sampling["stop"] = [body["stop"]] if isinstance(body["stop"], str) else body["stop"]
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0  # as vLLM's clients write "all"
    structured = _read_format(body.get("response_format"), has_structured_output)
    if structured is not None:
        sampling["structured"] = structured
    n = 1 if body.get("n") is None else body["n"]
    _check_sampling({**sampling, "n": n})
    stream_options = read_object(body, "stream_options")
    return RequestOptions(
        sampling=sampling,
        n=n,
        stream=read_flag(body, "stream"),
        include_usage=read_flag(stream_options, "include_usage"),
        logprobs=logprobs,
        return_token_ids=read_flag(body, "return_token_ids"),
        conversation=_read_conversation(body, header),
    )


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a flag; null and missing are false."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise parameter_error(name, "must be true or false", code="invalid_type")
    return bool(value)


def read_object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object; null and missing are an empty one."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise parameter_error(name, "must be an object", code="invalid_type")
    return value or {}


def _check_names(body: Mapping[str, Any], own: frozenset[str]) -> None:
    known = own | _SHARED | _WITHOUT_EFFECT | set(_SAMPLING)
    for name, value in body.items():
        if name in known:
            continue
        if name not in _ONLY_AS:
            near = did_you_mean(name, known)
            text = f"Unknown parameter: '{name}'. It would have no effect." + (f" ({near})" if near else "")
            raise RequestError(text, param=name, code="unknown_parameter")
        allowed = _ONLY_AS[name]
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            may_be = " or ".join(json.dumps(one) for one in (*allowed, None))
            raise parameter_error(name, f"is not supported here; it may only be {may_be}", code="unsupported_value")


def _check_sampling(sampling: Mapping[str, Any]) -> None:
    try:
        Sampling.model_validate_json(json.dumps(sampling), strict=True)
    except ValidationError as error:
        first = diagnose(error, schema=Sampling, data=sampling, origins={})[0]
        raise parameter_error(first.path.partition("[")[0], f"{first.rule}; {first.repair}") from None


def _read_format(wanted: Any, has_structured_output: bool) -> dict[str, Any] | None:
    """Return `response_format` as `Sampling.structured`."""
    if wanted is None or wanted == {"type": "text"}:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_object":
        schema: Any = {"type": "object"}
    elif kind == "json_schema":
        described = wanted.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise parameter_error("response_format", "needs json_schema.schema, an object")
    else:
        raise parameter_error("response_format", "its type must be text, json_object or json_schema")
    if not has_structured_output:
        rule = "needs structured output, which this engine does not have; serve with generator.engine=vllm"
        raise parameter_error("response_format", rule, code="unsupported_value")
    return {"json_schema": schema}


def _read_conversation(body: Mapping[str, Any], header: str | None) -> str | None:
    named = header if header is not None else read_object(body, "metadata").get("conversation")
    if named is None:
        return None
    if not isinstance(named, str) or not 1 <= len(named) <= 256 or not named.isprintable():
        raise parameter_error("metadata.conversation", "must be text of 1 to 256 printable characters")
    return named


# ---- Messages and tools ----------------------------------------------------------------------------------------------


_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TAKEN: Final = ("messages", "conversation", "conversations", "tools", "documents", "chat_template")


def read_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation: contents as text, arguments of calls as objects, and no empty fields."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise parameter_error("messages", "must be a list with at least one message", code="missing_required_parameter")
    found = [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not any(message["content"] or message.get("tool_calls") for message in found):
        raise parameter_error("messages", "must say something: every message is empty")
    return found


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise parameter_error(where, "must be an object with a role")
    if message["role"] not in _ROLES:
        raise parameter_error(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    found = {name: value for name, value in message.items() if value is not None}
    if "content" not in found and not (found["role"] == "assistant" and found.get("tool_calls")):
        rule = "is missing; only an assistant's message with tool_calls may be without"
        raise parameter_error(f"{where}.content", rule, code="missing_required_parameter")
    if found["role"] == "developer":
        found["role"] = "system"
    found["content"] = _read_content(found.get("content"), f"{where}.content")
    calls = found.get("tool_calls", [])
    if not isinstance(calls, list):
        raise parameter_error(f"{where}.tool_calls", "must be a list")
    if calls:
        found["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    elif found["role"] == "assistant":
        found.pop("tool_calls", None)
    return found


def _read_content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise parameter_error(where, "must be text, or a list of parts")
    if not content:
        raise parameter_error(where, "must have at least one part")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise parameter_error(where, 'only parts of the type "text" can be read here', code="unsupported_value")
        texts.append(part["text"])
    return "".join(texts)


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise parameter_error(where, "must be an object with function.name")
    return {**call, "function": {**function, "arguments": parsed_arguments(function.get("arguments", {}))}}


def read_template(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's arguments besides the messages. `tool_choice: none` leaves the tools out."""
    template = dict(read_object(body, "chat_template_kwargs"))
    for name in _TAKEN:
        if name in template:
            raise parameter_error("chat_template_kwargs", f"may not hold {name!r}")
    if body.get("reasoning_effort") is not None:
        template["reasoning_effort"] = body["reasoning_effort"]
    tools = _read_tools(body.get("tools"))
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        rule = 'may be "none" or "auto": a call cannot be forced here'
        raise parameter_error("tool_choice", rule, code="unsupported_value")
    if choice == "auto" and not tools:
        raise parameter_error("tool_choice", "is only allowed when tools are given")
    if tools and choice != "none":
        template["tools"] = list(tools)
    return template


def _read_tools(tools: Any) -> Sequence[Mapping[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise parameter_error("tools", "must be a list")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            text = f'\'tools[{index}]\': must be {{"type": "function", "function": {{"name": …}}}}'
            raise RequestError(text, param=f"tools[{index}]", code="invalid_value")
    return tools
