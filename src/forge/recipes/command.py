"""What a program is run with when recipes are among its words: files that exist, and paths that hold where they lie."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forge.recipes.catalogue import apps_folder, find_config, find_recipe

_PREFIX: Final = "apps/"


@dataclass(frozen=True, slots=True)
class Command:
    """Configurations and words, with every recipe resolved.

    Attributes:
        files: the configurations, as paths.
        words: overrides, and the flags that stood among them.
        settings: what files and overrides set, later ones over earlier ones, where a recipe is among the files; None
            where there is none, and nothing is made for the run.
    """

    files: tuple[str, ...]
    words: tuple[str, ...]
    settings: Mapping[str, Any] | None = None


def read_command(files: Sequence[str], words: Sequence[str]) -> Command:
    """Resolve the recipes among `files`. Data that lies beside a recipe is read from there, in any working folder."""
    found = tuple(find_config(file) for file in files)
    if not any(find_recipe(file) is not None for file in files):
        return Command(found, tuple(words))
    settings = merged(found, words)
    moved = [
        f"{path}={json.dumps(str(apps_folder().parent / text))}"
        for path, text in texts(settings)
        if text.startswith(_PREFIX) and not os.path.exists(text) and (apps_folder().parent / text).is_file()
    ]
    return Command(found, (*words, *moved), merged(found, [*words, *moved]))


def merged(files: Sequence[str], words: Sequence[str]) -> Mapping[str, Any]:
    """Return what files and overrides set, unchecked and without defaults."""
    from forge.config.command_line import detect_kind
    from forge.config.layers import split_words
    from forge.config.loading import merge_layers

    overrides = split_words([word for word in words if not word.startswith("-")])[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the program itself warns
        return merge_layers(detect_kind(files, overrides).schema, files=files, overrides=overrides)


def texts(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the value of every key that holds a text."""
    from forge.config.problems import KeyPath, format_path

    def walk(value: Any, path: KeyPath) -> Iterator[tuple[str, str]]:
        if isinstance(value, str):
            yield format_path(path), value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from walk(item, (*path, key))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from walk(item, (*path, index))

    return walk(settings, ())
