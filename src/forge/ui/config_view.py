"""A run's configuration, key by key, beside that of another run or what its presets give."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forge.config.base import ConfigModel
from forge.config.command_line import SCHEMAS, detect_kind
from forge.config.loading import load, to_plain
from forge.config.problems import InvalidConfig, format_path, parse_path
from forge.config.yaml_text import read_yaml, write_yaml
from forge.errors import ForgeError
from forge.ui.run_files import CONFIG, read_text

_MAX_ROWS: Final = 20_000
_MAX_VALUE: Final = 2_000
_ATTEMPTS: Final = 40
_PRESETS: Final = (("model", "preset"), ("algorithm", "preset"), ("algorithm", "convention"))
Path_ = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """A configuration, and what was wrong with it."""

    data: Mapping[str, Any]
    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Preset:
    """What a configuration would be if only its presets, and the keys without a default, had been given.

    Attributes:
        values: by key, as text; empty where that cannot be known.
        name: of the presets.
        note: why there are no values.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    note: str = ""


def view_config(folder: Path, other: Path | None) -> dict[str, Any]:
    """Return a run's keys with their values, and what they are in `other`; None for what the presets give.

    Each row is `[key, value, other value]`, as text; null where there is no such key. Keys that only presets give are
    left out. `base` names what is compared
    with, and `note` says why nothing is.
    """
    found = read_config(folder)
    if other is None:
        preset = preset_of(found.data)
        base, name, note = preset.values, preset.name, preset.note
    else:
        read = read_config(other)
        base, name, note = dict(leaves(read.data)), other.name, read.note
    mine = dict(leaves(found.data))
    keys = list(mine) + ([] if other is None else [key for key in base if key not in mine])
    rows = [[key, mine.get(key), base.get(key) if base else None] for key in keys[:_MAX_ROWS]]
    return {"rows": rows, "base": name if base else "", "note": found.note or note, "text": found.text}


def leaves(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a configuration that have no keys below them, with their values as text."""
    for path, value in _walk(data, ()):
        yield format_path(path), _inline(value)


def _walk(value: Any, path: Path_) -> Iterator[tuple[Path_, Any]]:
    if isinstance(value, Mapping) and value and len(path) < 32:
        for key, below in value.items():
            yield from _walk(below, (*path, str(key)))
    elif path:
        yield path, value


def _inline(value: Any) -> str:
    try:
        if isinstance(value, list | dict):
            text = json.dumps(value, ensure_ascii=False)
        else:
            text = write_yaml(value).removesuffix("...\n").strip()
    except ValueError:  # a number with thousands of digits
        text = "(cannot be shown)"
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]} …"


def read_config(folder: Path) -> ReadConfig:
    """Return a run's configuration as it is in its folder."""
    text = read_text(folder / CONFIG)
    if text is None:
        return ReadConfig({}, "", f"There is no {CONFIG}.")
    document = read_yaml(text, source=CONFIG)
    if document.problems or not isinstance(document.data, Mapping):
        return ReadConfig({}, text, f"{CONFIG} could not be read in full, so only its text is shown.")
    return ReadConfig(document.data, text)


def preset_of(data: Mapping[str, Any]) -> Preset:
    """Return what a configuration would be if only its presets, and the keys without a default, had been given."""
    given: dict[str, Any] = {}
    for path in _PRESETS:
        value = _at(data, path)
        if isinstance(value, str):
            _put(given, path, value)
    names = [value for path in _PRESETS if isinstance(value := _at(given, path), str)]
    schema = SCHEMAS[detect_kind([], [f"{key}=0" for key in data]).kind]
    try:
        config = _complete(schema, given, data)
    except ForgeError as error:
        return Preset(note=f"It cannot be compared with its presets: {error.message}")
    return Preset(dict(leaves(to_plain(config))), " + ".join(names) or "the defaults")


def _complete(schema: type[ConfigModel], given: dict[str, Any], data: Mapping[str, Any]) -> ConfigModel:
    """Load `given`, and add the keys of `data` that a rule asks for, until every rule holds."""
    for _ in range(_ATTEMPTS):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return load(schema, defaults=given)
        except InvalidConfig as error:
            missing = [_parts(problem.path) for problem in error.problems]
            wanted = [path for path in missing if path and _at(data, path) != _at(given, path)]
            if not wanted:
                raise
            for path in wanted:
                _put(given, path, _at(data, path))
    return load(schema, defaults=given)


def _parts(path: str) -> Path_:
    try:
        return parse_path(path)
    except ValueError:
        return ()


def _at(data: Any, path: Path_) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _put(data: dict[str, Any], path: Path_, value: Any) -> None:
    for key in path[:-1]:
        below = data.setdefault(key, {})
        if not isinstance(below, dict):
            return
        data = below
    data[path[-1]] = value
