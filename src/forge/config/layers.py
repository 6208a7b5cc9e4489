"""Layers, and the tree that they are laid onto one after another: model presets, files, overrides.

The tree remembers, for every place in it, which layer put the value there. Mappings are merged key by key; anything
else, a list too, is replaced whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

from forge.config.problems import KeyPath, Problem, child, format_path, parse_path, split_at_equals
from forge.config.yaml_text import read_yaml
from forge.errors import MISSING, did_you_mean


@dataclass(frozen=True)
class Origin:
    """Who set a value: a layer, its name (file, preset or override) and, in a file, the line."""

    layer: Literal["default", "defaults", "preset", "file", "override"]
    name: str = ""
    line: int | None = None

    def __str__(self) -> str:
        match self.layer:
            case "file":
                return self.name if self.line is None else f"{self.name}:{self.line}"
            case "default":
                return "default"
            case "defaults":
                return "defaults of the application"
        return f"{self.layer} {self.name}"


DEFAULT = Origin("default")


@dataclass(frozen=True)
class Layer:
    """Keys to lay onto the tree: the whole of `data`, or what stands in it at the paths of one override."""

    data: dict[str, Any]
    origin: Origin
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def origin_of(self, path: KeyPath) -> Origin:
        line = self.lines.get(path)
        return self.origin if line is None else Origin(self.origin.layer, self.origin.name, line)


@dataclass(frozen=True)
class Assignment:
    """The override `a.b=value`."""

    path: tuple[str, ...]
    value: Any
    word: str


@dataclass(frozen=True)
class Removal:
    """The override `~a.b`."""

    path: tuple[str, ...]
    word: str


class Tree:
    """The configuration as it grows, before the schema has seen it."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.origins: dict[KeyPath, Origin] = {}
        self.problems: list[Problem] = []

    def lay(self, layer: Layer) -> None:
        """Merge a whole layer."""
        self._merge(self.data, layer.data, (), layer)

    def apply(self, override: Assignment | Removal) -> None:
        """Carry out one override; what cannot be done becomes a problem and leaves the tree as it is."""
        if isinstance(override, Removal):
            self._remove(override)
        else:
            self._assign(override)

    def _merge(self, target: dict[str, Any], source: Mapping[str, Any], path: KeyPath, layer: Layer) -> None:
        for key, value in source.items():
            here = (*path, key)
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                self.origins[here] = layer.origin_of(here)
                self._merge(target[key], value, here, layer)
            else:
                target[key] = self._settle(value, here, layer)

    def _settle(self, value: Any, path: KeyPath, layer: Layer) -> Any:
        """A copy of the value, now at this path; the origins below it are the layer's."""
        self._forget(path)
        self._record(value, path, layer)
        return copy.deepcopy(value)

    def _record(self, value: Any, path: KeyPath, layer: Layer) -> None:
        self.origins[path] = layer.origin_of(path)
        if isinstance(value, dict):
            for key, item in value.items():
                self._record(item, (*path, key), layer)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self._record(item, (*path, index), layer)

    def _forget(self, path: KeyPath) -> None:
        for other in [other for other in self.origins if other[: len(path)] == path]:
            del self.origins[other]

    def _assign(self, override: Assignment) -> None:
        layer = Layer({}, Origin("override", override.word))
        place: Any = self.data
        path: KeyPath = ()
        for key in override.path[:-1]:
            step = self._step(place, key, path, override.word)
            if step is None:
                return
            below = child(place, step)
            path = (*path, step)
            if below is None or below is MISSING:
                below = place[step] = {}
                self.origins[path] = layer.origin
            place = below
        last = self._step(place, override.path[-1], path, override.word)
        if last is None:
            return
        here = (*path, last)
        present = child(place, last)
        if isinstance(present, dict) and isinstance(override.value, dict):
            self.origins[here] = layer.origin
            self._merge(present, override.value, here, layer)
        else:
            place[last] = self._settle(override.value, here, layer)

    def _step(self, place: Any, key: str, path: KeyPath, word: str) -> str | int | None:
        """The key or index by which to go on from `place`; None, with a problem, where there is no way."""
        if isinstance(place, dict):
            return key
        where = format_path((*path, key))
        if isinstance(place, list):
            index = _index(key)
            if index is not None and index < len(place):
                return index
            rule = f"{format_path(path)} is a list of {len(place)}; an index from 0 to {len(place) - 1} is needed"
            repair = f"use such an index, or give the whole list: {format_path(path)}=[...]"
        else:
            rule = f"{format_path(path)} is {place!r}, which has no keys below it"
            repair = f"set {format_path(path)} itself, or remove it first: ~{format_path(path)}"
        self.problems.append(Problem(path=where, rule=rule, repair=repair, origin=f"override {word}"))
        return None

    def _remove(self, override: Removal) -> None:
        place: Any = self.data
        path: KeyPath = ()
        for key in override.path[:-1]:
            index = _index(key) if isinstance(place, list) else None
            step = key if index is None else index
            path = (*path, step)
            place = child(place, step)
        last = override.path[-1]
        if isinstance(place, dict) and last in place:
            del place[last]
            self._forget((*path, last))
        else:
            self._cannot_remove(override, from_list=isinstance(place, list))

    def _cannot_remove(self, override: Removal, *, from_list: bool) -> None:
        where = format_path(override.path)
        if from_list:
            rule = "~ removes a key of a mapping, not an element of a list"
            repair = "give the whole list without the element"
        else:
            rule = "~ removes a key that an earlier layer has set; nothing has set this one"
            known = [format_path(path) for path in self.origins]
            repair = did_you_mean(where, known, prefix="~") or "leave it out: the default holds already"
        self.problems.append(Problem(path=where, rule=rule, repair=repair, origin=f"override {override.word}"))


def _index(key: str) -> int | None:
    return int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else None


_FOLDER = "presets"


@cache
def preset_names() -> tuple[str, ...]:
    """The names that `model.preset` may have, sorted."""
    entries = resources.files("forge.config").joinpath(_FOLDER).iterdir()
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml")))


@cache
def read_preset(name: str) -> Layer:
    """The keys that a preset sets. The name must be one of `preset_names()`."""
    text = resources.files("forge.config").joinpath(_FOLDER, f"{name}.yaml").read_text("utf-8")
    return Layer(read_yaml(text, source=f"preset {name}").data, Origin("preset", name))


_FILE_STARTS = ("./", "../", "/", "~/")


def split_words(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Files and overrides, told apart by their look alone, never by what happens to lie on disk.

    A word with `=` in it or `~` before it is an override; the rest are files. A word that starts with `./`, `../`, `/`
    or `~/` is always a file, so that a file with `=` in its name can still be given.
    """
    files: list[str] = []
    overrides: list[str] = []
    for word in words:
        is_override = not word.startswith(_FILE_STARTS) and ("=" in word or word.startswith("~"))
        (overrides if is_override else files).append(word)
    return files, overrides


def parse_override(word: str) -> Assignment | Removal | list[Problem]:
    """One override, or what is wrong with it.

    The key ends at the first `=` outside quotes, so that a value may hold `=`. The value is YAML: `a.b=` is null and
    `a.b=''` is the empty text.
    """
    removal = word.lstrip().startswith("~")
    key, value = split_at_equals(word.lstrip()[1:] if removal else word)
    try:
        path = parse_path(key)
    except ValueError as error:
        rule = f"an override is `key=value` or `~key` with a dotted key: {error}"
        return [_problem(word, rule, "write it like `launcher.slurm.nodes=4` or `~launcher.hosts`")]
    if removal:
        if value is not None:
            return [_problem(word, "~ removes a key and takes no value", f"write `~{key}` or `{key}={value}`")]
        return Removal(path, word)
    if value is None:
        return [
            _problem(word, "an override is `key=value` or `~key`", f"write `{word}=VALUE`, or `~{word}` to remove it")
        ]
    document = read_yaml(value, source=f"override {word}")
    if document.problems:
        return document.problems
    return Assignment(path, document.data, word)


def _problem(word: str, rule: str, repair: str) -> Problem:
    return Problem(path=word, rule=rule, repair=repair, origin=f"override {word}")
