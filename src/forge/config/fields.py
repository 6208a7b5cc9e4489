"""A schema seen as a tree of keys: what may stand below a key, and every key there is."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ANY_NAME = "<name>"
ANY_INDEX = "<index>"


def sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a value of this type may be."""
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            yield option


def elements_of(annotation: Any) -> Iterator[tuple[str, Any]]:
    """What the elements of a mapping or sequence type are, each with the placeholder for its key."""
    for option in _options(annotation):
        origin, arguments = get_origin(option), get_args(option)
        if not isinstance(origin, type) or not arguments:
            continue
        if issubclass(origin, Mapping):
            yield ANY_NAME, arguments[1]
        elif issubclass(origin, Sequence | set | frozenset):
            yield from ((ANY_INDEX, argument) for argument in arguments if argument is not Ellipsis)


def fields_below(annotation: Any, path: Sequence[str | int]) -> dict[str, FieldInfo]:
    """The keys that may stand at a path below a value of this type; empty where no section is."""
    if not path:
        return {name: info for section in sections_of(annotation) for name, info in section.model_fields.items()}
    head, rest = path[0], path[1:]
    found: dict[str, FieldInfo] = {}
    for section in sections_of(annotation):
        if head in section.model_fields:
            found |= fields_below(section.model_fields[str(head)].annotation, rest)
    for _, element in elements_of(annotation):
        found |= fields_below(element, rest)
    return found


def field_at(schema: type[BaseModel], path: Sequence[str | int]) -> FieldInfo | None:
    """The field that a path ends at, or None when it ends at no field."""
    return fields_below(schema, path[:-1]).get(str(path[-1])) if path else None


def walk_fields(
    annotation: Any, path: tuple[str, ...] = (), above: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every field with its path, sections before what they hold; a section within itself is not entered again."""
    for section in sections_of(annotation):
        if section in above:
            continue
        for name, info in section.model_fields.items():
            yield (*path, name), info
            yield from walk_fields(info.annotation, (*path, name), (*above, section))
    for placeholder, element in elements_of(annotation):
        yield from walk_fields(element, (*path, placeholder), above)


def _options(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _options(get_args(annotation)[0])
    elif origin is Union or origin is types.UnionType:
        for option in get_args(annotation):
            yield from _options(option)
    else:
        yield annotation
