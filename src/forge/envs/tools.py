"""Tools: functions that the policy may call.

The schema that the policy sees comes from the function's annotations and docstring. Arguments are checked against it
before the function runs. What the policy got wrong (unknown tool, bad arguments, a call that raises or takes too long)
comes back to it as text. What the infrastructure got wrong is raised as `Fault`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, Protocol, overload

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from forge.envs.limits import EpisodeOver, Fault, ReplayMismatch, reason_of
from forge.envs.tool_process import ToolProcessFailed, call_in_process, check_importable
from forge.envs.tool_threads import ToolExit, call_on_thread, contain
from forge.errors import ActorFailure, EngineDead, OptionError, ServiceStopped
from forge.types import MalformedCall, ToolCall

_NAME: Final = re.compile(r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")

ToolError = Literal["malformed", "unknown_tool", "bad_arguments", "raised", "timeout", "parallel_call"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool call gave.

    Attributes:
        call: the call.
        text: what the policy reads.
        error: what the policy did wrong, or how the tool failed on what it asked for; None if nothing did.
        seconds: how long it took.
    """

    call: ToolCall | MalformedCall
    text: str
    error: ToolError | None = None
    seconds: float = 0.0

    def as_message(self) -> dict[str, Any]:
        """Return the message that answers the call."""
        message = {"role": "tool", "tool_call_id": self.call.id, "content": self.text}
        return message if isinstance(self.call, MalformedCall) else {**message, "name": self.call.name}


class Tool:
    """A function that the policy may call. Make one with `tool`; calling it calls the function.

    Attributes:
        name, description: what the policy sees.
        timeout_s: seconds that a call may take; None for the episode's own limit.
        schema: the entry of the chat template's `tools`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float | None = None,
        process: bool = False,
    ) -> None:
        if not callable(function):
            raise OptionError(
                "a tool is a function",
                path="tool",
                value=function,
                rule="a function, a method, or an object with __call__",
                repair="decorate a function with @tool, or @tool(name=…)",
            )
        self.function = function
        named = function.func if isinstance(function, partial) else function
        self.name: str = name or str(getattr(named, "__name__", type(named).__name__))
        if not _NAME.match(self.name):
            raise OptionError(
                "a tool cannot have this name",
                path="tool(name=)",
                value=self.name,
                rule="letters, digits, _, . and -, at most 64, not a digit first",
                repair="give @tool(name=…)",
            )
        if timeout_s is not None and not timeout_s > 0:
            raise OptionError(
                "a tool's time limit is not positive",
                path=f"tool {self.name}: timeout_s",
                value=timeout_s,
                rule="a number of seconds above 0",
                repair="leave it out for the episode's own limit",
            )
        documented, arguments = _read_docstring(inspect.getdoc(named) or "")
        self.description = description if description is not None else documented
        self.timeout_s = timeout_s
        self.process = process
        if process:
            check_importable(function, self.name)
        self._model = _arguments_model(function, self.name, arguments)
        parameters = self._model.model_json_schema()
        parameters.pop("title", None)
        for entry in parameters.get("properties", {}).values():
            entry.pop("title", None)
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Tool:
        """Return the tool of an object, where it was declared on a method."""
        if instance is None:
            return self
        bound = object.__new__(Tool)
        bound.__dict__.update(self.__dict__)
        bound.function = self.function.__get__(instance, owner)
        return bound

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments in the types that the function declares, or raise `ValueError` with what is wrong."""
        try:
            found = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise ValueError("; ".join(problems)) from None
        return {each.alias or name: getattr(found, name) for name, each in type(found).model_fields.items()}

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """Call the function with checked arguments and return its answer as text."""
        if self.process:
            return await call_in_process(self.function, arguments)
        if inspect.iscoroutinefunction(self.function):
            return as_text(await contain(self.function(**arguments)))
        value = await call_on_thread(partial(self.function, **arguments), name=self.name)
        if inspect.isawaitable(value):  # an object whose __call__ is a coroutine function
            value = await contain(value)
        return as_text(value)


@overload
def tool(function: Callable[..., Any]) -> Tool: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = None,
    process: bool = False,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = None,
    process: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a function a tool: `@tool`, or `@tool(timeout_s=5)`.

    The docstring is the description; a section `Args:` (or `Parameters`, underlined, or `:param x:`) describes
    arguments. Every parameter needs an annotation. A
    coroutine function is cancelled when its time is up. A plain function runs on a thread of its own, which cannot be
    ended. With `process`, every call runs in a process of its own, which is killed when its time is up: for functions
    that may hang, crash or eat memory. For hostile code use `forge.sandbox`.
    """

    def make(function: Callable[..., Any]) -> Tool:
        return Tool(function, name=name, description=description, timeout_s=timeout_s, process=process)

    return make if function is None else make(function)


def as_tools(tools: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """Return tools by name. Plain functions become tools. Two of one name raise."""
    found: dict[str, Tool] = {}
    for each in tools:
        made = each if isinstance(each, Tool) else Tool(each)
        if made.name in found:
            raise OptionError(
                "two tools have the same name",
                path="tools",
                value=made.name,
                rule="each name once",
                repair="give one of them another with @tool(name=…)",
            )
        found[made.name] = made
    return found


async def run_call(call: ToolCall | MalformedCall, tools: Mapping[str, Tool], *, timeout_s: float | None) -> ToolResult:
    """Run one call. Whatever a tool raises comes back as text for the policy, except `Fault`, cancellation, and what
    ends an episode whose agent the tool uses."""
    if isinstance(call, MalformedCall):
        return ToolResult(call, f"Error: this tool call cannot be read: {call.reason}.", "malformed")
    known = tools.get(call.name)
    if known is None:
        names = ", ".join(sorted(tools)) or "none"
        return ToolResult(call, f"Error: there is no tool {call.name!r}. Tools: {names}.", "unknown_tool")
    try:
        arguments = known.check(call.arguments)
    except ValueError as error:
        return ToolResult(call, f"Error: bad arguments of {call.name}: {error}.", "bad_arguments")
    loop = asyncio.get_running_loop()
    began, limit_s = loop.time(), known.timeout_s if known.timeout_s is not None else timeout_s
    try:
        async with asyncio.timeout(limit_s) as timer:
            result = ToolResult(call, await known.run(arguments))
    except Exception as error:  # whatever a tool raises is its answer
        reason = reason_of(error.error if isinstance(error, ToolExit) else error)
        if isinstance(reason, Fault | EpisodeOver | ReplayMismatch):  # of the tool's server, or of an agent in the tool
            raise reason from (None if reason is error else error)
        if isinstance(reason, ActorFailure | EngineDead | ServiceStopped):
            raise Fault(f"{call.name} lost a process: {reason.message}", kind="service") from error
        if timer.expired():
            result = ToolResult(call, f"Error: {call.name} took longer than {limit_s:g} s.", "timeout")
        elif isinstance(error, ToolProcessFailed):
            result = ToolResult(call, f"Error: {call.name} failed: {error.message}", "raised")
        else:
            result = ToolResult(call, _raised(call.name, error), "raised")
    return replace(result, seconds=loop.time() - began)


class TextCodec(Protocol):
    """What cutting needs from a tokenizer."""

    def encode_rendered(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def cut_middle(text: str, max_tokens: int | None, codec: TextCodec) -> str:
    """Return a text of more than `max_tokens` tokens as its beginning, a note and its end; any other as it is."""
    if max_tokens is None:
        return text
    longest = 16 * max_tokens  # characters at each end: what is far too long is not tokenised as a whole
    shown = text if len(text) <= 2 * longest else text[:longest] + text[-longest:]
    ids = codec.encode_rendered(shown)
    if len(ids) <= max_tokens and shown is text:
        return text
    half = max(max_tokens // 2, 1)
    note = f"\n[… the output has {len(text)} characters; its middle is left out …]\n"
    return codec.decode(ids[:half]) + note + codec.decode(ids[-half:])


def as_text(value: object) -> str:
    """Return a tool's answer as text: text as it is, bytes decoded, everything else as JSON where it can be."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _raised(name: str, error: BaseException) -> str:
    error = error.error if isinstance(error, ToolExit) else error
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - the message of a tool's own exception may raise as well
        message = "(it has no readable message)"
    return as_text(f"Error: {name} failed: {type(error).__name__}: {message[:2000]}"[:2000])


def _arguments_model(function: Callable[..., Any], name: str, described: Mapping[str, str]) -> type[BaseModel]:
    """Return a model with a field for each parameter. Its own names of the fields never clash with the model's."""
    fields: dict[str, Any] = {}
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (NameError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise _cannot_describe(name, value=function, reason=f"{type(error).__name__}: {error}") from error
    for each in parameters.values():
        if each.name == "self":
            continue
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY) or each.annotation is each.empty:
            raise OptionError(
                "a parameter of a tool cannot be described to the policy",
                path=f"tool {name}: {each.name}",
                value=str(each),
                rule="a named parameter with an annotation",
                repair="annotate it, and take no *args or **kwargs",
            )
        default = ... if each.default is each.empty else each.default
        entry = Field(default, alias=each.name, description=_describe(each.annotation, described.get(each.name)))
        fields[f"argument_{len(fields)}"] = (each.annotation, entry)
    try:
        made: type[BaseModel] = create_model(
            f"{name}_arguments", __config__=ConfigDict(extra="forbid", strict=False), **fields
        )
        made.model_json_schema()
    except PydanticUserError as error:
        raise _cannot_describe(name, value=function, reason=error.message.splitlines()[0]) from error
    return made


def _describe(annotation: Any, documented: str | None) -> str | None:
    """Return what the docstring says of a parameter, or else a description in its `Annotated`."""
    if documented is not None:
        return documented
    for each in getattr(annotation, "__metadata__", ()):
        found = each if isinstance(each, str) else getattr(each, "description", None)
        if isinstance(found, str):
            return found
    return None


def _cannot_describe(name: str, *, value: object, reason: str) -> OptionError:
    return OptionError(
        f"the parameters of a tool cannot be described to the policy: {reason}",
        path=f"tool {name}",
        value=value,
        rule="annotations that have a JSON schema: numbers, text, lists, dicts, Literal, Enum, pydantic models",
        repair="change the annotation; what the policy must not choose belongs in a closure or an object",
    )


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into the description and what it says of each argument: in a section `Args:` (Google), in one
    that is underlined (NumPy), or in fields `:param x:` (reST)."""
    for style in (_GOOGLE, _NUMPY, _REST):
        start = style.start.search(text)
        if start is not None:
            described = _described(text[start.end() if style.has_title else start.start() :], style)
            return text[: start.start()].strip(), described
    return text.strip(), {}


@dataclass(frozen=True, slots=True)
class _DocStyle:
    """How docstrings describe arguments: where that starts, an argument's own line, and the line after the last."""

    start: re.Pattern[str]
    argument: re.Pattern[str]
    end: re.Pattern[str]
    has_title: bool = True


_GOOGLE: Final = _DocStyle(
    re.compile(r"^Arg(?:ument)?s:[ \t]*\n", re.MULTILINE),
    re.compile(r"^\s+(?P<name>\w+)(?:\s*\([^)]*\))?:\s*(?P<text>.*)$"),
    re.compile(r"^\S"),
)
_NUMPY: Final = _DocStyle(
    re.compile(r"^Parameters[ \t]*\n-{3,}[ \t]*\n", re.MULTILINE),
    re.compile(r"^(?P<name>\w+)\s*(?::.*)?$(?P<text>)"),
    re.compile(r"^\w[\w ]*\n-{3,}", re.MULTILINE),
)
_REST: Final = _DocStyle(
    re.compile(r"^:(?:param|parameter|arg|argument|type|returns?|rtype|raises?)\b.*:", re.MULTILINE),
    re.compile(r"^:(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?(?P<name>\w+):\s*(?P<text>.*)$"),
    re.compile(r"^:(?!param|parameter|arg)"),
    has_title=False,
)


def _described(text: str, style: _DocStyle) -> dict[str, str]:
    arguments: dict[str, str] = {}
    last = ""
    for number, line in enumerate(lines := text.splitlines()):
        found = style.argument.match(line)
        if style.end.match("\n".join(lines[number : number + 2])):
            last = ""
            if style.has_title:
                break  # another section
        elif found:
            last = found["name"]
            arguments[last] = found["text"].strip()
        elif line.strip() and last:
            arguments[last] = f"{arguments[last]} {line.strip()}".strip()
    return arguments
