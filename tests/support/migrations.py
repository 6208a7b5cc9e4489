"""Configurations of other projects, converted in tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.config import ForgeConfig, load
from forge.config.problems import parse_path, value_at
from forge.migration import Conversion, Options, convert_file
from forge.migration.records import Row


def converted(project: str, given: Mapping[str, Any] | str, folder: Path, **options: Any) -> Conversion:
    """Convert keys, or the text of a file whose form its first line says: `#!…python`, `#!…bash`, or YAML."""
    text = given if isinstance(given, str) else json.dumps(given)
    name = (
        "train.py" if text.startswith("#!/usr/bin/env python") else "run.sh" if text.startswith("#!") else "theirs.yaml"
    )
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return convert_file(project, path, Options(**options))


def ours(conversion: Conversion, path: str) -> Any:
    """Return what a conversion sets at a dotted key of ours."""
    return value_at(conversion.config, parse_path(path))


def resolved(conversion: Conversion) -> ForgeConfig:
    """Return the whole configuration; it must be valid."""
    return load(conversion.schema, defaults=conversion.config)


def row_of(conversion: Conversion, key: str) -> Row:
    """Return the line of the report that has a key of theirs."""
    return next(row for row in conversion.rows if key in row.theirs)


def part_of(conversion: Conversion, key: str) -> str:
    """Return the part of the report that has a key of theirs."""
    parts = {"maps": conversion.maps, "differs": conversion.differs, "none": conversion.none}
    return next(part for part, rows in parts.items() if any(key in row.theirs for row in rows))


def todo_of(conversion: Conversion) -> dict[str, str]:
    """Return what is left to fill in, by our dotted keys."""
    return {todo.path: todo.text for todo in conversion.todo}
