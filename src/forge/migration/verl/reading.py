"""What hydra reads: YAML files, lists of overrides, and command lines in shell scripts; with its interpolations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from forge.config.problems import InvalidConfig
from forge.config.yaml_text import read_yaml
from forge.errors import ConfigError
from forge.migration.reading import Form, flat_values, no_command, read_sections
from forge.migration.records import Computed, Given
from forge.migration.shell_words import Word, as_scalar, commands

_INTERPOLATION: Final = re.compile(r"\$\{([^${}]*)\}")
_OVERRIDE: Final = re.compile(r"(?:\+{1,2}|~)?([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)
_ARGUMENTS: Final = re.compile(r"\$[@*]|\$\{[@*](:\d+)?\}")
"""What a script was started with."""

_MOST_ROUNDS: Final = 20
_MODULES: Final = ("verl.trainer.main_ppo", "main_ppo.py", "main_ppo")


def read_given(text: str, form: Form, *, where: str, defaults: Mapping[str, Any]) -> dict[str, Given]:
    """Return the keys that a file gives."""
    if form == "shell":
        return dict(_from_shell(text, where))
    if form == "python":
        raise ConfigError(
            "A configuration of verl is not Python.",
            path=where,
            rule="a YAML file of hydra, or a shell script that starts verl.trainer.main_ppo",
            repair="hydra writes the whole configuration of a run to outputs/…/.hydra/config.yaml",
        )
    if form == "yaml" and text.lstrip().startswith("- "):
        return dict(_from_list(text, where))
    data, lines = read_sections(text, form, where=where)
    found = dict(flat_values(data, lines, where=where, known=defaults))
    return {key: each for key, each in found.items() if not key.endswith("_target_")}


def _from_list(text: str, where: str) -> Iterator[tuple[str, Given]]:
    """Yield what hydra's overrides.yaml gives: a list of `key=value`."""
    document = read_yaml(text, source=where)
    if document.problems:
        raise InvalidConfig(document.problems)
    for index, item in enumerate(document.data or ()):
        line = document.lines.get((index,), 1)
        yield from _override(Word(str(item), False, line), where)


def _from_shell(text: str, where: str) -> Iterator[tuple[str, Given]]:
    for words in commands(text):
        start = next((index for index, word in enumerate(words) if word.text in _MODULES), None)
        start = start or next((index for index, word in enumerate(words) if word.text.endswith("main_ppo.py")), None)
        if start is None:
            continue
        for word in words[start + 1 :]:
            yield from _override(word, where)
        return
    raise no_command(where, wanted="python3 -m verl.trainer.main_ppo data.train_files=…")


def _override(word: Word, where: str) -> Iterator[tuple[str, Given]]:
    """Yield what one word of hydra's command line gives; words that are no override are reported as keys."""
    place = f"{where}:{word.line}"
    match = _OVERRIDE.fullmatch(word.text)
    if match is None or match[2] is None:
        option, _, rest = word.text.partition("=")
        if option.startswith("--config-"):
            yield option, Given(rest, place)
        elif _ARGUMENTS.fullmatch(word.text) is None:
            yield word.text, Given(Computed(word.text) if word.is_computed else None, place)
        return
    value: Any = Computed(match[2]) if word.is_computed and "$" in match[2] else as_scalar(match[2])
    yield match[1], Given(value, place)


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with hydra's interpolations put in: `${a.b}`, `${.b}`, `${oc.select:a.b,default}`.

    What refers to the environment, or to a key that is not there, stays `Computed`.
    """
    found = dict(values)
    for _ in range(_MOST_ROUNDS):
        changes = {}
        for key, value in found.items():
            if isinstance(value, str) and "${" in value:
                filled = _filled(key, value, found)
                if filled != value:
                    changes[key] = filled
        if not changes:
            break
        found |= changes
    return {key: _final(value) for key, value in found.items()}


def _final(value: Any) -> Any:
    if value == "???":
        return None
    return Computed(value) if isinstance(value, str) and "${" in value else value


def _filled(key: str, text: str, values: Mapping[str, Any]) -> Any:
    """The text with its innermost interpolations put in; the value itself where the text is nothing else."""
    whole = _INTERPOLATION.fullmatch(text)
    if whole is not None:
        found = _lookup(key, whole[1], values)
        return text if found is _UNKNOWN else found

    def put_in(match: re.Match[str]) -> str:
        found = _lookup(key, match[1], values)
        return match[0] if found is _UNKNOWN else "null" if found is None else str(found)

    return _INTERPOLATION.sub(put_in, text)


_UNKNOWN: Final = object()


def _lookup(key: str, inner: str, values: Mapping[str, Any]) -> Any:
    resolver, colon, rest = inner.partition(":")
    default: Any = _UNKNOWN
    name = inner.strip()
    if colon:
        if resolver != "oc.select":
            return _UNKNOWN
        name, comma, after = rest.partition(",")
        name = name.strip()
        default = as_scalar(after.strip()) if comma else None
    if name.startswith("."):
        depth = len(name) - len(name.lstrip("."))
        name = ".".join([*key.split(".")[:-depth], name.lstrip(".")])
    found = values.get(name, default)
    is_open = isinstance(found, Computed) or (isinstance(found, str) and "${" in found and name in values)
    return _UNKNOWN if is_open else found
