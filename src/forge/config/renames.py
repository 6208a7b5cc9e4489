"""Old configuration keys: a renamed or removed key still loads for one release, with a warning that names the new one.

A section lists its old keys in `ConfigModel.old_keys`. `load` moves them layer by layer, so that a file of an earlier
release can be combined with new keys on the command line; a section that is constructed in Python moves its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from forge.config.fields import elements_of, sections_of, walk_fields
from forge.config.paths import Path, child, format_path, parse_path, value_at
from forge.errors import MISSING


@dataclass(frozen=True)
class MovedKey:
    """An old key that was found. `new` is None for a removed key; `is_conflict` says that the new key was there too."""

    old: Path
    new: Path | None
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


def move_old_keys(annotation: Any, data: Any, path: Path = ()) -> Iterator[MovedKey]:
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


def _move_own_keys(section: type[BaseModel], data: dict[str, Any], path: Path = ()) -> Iterator[MovedKey]:
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
