"""A schema seen as a tree of keys: what may stand below a key, and every key there is."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from forge.config.problems import KeyPath, child, format_path, parse_path, value_at
from forge.errors import MISSING

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


@dataclass(frozen=True)
class MovedKey:
    """An old key that was found. `new` is None for a removed key; `is_conflict` says that the new key was there too."""

    old: KeyPath
    new: KeyPath | None
    value: object
    is_conflict: bool = False

    @property
    def message(self) -> str:
        """What the warning says."""
        old = format_path(self.old)
        if self.new is None:
            return f"{old} is no longer a configuration key and has no effect. Remove it."
        return f"{old} is now {format_path(self.new)}. The old key stops working in the next release."

    @property
    def rule(self) -> str:
        """What a conflict breaks."""
        return f"is the old name of {format_path(self.new or ())}, which is given too"

    @property
    def needs_warning(self) -> bool:
        """Whether the user has to know: a removed key without a value, as saved files have it, is simply dropped."""
        return self.new is not None or self.value not in (None, {}, [])


def old_keys(section: type[BaseModel]) -> dict[str, str | None]:
    """Return the old keys of a section and of the classes that it derives from, which may not be its keys again."""
    found: dict[str, str | None] = {}
    for base in section.__mro__:
        found = {**vars(base).get("old_keys", {}), **found}
    return {key: new for key, new in found.items() if key not in section.model_fields}


@cache
def has_old_keys(section: type[BaseModel]) -> bool:
    """Return whether a section, or anything below it, has old keys."""
    below = (each for _, info in walk_fields(section) for each in sections_of(info.annotation))
    return any(old_keys(each) for each in (section, *below))


def move_old_keys(annotation: Any, data: Any, path: KeyPath = ()) -> Iterator[MovedKey]:
    """Move the old keys in plain data of this type to their new places, in place, at every depth."""
    if isinstance(data, dict):
        for section in sections_of(annotation):
            yield from _move_own_keys(section, data, path)
            for name in [name for name in data if name in section.model_fields]:
                yield from move_old_keys(section.model_fields[name].annotation, data[name], (*path, name))
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for _, element in elements_of(annotation):
        for key, item in items:
            yield from move_old_keys(element, item, (*path, key))


def _move_own_keys(section: type[BaseModel], data: dict[str, Any], path: KeyPath = ()) -> Iterator[MovedKey]:
    """Move the old keys that a section itself lists, in place. A section below may be given as an object."""
    for old_text, new_text in old_keys(section).items():
        old, new = parse_path(old_text), None if new_text is None else parse_path(new_text)
        holder = value_at(data, old[:-1])
        value = child(holder, old[-1])
        target = data if new is None or value is MISSING else _section_at(data, new[:-1])
        if value is not MISSING and target is not None:
            del holder[old[-1]]
            is_conflict = new is not None and new[-1] in target
            if new is not None and not is_conflict:
                target[new[-1]] = value
            yield MovedKey((*path, *old), None if new is None else (*path, *new), value, is_conflict)
        for depth in range(len(old) - 1, 0, -1):  # a section that is empty now goes too
            if value_at(data, old[:depth]) == {}:
                del value_at(data, old[: depth - 1])[old[depth - 1]]


def _section_at(data: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the mapping at a path, made where there is none; None where something else stands."""
    for key in path:
        below = data.get(key, MISSING)
        if below is MISSING:
            below = data[key] = {}
        elif isinstance(below, BaseModel):
            below = data[key] = {name: getattr(below, name) for name in below.model_fields_set}
        if not isinstance(below, dict):
            return None
        data = below
    return data


def thaw(value: object) -> Any:
    """Return the value with every mapping in it as a dict, and every sequence as a list, that can be changed."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    return [thaw(item) for item in value] if isinstance(value, list | tuple) else value
