"""The words of a command line that change a configuration: `a.b=value` and `~a.b`."""

from __future__ import annotations

from collections.abc import Iterable

from forge.config.layers import Assignment, Removal
from forge.config.paths import parse_path, split_at_equals
from forge.config.problems import Problem
from forge.config.yaml_text import read_yaml

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
