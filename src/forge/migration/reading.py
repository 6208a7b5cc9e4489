"""Files of other projects, as far as they do not differ between projects: text, YAML, command lines, values."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

from forge.config.problems import InvalidConfig, KeyPath
from forge.config.yaml_text import read_yaml
from forge.errors import ConfigError, did_you_mean
from forge.migration.records import Computed, Given
from forge.migration.shell_words import Word, as_scalar

Form = Literal["yaml", "python", "shell", "toml"]

_SUFFIXES: Final[Mapping[str, Form]] = {
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "yaml",
    ".py": "python",
    ".sh": "shell",
    ".bash": "shell",
    ".slurm": "shell",
    ".sbatch": "shell",
    ".toml": "toml",
}
_BOOLEANS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_MOST_CHARACTERS: Final = 2_000_000


@cache
def peer_keys(project: str) -> Mapping[str, Any]:
    """Return the keys of a project with their defaults, as `scripts/list_peer_keys.py` listed them."""
    text = (resources.files("forge.migration") / "keys" / f"{project}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    groups = {name: {key: _default(value) for key, value in group.items()} for name, group in found["groups"].items()}
    return {**found, "groups": groups}


def _default(value: Any) -> Any:
    """A default; of one that is no literal its text."""
    return value["text"] if isinstance(value, dict) and value.keys() == {"text"} else value


def read_text(path: Path) -> str:
    """Return the text of a file. Raises `ConfigError` where it cannot be read."""
    rule, repair = "a file that can be read", "check its permissions"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        names = [str(each) for each in path.parent.iterdir()] if path.parent.is_dir() else []
        rule, repair = "the file must exist", did_you_mean(str(path), names) or "check the path"
    except IsADirectoryError:
        rule, repair = "a file; this is a directory", "name the YAML file, the Python script or the shell script in it"
    except UnicodeDecodeError as error:
        rule, repair = f"text in UTF-8: byte {error.start} is not", "save it as UTF-8"
    except OSError as error:
        rule = f"a file that can be read: {error.strerror}"
    else:
        if len(text) <= _MOST_CHARACTERS:
            return text
        rule, repair = f"at most {_MOST_CHARACTERS:,} characters", "name the file that configures the run"
    raise ConfigError("The file cannot be imported.", path=str(path), rule=rule, repair=repair)


def form_of(path: Path, text: str) -> Form:
    """Return what a file holds, by its name, or by its first line."""
    known = _SUFFIXES.get(path.suffix.lower())
    if known is not None:
        return known
    first = text.lstrip().partition("\n")[0]
    if first.startswith("#!"):
        return "python" if "python" in first else "shell"
    return "yaml"


def read_sections(text: str, form: Form, *, where: str) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    """Return the mapping that a YAML, JSON or TOML file holds, and the line of every path in it.

    Raises `InvalidConfig` for bad syntax, and `ConfigError` where it is not a mapping.
    """
    if form == "toml":
        try:
            return tomllib.loads(text), {}
        except tomllib.TOMLDecodeError as error:
            rule = f"must be valid TOML: {error}"
            raise ConfigError("The file cannot be read.", path=where, rule=rule, repair="correct it there") from None
    document = read_yaml(text, source=where)
    if document.problems:
        raise InvalidConfig(document.problems)
    if not isinstance(document.data, dict) or not document.data:
        raise ConfigError(
            "The file holds no configuration.",
            path=where,
            value=document.data,
            rule="a mapping of keys to values",
            repair="name the YAML file, the Python script or the shell script that configures the run",
        )
    return document.data, document.lines


def flat_values(
    data: Mapping[str, Any], lines: Mapping[KeyPath, int], *, where: str, known: Collection[str]
) -> Iterator[tuple[str, Given]]:
    """Yield the values of nested sections by their dotted keys. A known key keeps what is below it."""

    def walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Given]]:
        dotted = ".".join(path)
        if isinstance(value, Mapping) and value and dotted not in known:
            for key, item in value.items():
                yield from walk(item, (*path, str(key)))
        else:
            line = lines.get(path)
            yield dotted, Given(value, where if line is None else f"{where}:{line}")

    for key, item in data.items():
        yield from walk(item, (str(key),))


def coerce(value: Any, default: Any) -> Any:
    """Return a value as the kind of its default: the readers of other projects accept `"1e-6"` and `yes`."""
    if not isinstance(value, str):
        return float(value) if isinstance(default, float) and type(value) is int else value
    if isinstance(default, bool):
        return _BOOLEANS.get(value.lower(), value)
    if isinstance(default, int | float):
        found = as_scalar(value.strip())
        return found if isinstance(found, int | float) and not isinstance(found, bool) else value
    return value


def truth(value: Any) -> bool | None:
    """Return whether a key that may be null is on, also where that is written as `yes` or `"false"`."""
    if isinstance(value, str):
        return _BOOLEANS.get(value.lower())
    return None if value is None else bool(value)


def coerced(given: Mapping[str, Given], defaults: Mapping[str, Any]) -> dict[str, Given]:
    """Return what is given, each value as the kind of its default."""
    return {key: Given(coerce(each.value, defaults.get(key)), each.place) for key, each in given.items()}


def flags(words: Sequence[Word], *, where: str) -> Iterator[tuple[str, Given]]:
    """Yield the options of a command line: `--key value …`, `--key=value`, `--key` for true, `--no_key` for false."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.text.startswith("--"):
            continue
        key, equals, value = word.text[2:].partition("=")
        place = f"{where}:{word.line}"
        if equals:
            yield key, Given(word_value(Word(value, word.is_computed, word.line)), place)
            continue
        values = []
        while index < len(words) and not words[index].text.startswith("--"):
            values.append(word_value(words[index]))
            index += 1
        if not values and key.startswith(("no_", "no-")):
            yield key[3:], Given(False, place)
        else:
            yield key, Given(values if len(values) > 1 else values[0] if values else True, place)


def word_value(word: Word) -> Any:
    """Return what a word of a command line stands for."""
    return Computed(word.text) if word.is_computed else as_scalar(word.text)


def no_command(where: str, *, wanted: str) -> ConfigError:
    """Return the error for a shell script without the command that starts a run."""
    return ConfigError(
        "The script starts no run of this project.",
        path=where,
        rule=f"a command such as `{wanted}`",
        repair="name the script with that command, or the YAML file that it reads",
    )


def mapping_of(value: Any) -> Mapping[str, Any]:
    """Return a value that is a mapping, or a mapping written as text, as TRL's command line takes it; else nothing."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = as_scalar(value)
    return value if isinstance(value, Mapping) else {}
