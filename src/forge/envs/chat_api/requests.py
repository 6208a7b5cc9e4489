"""Read and check the body of a request: parameters that both endpoints share, messages and tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web
from pydantic import ValidationError

from forge.config import Sampling
from forge.config.diagnosis import diagnose
from forge.envs.chat_api.errors import RequestError, parameter_error
from forge.errors import did_you_mean

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
_STREAM_OPTIONS: Final = ("include_usage", "include_obfuscation")
_ONLY_AS: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
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
    for name in stream_options:
        if name not in _STREAM_OPTIONS:
            raise unknown_parameter(f"stream_options.{name}", {f"stream_options.{each}" for each in _STREAM_OPTIONS})
    return RequestOptions(
        sampling=sampling,
        n=n,
        stream=read_flag(body, "stream"),
        include_usage=read_flag(stream_options, "include_usage"),
        logprobs=logprobs,
        return_token_ids=read_flag(body, "return_token_ids"),
        conversation=_read_conversation(body, header),
    )


async def read_body(request: web.Request, *, needs_model: bool = True) -> dict[str, Any]:
    """Return the body of a request: a JSON object that names a model, unless it need not."""
    if request.content_type != "application/json":
        # It also keeps web pages of other origins out: they may not send this type without asking first.
        text = "The request must be of the type application/json."
        raise RequestError(text, status=415, code="unsupported_media_type")
    announced = request.content_length or 0
    if announced > request.client_max_size:  # refused before any of it is awaited
        raise web.HTTPRequestEntityTooLarge(max_size=request.client_max_size, actual_size=announced)
    try:
        raw = await request.read()
        body = json.loads(raw, parse_constant=_no_constant)
        if b"\\u" in raw:  # JSON can spell halves of characters, which are not text
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    if needs_model and not isinstance(body.get("model"), str):
        raise parameter_error("model", "must name the model", code="missing_required_parameter")
    return body


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def bearer_key(request: web.Request) -> str | None:
    """Return the key in a request's header `Authorization: Bearer KEY`."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else None


def wrong_key() -> RequestError:
    """Return the answer to a request without the right key."""
    text = "Incorrect API key: the header must be `Authorization: Bearer KEY`."
    return RequestError(text, status=401, kind="authentication_error", code="invalid_api_key")


def read_flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return a flag; null and missing are the default."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise parameter_error(name, "must be true or false", code="invalid_type")
    return default if value is None else value


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
            raise unknown_parameter(name, known)
        allowed = _ONLY_AS[name]
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            may_be = " or ".join(json.dumps(one) for one in (*allowed, None))
            raise parameter_error(name, f"is not supported here; it may only be {may_be}", code="unsupported_value")


def unknown_parameter(name: str, known: Iterable[str]) -> RequestError:
    """Return the error for a parameter that does not exist."""
    near = did_you_mean(name, known)
    text = f"Unknown parameter: '{name}'. It would have no effect." + (f" ({near})" if near else "")
    return RequestError(text, param=name, code="unknown_parameter")


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


def check_tools(messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any], text: str) -> None:
    """Refuse tools that the chat template silently leaves out."""
    names = [("tools", tool["function"]["name"]) for tool in template.get("tools") or ()]
    for message in messages:
        names += [("messages", call["function"]["name"]) for call in message.get("tool_calls") or ()]
    for param, name in names:
        if name not in text:
            rule = f"the model's chat template leaves {name!r} out: set generator.chat_template to one with tools"
            raise parameter_error(param, rule, code="unsupported_value")
