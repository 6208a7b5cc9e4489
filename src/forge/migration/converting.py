"""From what a file gives and a table of rules to a configuration of ours and a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from forge.config import ForgeConfig, InvalidConfig, load
from forge.config.algorithm_presets import beneath
from forge.config.fields import fields_below
from forge.config.problems import parse_path, value_at
from forge.errors import MISSING, did_you_mean
from forge.migration.records import Computed, Conversion, Converted, PeerConfig, Row, Rule, Todo, Unknown, Verdict


@dataclass(frozen=True, slots=True)
class Target:
    """What a configuration becomes.

    Attributes:
        project, version: whose configuration it was, and the version that the rules are for.
        kind, schema: the kind of our run.
        rules: the table.
        old_keys: keys of earlier versions → what became of them there.
    """

    project: str
    version: str
    kind: str
    schema: type[ForgeConfig]
    rules: Sequence[Rule]
    old_keys: Mapping[str, str] = field(default_factory=dict)


def convert(config: PeerConfig, target: Target) -> Conversion:
    """Return the configuration of ours that another project's becomes, with what differs and what is lost."""
    work = _Work(config, target)
    for rule in target.rules:
        work.apply(rule)
    return work.finish()


class _Work:
    """The values and lines of a conversion, as they are collected."""

    def __init__(self, config: PeerConfig, target: Target) -> None:
        self._config, self._target = config, target
        self._exact = {key for rule in target.rules for key in rule.theirs}
        self._sections = [key for key in self._exact if key.endswith(".*")]
        self._lines: list[tuple[Verdict, Row]] = []
        self._unchanged: list[str] = []
        self._todo: dict[str, str] = {}

    def apply(self, rule: Rule) -> None:
        """Convert the keys of a rule."""
        keys = self._keys(rule)
        computed = [key for key in keys if isinstance(self._config[key], Computed)]
        if computed and rule.ours:
            self._ask(computed, rule)
            return
        if rule.convert is None:
            for key in keys:
                self._lose(key, rule.note)
            return
        try:
            found = rule.convert(self._config)
        except (TypeError, ValueError, AttributeError):
            self._refuse(keys, rule)
            return
        if found is None:
            self._unchanged += [key for key in keys if self._config.is_given(key)]
            return
        self._add(rule, keys, found)

    def _keys(self, rule: Rule) -> list[str]:
        """The keys of a rule; of a section those that the file gives and no narrower rule names."""
        keys = [key for key in rule.theirs if not key.endswith(".*")]
        return [*keys, *(key for key in self._config.given if self._section_of(key) in rule.theirs)]

    def _section_of(self, key: str) -> str | None:
        """The narrowest section of the table that a key belongs to; None for one that a rule names, or none covers."""
        if key in self._exact:
            return None
        found = [each for each in self._sections if key.startswith(each[:-1])]
        return max(found, key=len) if found else None

    def _ask(self, computed: Sequence[str], rule: Rule) -> None:
        """Ask the user for what a file computes when it runs."""
        texts = [f"{key} is `{self._config[key]}` in {self._config.place(key)}" for key in computed]
        first, *others = rule.ours
        also = f" (and {', '.join(others)})" if others else ""
        self._todo.setdefault(first, f"{'; '.join(texts)}, which is not run: write the value{also}")

    def _refuse(self, keys: Sequence[str], rule: Rule) -> None:
        """Ask for the keys of ours whose values of theirs are of no kind that the project takes."""
        given = {key: self._config[key] for key in keys if self._config.is_given(key)}
        texts = [f"{key} is {value!r} in {self._config.place(key)}" for key, value in given.items()]
        what = f"one of these is not what {self._target.project} takes: {'; '.join(texts)}"
        self._todo.setdefault(rule.ours[0] if rule.ours else keys[0], what)

    def _lose(self, key: str, note: str) -> None:
        """Report a key without a counterpart, where the file gives it."""
        if not self._config.is_given(key):
            return
        value = self._config[key]
        if key in self._config.defaults and _plain(value) == _plain(self._config.defaults[key]):
            self._unchanged.append(key)
        else:
            self._lines.append(("none", Row({key: value}, frozenset([key]), {}, note)))

    def _add(self, rule: Rule, keys: Sequence[str], found: Converted) -> None:
        self._todo |= {path: text for path, text in found.todo.items() if path not in self._todo}
        given = frozenset(key for key in keys if self._config.is_given(key))
        named = [key for key in keys if key in given] or keys[:1]
        theirs = {key: self._config[key] for key in named}
        verdict: Verdict = rule.verdict if found.verdict is None else found.verdict
        note = rule.note if found.note is None else found.note
        if found.values or given or (verdict == "none" and found.note):
            self._lines.append((verdict, Row(theirs, given, dict(found.values), note)))

    def finish(self) -> Conversion:
        """Leave out what says nothing, check the rest as a configuration of ours, and put it together."""
        values = {path: value for _, row in self._lines for path, value in row.ours.items()}
        defaults = _our_defaults(self._target.schema, values)
        kept: dict[str, Any] = {}
        parts: dict[Verdict, list[Row]] = {"maps": [], "differs": [], "none": []}
        for verdict, row in self._lines:
            ours = {
                path: value for path, value in row.ours.items() if row.given or value != defaults.get(path, MISSING)
            }
            kept |= ours
            if row.given or ours or verdict == "none":
                parts[verdict].append(Row(row.theirs, row.given, ours, row.note))
        nested = _nested(self._target.schema, kept)
        self._todo |= {path: text for path, text in _faults(self._target.schema, nested) if path not in self._todo}
        return Conversion(
            project=self._target.project,
            version=self._target.version,
            kind=self._target.kind,
            source=self._config.where,
            schema=self._target.schema,
            config=nested,
            maps=tuple(parts["maps"]),
            differs=tuple(parts["differs"]),
            none=tuple(parts["none"]),
            unchanged=tuple(self._unchanged),
            unknown=tuple(self._unknown()),
            todo=tuple(Todo(path, text) for path, text in self._todo.items()),
        )

    def _unknown(self) -> Iterable[Unknown]:
        for key, each in self._config.given.items():
            if key not in self._exact and self._section_of(key) is None:
                hint = self._target.old_keys.get(key) or did_you_mean(key, self._config.defaults) or ""
                yield Unknown(key, each.value, each.place, hint)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _our_defaults(schema: type[ForgeConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    """Our default of every key that is set, with what preset and convention of the algorithm make of it."""
    plain: dict[str, Any] = schema.model_construct().model_dump(mode="json", by_alias=True, warnings=False)
    chosen = {key: values[path] for key in ("preset", "convention") if (path := f"algorithm.{key}") in values}
    if "algorithm" in plain:
        section = fields_below(schema, ())["algorithm"].annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        plain["algorithm"] |= section.model_validate(beneath(chosen)).model_dump(mode="json", exclude=set(chosen))
    return {path: value_at(plain, parse_path(path)) for path in values}


def _nested(schema: type[ForgeConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as nested sections, in the order of the schema."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = parse_path(path)
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return _ordered(schema, (), nested)


def _ordered(schema: type[ForgeConfig], path: tuple[str, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    known = list(fields_below(schema, path))
    keys = sorted(values, key=lambda key: known.index(key) if key in known else len(known))
    return {
        key: _ordered(schema, (*path, key), values[key]) if isinstance(values[key], Mapping) else values[key]
        for key in keys
    }


def _faults(schema: type[ForgeConfig], nested: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """What our schema refuses, by its dotted path: values of theirs that are out of range here."""
    try:
        load(schema, defaults=nested)
    except InvalidConfig as error:
        for problem in error.problems:
            yield problem.path, f"{problem.rule}: {problem.repair}"
