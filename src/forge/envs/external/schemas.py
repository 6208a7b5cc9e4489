"""JSON schemas of other projects' tools, actions and observations: checks, and tools that are made of them.

`problem_in` covers what pydantic, MCP and OpenEnv write. Keywords that it does not know are not checked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

from forge.envs.tools import Tool, as_text
from forge.errors import OptionError

Schema = Mapping[str, Any]
_MAX_DEPTH: Final = 64
_NOTES: Final = frozenset(("title", "description", "default", "examples", "$defs", "$schema"))
"""Keywords that say nothing about values."""
_OBJECT_KEYS: Final = frozenset(("type", "properties", "required", "additionalProperties"))
_NUMBER: Final = (int, float)
_TYPES: Final[dict[str, Callable[[Any], bool]]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, _NUMBER) and not isinstance(value, bool),
    "integer": lambda value: (
        (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    ),
}
_BOUNDS: Final[tuple[tuple[str, type | tuple[type, ...], Callable[[Any, Any], bool], str], ...]] = (
    ("minimum", _NUMBER, lambda value, bound: value >= bound, "at least"),
    ("maximum", _NUMBER, lambda value, bound: value <= bound, "at most"),
    ("exclusiveMinimum", _NUMBER, lambda value, bound: value > bound, "above"),
    ("exclusiveMaximum", _NUMBER, lambda value, bound: value < bound, "below"),
    ("minLength", str, lambda value, bound: len(value) >= bound, "a length of at least"),
    ("maxLength", str, lambda value, bound: len(value) <= bound, "a length of at most"),
    ("minItems", list, lambda value, bound: len(value) >= bound, "a number of items of at least"),
    ("maxItems", list, lambda value, bound: len(value) <= bound, "a number of items of at most"),
)


def problem_in(value: Any, schema: Schema, path: str = "") -> str | None:
    """Return the first way in which a value does not fit a schema, with its path; None where it fits."""
    return next(_problems(value, schema, schema, path, 0), None)


class CompiledSchema:
    """A schema for many values: `problem` answers as `problem_in` does, and at once where the value fits."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._fits = _compile(schema, schema, frozenset())

    def problem(self, value: Any, path: str = "") -> str | None:
        """Return the first way in which a value does not fit, with its path; None where it fits."""
        return None if self._fits(value) else problem_in(value, self.schema, path)


def _compile(schema: Any, root: Schema, inside: frozenset[str]) -> Callable[[Any], bool]:
    """Return a function that says whether a value fits. Schemas of other shapes than usual are interpreted."""
    if not isinstance(schema, Mapping):
        return lambda value: schema is not False
    reference = str(schema.get("$ref", ""))
    schema = resolved(schema, root)
    keys, kind = set(schema) - _NOTES, schema.get("type")
    if not keys:
        return lambda value: True
    if keys == {"type"} and isinstance(kind, str) and kind in _TYPES:
        return _TYPES[kind]
    if reference not in inside:  # else it contains itself
        inside = inside | {reference} if reference else inside
        if keys == {"anyOf"}:
            choices = [_compile(each, root, inside) for each in schema["anyOf"]]
            return lambda value: any(fits(value) for fits in choices)
        if kind == "object" and keys <= _OBJECT_KEYS:
            return _compile_object(schema, root, inside)
    return lambda value: next(_problems(value, schema, root, "", 0), None) is None


def _compile_object(schema: Schema, root: Schema, inside: frozenset[str]) -> Callable[[Any], bool]:
    fields = {name: _compile(each, root, inside) for name, each in (schema.get("properties") or {}).items()}
    rest = _compile(schema.get("additionalProperties", True), root, inside)
    required = tuple(schema.get("required") or ())

    def fits(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        for name in required:
            if name not in value:
                return False
        return all(fields.get(name, rest)(each) for name, each in value.items())

    return fits


def resolved(schema: Schema, root: Schema) -> Schema:
    """Return the schema that a `$ref` of the same document names, or the schema itself."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return schema
    found: Any = root
    for key in (part.replace("~1", "/").replace("~0", "~") for part in reference[1:].split("/") if part):
        found = found.get(key) if isinstance(found, Mapping) else None
    rest = {key: each for key, each in schema.items() if key != "$ref"}
    return {**found, **rest} if isinstance(found, Mapping) else rest


def _problems(value: Any, schema: Any, root: Schema, path: str, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        yield _at(path, "it is nested too deeply")
        return
    if not isinstance(schema, Mapping):
        if schema is False:
            yield _at(path, "it is not allowed")
        return
    schema = resolved(schema, root)
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else []
    known = [name for name in names if name in _TYPES]
    if known and not any(_TYPES[name](value) for name in known):
        yield _at(path, f"expected {' or '.join(known)}, got {_shown(value)}")
        return
    if "const" in schema and not _equal(value, schema["const"]):
        yield _at(path, f"expected {_shown(schema['const'])}, got {_shown(value)}")
    if isinstance(schema.get("enum"), list) and not any(_equal(value, each) for each in schema["enum"]):
        yield _at(path, f"expected one of {_shown(schema['enum'])}, got {_shown(value)}")
    for keyword, kind, holds, words in _BOUNDS:
        bound = schema.get(keyword)
        if (
            isinstance(bound, _NUMBER)
            and isinstance(value, kind)
            and not isinstance(value, bool)
            and not holds(value, bound)
        ):
            yield _at(path, f"expected {words} {bound}, got {_shown(value)}")
    if isinstance(value, str) and isinstance(schema.get("pattern"), str) and not _matches(schema["pattern"], value):
        yield _at(path, f"expected text that matches {schema['pattern']}, got {_shown(value)}")
    for each in schema.get("allOf") or ():
        yield from _problems(value, each, root, path, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        choices = schema.get(keyword)
        if isinstance(choices, list) and choices:
            found = [next(_problems(value, each, root, path, depth + 1), None) for each in choices]
            if None not in found:
                yield _closest(value, choices, found, root)
    if isinstance(value, dict):
        yield from _problems_of_object(value, schema, root, path, depth)
    if isinstance(value, list):
        yield from _problems_of_array(value, schema, root, path, depth)


def _problems_of_object(value: dict[str, Any], schema: Schema, root: Schema, path: str, depth: int) -> Iterator[str]:
    properties = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in value:
            yield _at(_join(path, name), "it is missing")
    rest = schema.get("additionalProperties", True)
    for name, each in value.items():
        if name in properties:
            yield from _problems(each, properties[name], root, _join(path, name), depth + 1)
        elif rest is False:
            allowed = ", ".join(properties) or "none"
            yield _at(_join(path, name), f"there is no such field; fields: {allowed}")
        else:
            yield from _problems(each, rest, root, _join(path, name), depth + 1)


def _problems_of_array(value: list[Any], schema: Schema, root: Schema, path: str, depth: int) -> Iterator[str]:
    first = schema.get("prefixItems") or []
    rest = schema.get("items", True)
    for number, each in enumerate(value):
        yield from _problems(each, first[number] if number < len(first) else rest, root, f"{path}[{number}]", depth + 1)


def _closest(value: Any, choices: list[Any], found: list[str | None], root: Schema) -> str:
    """Return the problem of the choice that is meant: the first whose type fits, else the last."""
    for choice, problem in zip(choices, found, strict=True):
        kind = resolved(choice, root).get("type") if isinstance(choice, Mapping) else None
        if isinstance(kind, str) and kind in _TYPES and _TYPES[kind](value) and problem is not None:
            return problem
    return found[0] or ""


def _matches(pattern: str, value: str) -> bool:
    try:
        return re.search(pattern, value) is not None
    except re.error:  # a pattern of another dialect is not checked
        return True


def _equal(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _at(path: str, what: str) -> str:
    return f"{path or 'value'}: {what}"


def _shown(value: Any) -> str:
    text = as_text(value) if not isinstance(value, float) or math.isfinite(value) else repr(value)
    return (
        json.dumps(text) if isinstance(value, str) and len(text) <= 60 else text[:60] + ("…" if len(text) > 60 else "")
    )


class SchemaTool(Tool):
    """A tool of another project: name, description and JSON schema are given, and `function` gets the arguments as one
    mapping. Arguments that do not fit the schema are answered with text, as for every tool."""

    def __init__(
        self,
        function: Callable[[dict[str, Any]], Awaitable[Any]],
        *,
        name: str,
        description: str,
        parameters: Schema,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(_no_arguments, name=name, description=description, timeout_s=timeout_s)
        if parameters.get("type", "object") != "object":
            raise OptionError(
                "the arguments of a tool are not an object",
                path=f"tool {name}",
                value=parameters.get("type"),
                rule='a JSON schema of the type "object"',
                repair="correct the schema of the tool's server",
            )
        self.parameters = {"type": "object", "properties": {}, **parameters}
        self.schema = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": self.parameters},
        }
        self._call = function

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments, or raise `ValueError` with what is wrong."""
        problem = problem_in(dict(arguments), self.parameters)
        if problem is not None:
            raise ValueError(problem)
        return dict(arguments)

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """Call the function with checked arguments and return its answer as text."""
        return as_text(await self._call(dict(arguments)))


async def _no_arguments() -> None:
    """Stand for the function of a tool whose schema is given."""
