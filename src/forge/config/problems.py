"""What is wrong with a configuration, and where: dotted paths, one record for each fault, and the error that carries
them all.

`launcher.slurm.nodes` is three keys. A key that itself holds a dot is written in quotes, `labels."example.org/team"`,
and an element of a list by its index, `launcher.hosts.0`.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from forge.errors import MISSING, ConfigError, did_you_mean

KeyPath: TypeAlias = tuple[str | int, ...]

_PLAIN = re.compile(r"[^\s.=\"'~]+")
_SEGMENT = re.compile(r"""\s*(?:"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>[^']*)'|(?P<plain>[^.\s"']+))\s*""")
_ESCAPE = re.compile(r"\\(.)")


def child(place: Any, key: str | int) -> Any:
    """What stands in a mapping or a list at a key or an index; `MISSING` where nothing does."""
    if isinstance(place, Mapping):
        return place.get(key, MISSING)
    if isinstance(place, list) and isinstance(key, int) and key < len(place):
        return place[key]
    return MISSING


def value_at(place: Any, path: KeyPath) -> Any:
    """Return what stands at a path; `MISSING` where nothing does."""
    for key in path:
        place = child(place, key)
    return place


def format_path(path: KeyPath) -> str:
    """The dotted text of a path; `parse_path` reads it back. The root is the empty text."""
    return ".".join(_quote(str(key)) for key in path)


def parse_path(text: str) -> tuple[str, ...]:
    """The keys of a dotted path. Raises ValueError that says what is wrong with the text."""
    keys: list[str] = []
    position = 0
    while True:
        match = _SEGMENT.match(text, position)
        if match is None:
            raise ValueError(
                "a key is empty" if position >= len(text) or text[position] == "." else "a key is not closed"
            )
        keys.append(_key(match))
        position = match.end()
        if position == len(text):
            return tuple(keys)
        if text[position] != ".":
            raise ValueError(f"a dot is expected before {text[position:]!r}")
        position += 1


def split_at_equals(text: str) -> tuple[str, str | None]:
    """Cut at the first `=` that is not inside a quoted key; None when there is none."""
    quote = ""
    escaped = False
    for position, character in enumerate(text):
        if escaped:
            escaped = False
        elif quote:
            escaped = character == "\\" and quote == '"'
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "=":
            return text[:position], text[position + 1 :]
    return text, None


def _key(match: re.Match[str]) -> str:
    if (double := match["double"]) is not None:
        return _ESCAPE.sub(r"\1", double)
    single: str | None = match["single"]
    return match["plain"] if single is None else single


def _quote(key: str) -> str:
    if _PLAIN.fullmatch(key):
        return key
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One fault. `path` is the dotted key, or the file or override that could not be read."""

    path: str
    rule: str
    repair: str
    value: object = MISSING
    origin: str | None = None
    """Who set it, such as `base.yaml:12`; None for a default."""

    def __str__(self) -> str:
        lines = [self.path or "(the whole configuration)"]
        if self.value is not MISSING:
            lines.append(f"    value:  {shorten(self.value)}")
        lines.append(f"    rule:   {self.rule}")
        lines.append(f"    repair: {self.repair}")
        if self.origin is not None:
            lines.append(f"    set by: {self.origin}")
        return "\n".join(lines)


class InvalidConfig(ConfigError):
    """Everything found wrong in one go: `problems` has each; path, value, rule and repair are those of the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        first = problems[0]
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        text = "\n".join([f"The configuration has {count}:", *(f"  {problem}" for problem in problems)])
        super().__init__(text, path=first.path, value=first.value, rule=first.rule, repair=first.repair)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return self.message


def shorten(value: object, limit: int = 120) -> str:
    """The value's repr, cut so that one huge value cannot hide the rest of a message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def named_arguments(function: Callable[..., Any], *, num_given: int = 0) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be given by name, without the first `num_given`, which the caller gives.

    Raises ValueError for a function of C without a signature.
    """
    parameters = list(inspect.signature(function).parameters.values())
    positional = [each for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    return {each.name: each for each in parameters if each.kind in _NAMED and each not in positional[:num_given]}


def argument_problems(
    function: Callable[..., Any],
    args: Mapping[str, Any],
    *,
    path: str,
    what: str,
    num_given: int = 0,
    offered: Collection[str] = (),
) -> list[Problem]:
    """Return what is wrong with arguments: names that a function does not have or lacks, values of another type.

    The first `num_given` parameters are the caller's, and those named in `offered` need not be given. `what` names the
    function in messages.
    """
    try:
        known = named_arguments(function, num_given=num_given)
    except ValueError:
        return []  # A function of C without a signature: only a call can tell.
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    problems = []
    for name in args:
        if name not in known and not takes_any:
            own = [each for each in known if each not in offered]
            rule = f"the arguments are {', '.join(own)}" if own else f"{what} takes no arguments"
            repair = did_you_mean(name, known) or "remove it"
            problems.append(Problem(path=f"{path}.{name}", value=args[name], rule=rule, repair=repair))
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in args and name not in offered:
            problems.append(Problem(path=f"{path}.{name}", rule=f"{what} needs this argument", repair="add it"))
    present = {name: value for name, value in args.items() if name in known}
    return [*problems, *_type_problems(function, present, path=path)]


def _type_problems(function: Callable[..., Any], args: Mapping[str, Any], *, path: str) -> Iterator[Problem]:
    hints = _hints(function) if args else {}
    for name, value in args.items():
        if name not in hints:
            continue
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=True)
        except (PydanticSchemaGenerationError, PydanticUserError):
            continue  # pydantic cannot check this type
        except ValidationError as error:
            rules = dict.fromkeys(fault["msg"] for fault in error.errors(include_url=False, include_input=False))
            yield Problem(
                path=f"{path}.{name}", value=value, rule="; or: ".join(rules), repair="write a value of that kind"
            )


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types that a function declares; none where they cannot be read."""
    plain = inspect.unwrap(function)
    while hasattr(plain, "func"):
        plain = plain.func
    if inspect.isclass(plain):
        plain = plain.__init__
    elif not inspect.isroutine(plain):
        plain = type(plain).__call__
    try:
        return typing.get_type_hints(plain, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}
