"""Load a configuration from its layers, explain it, and save it with the run that it belongs to."""

from __future__ import annotations

import copy
import json
import os
import uuid
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from forge._version import __version__
from forge.config.base import ConfigModel, FrozenDict
from forge.config.diagnosis import diagnose
from forge.config.fields import MovedKey, fields_below, move_old_keys
from forge.config.layers import (
    DEFAULT,
    Assignment,
    Layer,
    Origin,
    Removal,
    Tree,
    parse_override,
    preset_names,
    read_preset,
)
from forge.config.problems import InvalidConfig, KeyPath, Problem, format_path, value_at
from forge.config.yaml_text import read_yaml, write_yaml
from forge.errors import MISSING, ConfigError, did_you_mean

FILE_NAME = "config.yaml"


def to_plain(config: ConfigModel) -> dict[str, Any]:
    """The configuration as dicts, lists and scalars, defaults included."""
    return config.model_dump(mode="json", by_alias=True, warnings=False)


def dump(config: ConfigModel) -> str:
    """YAML that `load` with the same schema reads back to an equal configuration.

    Every key is written, defaults and nulls too, so that the text means the same after a default or a preset changes.
    """
    return write_yaml(to_plain(config))


def _keep_other(target: Path, text: str) -> None:
    """Keep an earlier run's configuration that differs under a name of its own: `config.1.yaml` and so on."""
    if not target.exists() or target.read_bytes() == text.encode():
        return
    number = 1
    while (aside := target.with_name(f"config.{number}.yaml")).exists():
        number += 1
    os.link(target, aside)


def save(config: ConfigModel, run_dir: str | os.PathLike[str]) -> Path:
    """Write `config.yaml` into the run's folder, which is made where needed, and return its path.

    The file appears whole or not at all: a reader never sees half of it. An earlier one that differs is kept beside it
    as `config.1.yaml`, `config.2.yaml` and so on.
    """
    target = Path(run_dir) / FILE_NAME
    text = f"# The resolved configuration of this run, written by forge {__version__}.\n{dump(config)}"
    temporary = target.with_name(f".{FILE_NAME}.{uuid.uuid4().hex}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            _keep_other(target, text)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The configuration could not be saved: {error.strerror}",
            path=str(target),
            rule="the run's folder must be writable",
            repair="choose another run.output_dir, or correct its permissions",
        ) from error
    return target


C = TypeVar("C", bound=ConfigModel)
FilePath = str | os.PathLike[str]
_PRESET: KeyPath = ("model", "preset")


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A configuration, and for every leaf of it, by dotted path, who set it."""

    config: C
    origins: Mapping[str, Origin]


def load(
    schema: type[C],
    *,
    files: Iterable[FilePath] = (),
    overrides: Iterable[str] = (),
    defaults: Mapping[str, object] | None = None,
) -> C:
    """The configuration that these layers make; later ones win.

    The order is: the schema's defaults, `defaults` (an application's own), the preset that `model.preset` names, the
    files from left to right, the overrides from left to right. The preset is the one named *last*, wherever that is,
    and still lies beneath every file: `model.preset=other` changes the preset and keeps the user's keys.

    Raises `InvalidConfig`, a `ConfigError`, with everything that is wrong.
    """
    return load_with_origins(schema, files=files, overrides=overrides, defaults=defaults).config


def load_with_origins(
    schema: type[C],
    *,
    files: Iterable[FilePath] = (),
    overrides: Iterable[str] = (),
    defaults: Mapping[str, object] | None = None,
) -> Loaded[C]:
    """As `load`, and also who set what."""
    reading = _read(schema, files, overrides, defaults)
    has_presets = "preset" in fields_below(schema, ("model",))
    tree = reading.grow(preset=_chosen_preset(reading) if has_presets else None)
    problems = [*reading.problems, *(tree.problems if reading.complete else ())]
    try:
        config = schema.model_validate_json(json.dumps(tree.data), strict=True)
    except ValidationError as error:
        found = diagnose(error, schema=schema, data=tree.data, origins=tree.origins)
        if not reading.complete:  # what a file that cannot be read would have set is not missing
            found = [problem for problem in found if problem.origin is not None]
        raise InvalidConfig([*problems, *found]) from None
    if problems:
        raise InvalidConfig(problems)
    leaves = {path: tree.origins.get(path, DEFAULT) for path, _ in _leaves(to_plain(config), ())}
    return Loaded(config, FrozenDict({format_path(path): origin for path, origin in leaves.items()}))


def merge_layers(schema: type[C], *, files: Iterable[FilePath] = (), overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return what files and overrides set, later ones over earlier ones, without defaults and unchecked: for keys that
    are needed before the program that knows the whole schema. `schema` says which old keys have new names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the program itself warns
        return _read(schema, files, overrides, None).grow(preset=None).data


def explain(loaded: Loaded[Any]) -> str:
    """One line for each leaf: dotted path, value, and who set it."""
    rows = []
    for path, value in _leaves(to_plain(loaded.config), ()):
        dotted = format_path(path)
        rows.append((f"{dotted}: {_inline(value)}", str(loaded.origins[dotted])))
    width = min(60, max((len(left) for left, _ in rows), default=0))
    return "".join(f"{left:<{width}}  # {origin}\n" for left, origin in rows)


@dataclass
class _Reading:
    """The layers as read, before they meet."""

    layers: list[Layer]
    overrides: list[Assignment | Removal]
    problems: list[Problem]
    complete: bool = True

    def grow(self, *, preset: str | None) -> Tree:
        tree = Tree()
        application = [layer for layer in self.layers if layer.origin.layer == "defaults"]
        files = [layer for layer in self.layers if layer.origin.layer == "file"]
        for layer in [*application, *([read_preset(preset)] if preset else ()), *files]:
            tree.lay(layer)
        for override in self.overrides:
            tree.apply(override)
        return tree


def _read(
    schema: type[C], files: Iterable[FilePath], overrides: Iterable[str], defaults: Mapping[str, object] | None
) -> _Reading:
    for name, given in (("files", files), ("overrides", overrides)):
        if isinstance(given, str | os.PathLike):
            raise ConfigError(
                "The configuration cannot be loaded.",
                path=name,
                value=given,
                rule="must be a sequence, even of one",
                repair=f"write {name}=[{str(given)!r}]",
            )
    reading = _Reading([], [], [])
    if defaults is not None:
        plain = to_jsonable_python(defaults, inf_nan_mode="constants")
        reading.layers.append(Layer(plain, Origin("defaults")))
    for file in files:
        _read_file(os.fspath(file), reading)
    for word in overrides:
        parsed = parse_override(word)
        if isinstance(parsed, list):
            reading.problems += parsed
        else:
            reading.overrides.append(parsed)
    reading.layers = [_rename_layer(schema, layer, reading.problems) for layer in reading.layers]
    reading.overrides = _rename_overrides(schema, reading.overrides, reading.problems)
    return reading


def _rename_layer(schema: type[C], layer: Layer, problems: list[Problem]) -> Layer:
    """The layer with the old keys in it moved to their new places."""
    data, lines = copy.deepcopy(layer.data), dict(layer.lines)
    for moved in move_old_keys(schema, data):
        _report_moved(moved, layer.origin_of(moved.old), problems)
        for path, line in layer.lines.items():
            if moved.new is not None and path[: len(moved.old)] == moved.old:
                lines[(*moved.new, *path[len(moved.old) :])] = line
    return Layer(data, layer.origin, lines)


def _rename_overrides(
    schema: type[C], overrides: list[Assignment | Removal], problems: list[Problem]
) -> list[Assignment | Removal]:
    """The overrides with old keys renamed. One that sets an old section becomes one for each of its keys."""
    given = {override.path for override in overrides}
    found: list[Assignment | Removal] = []
    for override in overrides:
        data: Any = copy.deepcopy(override.value) if isinstance(override, Assignment) else None
        for key in reversed(override.path):
            data = {key: data}
        for moved in move_old_keys(schema, data):
            is_conflict = moved.is_conflict or moved.new in given
            _report_moved(replace(moved, is_conflict=is_conflict), Origin("override", override.word), problems)
            path = tuple(str(key) for key in moved.new or ())
            if path and isinstance(override, Removal):
                found.append(Removal(path, override.word))
            elif path and path[: len(override.path)] != override.path:
                found.append(Assignment(path, moved.value, override.word))
        rest = value_at(data, override.path)
        if rest is not MISSING:
            found.append(override if isinstance(override, Removal) else replace(override, value=rest))
    return found


def _report_moved(moved: MovedKey, origin: Origin, problems: list[Problem]) -> None:
    """Warn of an old key at the place where it is given; with the new one beside it, that is a problem."""
    if moved.is_conflict:
        old = format_path(moved.old)
        problems.append(
            Problem(path=old, value=moved.value, rule=moved.rule, repair="remove the old key", origin=str(origin))
        )
    elif moved.needs_warning:
        where = origin.name if origin.layer == "file" else f"<{origin}>"
        warnings.warn_explicit(moved.message, FutureWarning, where, origin.line or 1)


def _read_file(file: str, reading: _Reading) -> None:
    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as error:
        reading.problems.append(_file_problem(file, error))
        reading.complete = False
        return
    document = read_yaml(text, source=file)
    reading.problems += document.problems
    if document.data is not None and not isinstance(document.data, dict):
        rule = "the top level of a file must be a mapping of keys to values"
        repair = "write `section:` and, indented below it, `key: value`"
        origin = f"{file}:{document.lines[()]}"
        reading.problems.append(Problem(path=file, value=document.data, rule=rule, repair=repair, origin=origin))
        document.readable = False
    if not document.readable:
        reading.complete = False
        return
    reading.layers.append(Layer(document.data or {}, Origin("file", file), document.lines))


def _file_problem(file: str, error: OSError | UnicodeDecodeError) -> Problem:
    if isinstance(error, UnicodeDecodeError):
        return Problem(path=file, rule=f"must be text in UTF-8: byte {error.start} is not", repair="save it as UTF-8")
    if isinstance(error, FileNotFoundError):
        folder = os.path.dirname(file) or "."
        names = os.listdir(folder) if os.path.isdir(folder) else []
        near = did_you_mean(file, [name if folder == "." else os.path.join(folder, name) for name in names])
        as_override = "" if "/" in file or "." not in file else f"; for an override write {file}=VALUE"
        return Problem(path=file, rule="the file must exist", repair=(near or "check the path") + as_override)
    if isinstance(error, IsADirectoryError):
        return Problem(path=file, rule="must be a file; this is a directory", repair="name a YAML file in it")
    return Problem(path=file, rule=f"must be a file that can be read: {error.strerror}", repair="check its permissions")


def _chosen_preset(reading: _Reading) -> str | None:
    """The preset that the layers name, when all are laid; what they get wrong is found again later."""
    tree = reading.grow(preset=None)
    model = tree.data.get("model")
    name = model.get("preset") if isinstance(model, dict) else None
    if not isinstance(name, str) or name in preset_names():
        return name if isinstance(name, str) else None
    reading.problems.append(
        Problem(
            path=format_path(_PRESET),
            value=name,
            rule=f"must be one of the presets: {', '.join(preset_names())}",
            repair=did_you_mean(name, preset_names()) or "choose one of them, or set the model's keys without a preset",
            origin=str(tree.origins[_PRESET]),
        )
    )
    return None


def _leaves(value: Any, path: KeyPath) -> Iterable[tuple[KeyPath, Any]]:
    items: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    if not items or not value:
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _inline(value: object) -> str:
    text = write_yaml(value).removesuffix("\n").removesuffix("\n...")
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text
