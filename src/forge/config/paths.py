"""Dotted paths: how a place in a configuration is written, in errors and on the command line.

`launcher.slurm.nodes` is three keys. A key that itself holds a dot is written in quotes, `labels."example.org/team"`,
and an element of a list by its index, `launcher.hosts.0`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from forge.errors import MISSING

Path: TypeAlias = tuple[str | int, ...]

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


def value_at(place: Any, path: Path) -> Any:
    """Return what stands at a path; `MISSING` where nothing does."""
    for key in path:
        place = child(place, key)
    return place


def format_path(path: Path) -> str:
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
