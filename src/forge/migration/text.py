"""A conversion as text: the report, and the configuration as a YAML file."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from forge.config.command_line import program_of
from forge.config.problems import shorten
from forge.config.yaml_text import write_yaml
from forge.migration.records import Computed, Conversion, Row

_WIDTH: Final = 110
_INDENT: Final = "      "
_PARTS: Final = (("maps", "Maps"), ("differs", "Differs"), ("none", "No counterpart"))


def report(conversion: Conversion, *, title: str) -> str:
    """Return the report of a conversion: what maps, what differs, what has no counterpart, what is left to do."""
    lines = [f"{conversion.source}: {title} {conversion.version} -> {conversion.schema.__name__}"]
    for part, heading in _PARTS:
        rows: tuple[Row, ...] = getattr(conversion, part)
        lines += ["", f"{heading}: {len(rows) or 'nothing'}"]
        for row in rows:
            lines += _row(row)
    if conversion.unchanged:
        lines += ["", *_wrapped(f"Without effect here, and nothing is lost: {', '.join(conversion.unchanged)}", "")]
    if conversion.unknown:
        lines += ["", f"Unknown keys, not converted: {len(conversion.unknown)}"]
        for each in conversion.unknown:
            lines.append(f"  {each.key}: {_inline(each.value)}  ({each.place})")
            lines += _wrapped(each.hint, _INDENT) if each.hint else []
    lines += ["", f"To fill in: {len(conversion.todo) or 'nothing'}"]
    for todo in conversion.todo:
        lines += [f"  {todo.path}", *_wrapped(todo.text, _INDENT)]
    return "\n".join(lines) + "\n"


def _row(row: Row) -> Iterator[str]:
    theirs = ", ".join(f"{key}: {_inline(value)}" for key, value in row.theirs.items())
    left = f"{theirs} (default)" if theirs and not row.given else theirs or "(always)"
    right = ", ".join(f"{key}: {_inline(value)}" for key, value in row.ours.items())
    arrow = f" -> {right}" if right else ""
    if len(left) + len(arrow) + 2 <= _WIDTH:
        yield f"  {left}{arrow}"
    else:
        yield from textwrap.wrap(left, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        if right:
            yield from textwrap.wrap(f"-> {right}", _WIDTH, initial_indent="    ", subsequent_indent="       ")
    if row.note:
        yield from _wrapped(row.note, _INDENT)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _inline(value: Any) -> str:
    """A value on one line, as YAML and JSON both read it."""
    if isinstance(value, str):
        return (
            value if value and value.isprintable() and len(value) <= _WIDTH else json.dumps(value, ensure_ascii=False)
        )
    if isinstance(value, Computed) or not isinstance(value, Mapping | list | tuple | bool | int | float | None):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return json.dumps(value)


def yaml_file(conversion: Conversion, *, title: str) -> str:
    """Return the configuration as a file, with what is left to do in its head."""
    lines = [f"# From {conversion.source} ({title} {conversion.version}), by `forge import`."]
    if conversion.todo:
        lines.append("# To fill in:")
        for todo in conversion.todo:
            lines += textwrap.wrap(
                f"{todo.path}: {todo.text}",
                _WIDTH,
                initial_indent="#   ",
                subsequent_indent="#     ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join([*lines, write_yaml(dict(conversion.config))])


def next_steps(conversion: Conversion, file: str) -> str:
    """Return the commands that check and run a configuration."""
    program = program_of(conversion.kind)
    return f"Check it:  forge config check {file}\nRun it:    forge run {program} --config {file}\n"


def plain(conversion: Conversion) -> dict[str, Any]:
    """Return a conversion as data for JSON."""
    return {
        "project": conversion.project,
        "version": conversion.version,
        "kind": conversion.kind,
        "source": conversion.source,
        "config": conversion.config,
        **{part: [_plain_row(row) for row in getattr(conversion, part)] for part, _ in _PARTS},
        "unchanged": list(conversion.unchanged),
        "unknown": [
            {"key": each.key, "value": _value(each.value), "place": each.place, "hint": each.hint}
            for each in conversion.unknown
        ],
        "todo": [{"path": each.path, "text": each.text} for each in conversion.todo],
    }


def _plain_row(row: Row) -> dict[str, Any]:
    return {
        "theirs": {key: _value(value) for key, value in row.theirs.items()},
        "given": sorted(row.given),
        "ours": dict(row.ours),
        "note": row.note,
    }


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else {"computed": shorten(str(value))}
