"""From what pydantic says of a value to what a person can act on: path, rule, repair, and who set it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from forge.config.fields import field_at, fields_below, walk_fields
from forge.config.layers import Origin
from forge.config.problems import KeyPath, Problem, child, format_path, parse_path, value_at
from forge.config.yaml_text import read_yaml
from forge.errors import MISSING, did_you_mean, nearest


def diagnose(
    error: ValidationError, *, schema: type[BaseModel], data: Mapping[str, Any], origins: Mapping[KeyPath, Origin]
) -> list[Problem]:
    """One problem for each path that is wrong, in the order of the schema."""
    found: dict[KeyPath, Problem] = {}
    for details in error.errors(include_url=False):
        path = _place(details, data)
        rule, repair = _explain(details, path, schema)
        is_key = details["loc"][-1:] == ("[key]",)
        if path in found:  # the branches of a union each have their say
            earlier = found[path]
            if rule not in earlier.rule.split(", or "):
                found[path] = Problem(**{**vars(earlier), "rule": f"{earlier.rule}, or {rule}"})
            continue
        origin = origins.get(path)
        found[path] = Problem(
            path=format_path(path),
            value=path[-1] if is_key else value_at(data, path),
            rule=f"the key {rule}" if is_key else rule,
            repair=repair,
            origin=None if origin is None else str(origin),
        )
    return list(found.values())


def _place(details: ErrorDetails, data: Any) -> KeyPath:
    """The path in the data: pydantic also puts names of union branches and a mark for keys into its location."""
    path: list[str | int] = []
    here = data
    for position, key in enumerate(details["loc"]):
        below = child(here, key)
        if below is not MISSING:
            here = below
        elif details["type"] != "missing" or position < len(details["loc"]) - 1:
            continue
        path.append(key)
    field = (details.get("ctx") or {}).get("key") if details["type"] == "broken_rule" else None
    return (*path, *(parse_path(field) if field else ()))


def _explain(details: ErrorDetails, path: KeyPath, schema: type[BaseModel]) -> tuple[str, str]:
    kind, value, context = details["type"], details["input"], details.get("ctx") or {}
    dotted = format_path(path)
    match kind:
        case "extra_forbidden":
            return _explain_unknown(path, schema)
        case "broken_rule":
            return context["rule"], context["repair"]
        case "missing":
            return "is required", f"set it: {dotted}=VALUE{_meaning(path, schema)}"
        case "literal_error":
            choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
            repair = did_you_mean(str(value), choices) or "choose one of them"
            return f"must be one of {', '.join(choices)}", repair
        case "int_type" | "float_type" | "bool_type" | "string_type" | "int_from_float":
            return _explain_scalar(kind, value)
        case "model_type" | "dict_type" | "model_attributes_type" | "mapping_type":
            repair = (
                "write keys below it, or remove the line" if value is None else f"set a key below it: {dotted}.KEY=…"
            )
            return "must be a mapping of keys to values", repair
        case "tuple_type" | "list_type" | "set_type" | "frozen_set_type":
            return "must be a list", f"give the whole list: {dotted}=[…]"
        case "finite_number":
            return "must be a finite number", "write a number; null, where it is allowed, stands for no limit"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input should ")
    message = f"must {message}" if message.startswith("be ") else message
    return message, f"choose a value that fits{_meaning(path, schema)}"


def _explain_scalar(kind: str, value: object) -> tuple[str, str]:
    if kind == "string_type":
        quoted = "" if isinstance(value, Mapping | list) or value is None else f': "{_plain(value)}"'
        return "must be text", f"put it in quotes{quoted}" if quoted else "write text"
    if kind == "bool_type":
        return "must be true or false", "write true or false, without quotes"
    what, example = ("a whole number", "1000") if kind.startswith("int") else ("a number", "0.5")
    meant = read_yaml(value, source="").data if isinstance(value, str) else value
    if isinstance(meant, float) and kind.startswith("int") and meant.is_integer():
        meant = int(meant)
    if (
        isinstance(meant, bool)
        or not isinstance(meant, int | float)
        or (isinstance(meant, float) and what != "a number")
    ):
        return f"must be {what}", f"write {what} such as {example}"
    return f"must be {what}", f"write {meant!r}, without quotes" if isinstance(value, str) else f"write {meant!r}"


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _explain_unknown(path: KeyPath, schema: type[BaseModel]) -> tuple[str, str]:
    *above, key = path
    siblings = fields_below(schema, above)
    where = format_path(tuple(above)) or "the configuration"
    everywhere: dict[str, list[str]] = {}
    for other, _ in walk_fields(schema):
        everywhere.setdefault(other[-1], []).append(".".join(other))
    near = [format_path((*above, name)) for name in nearest(str(key), siblings)]
    elsewhere = everywhere.get(str(key), [])
    if not near and not elsewhere:
        elsewhere = [other for name in nearest(str(key), everywhere) for other in everywhere[name]]
    suggestions = [*near, *elsewhere][:3]
    rule = f"is not a key of {where}"
    if suggestions:
        return rule, "did you mean " + " or ".join(f"`{name}`" for name in suggestions) + "?"
    return rule, f"use one of {', '.join(siblings)}" if siblings else "remove it"


def _meaning(path: KeyPath, schema: type[BaseModel]) -> str:
    field = field_at(schema, path)
    return f" ({field.description.rstrip('.')})" if field is not None and field.description else ""
