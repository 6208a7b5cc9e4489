"""The list of recipes, and which file a name means.

`grpo/tiny` is `apps/grpo/tiny.yaml`, and `grpo` is the program `apps/grpo/main.py`. A word that names an existing file
is that file and never a recipe. Where there is no such file, the paths of a checkout are names, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from forge.errors import ConfigError, did_you_mean

LIST_NAME: Final = "recipes.toml"
_PROGRAM: Final = "main.py"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A configuration that can be run by its name.

    Attributes:
        name: folder and file, such as `grpo/tiny`.
        config: the YAML file.
        teaches: what the model learns; empty for a step of another recipe.
        method: the algorithm.
        hardware: the least that it runs on.
        cpu_time: the time of all its processes on CPU cores; None on a GPU, or where it was not measured.
    """

    name: str
    config: Path
    teaches: str = ""
    method: str = ""
    hardware: str = ""
    cpu_time: str | None = None

    @property
    def is_step(self) -> bool:
        """Whether it only prepares another recipe."""
        return not self.teaches

    @property
    def program(self) -> Path:
        """The program that runs it, by the sections of the configuration."""
        from forge.config.command_line import detect_kind, program_of

        return apps_folder() / program_of(detect_kind([str(self.config)], []).kind) / _PROGRAM


def apps_folder() -> Path:
    """Return the folder of the recipes: the wheel's copy, or `apps/` of a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "apps", package.parents[2] / "apps"):
        if (folder / LIST_NAME).is_file():
            return folder
    raise ConfigError(
        "the recipes are not installed",
        path=str(package / "apps"),
        rule="the folder that a wheel of torchforge brings along",
        repair="install torchforge again: pip install --force-reinstall --no-deps torchforge",
    )


@cache
def read_list() -> Mapping[str, Any]:
    """Return the content of `apps/recipes.toml`: the tables `recipes` and `made`."""
    import tomllib

    with (apps_folder() / LIST_NAME).open("rb") as file:
        return tomllib.load(file)


@cache
def recipes() -> Mapping[str, Recipe]:
    """Return every recipe by name, in the order of the list."""
    root = apps_folder()
    return {name: Recipe(name, root / f"{name}.yaml", **facts) for name, facts in read_list()["recipes"].items()}


@cache
def programs() -> Mapping[str, Path]:
    """Return every program by the name of its folder, such as `grpo` and `selfplay/kuhn`."""
    root = apps_folder()
    found = sorted(root.rglob(_PROGRAM))
    return {path.parent.relative_to(root).as_posix(): path for path in found}


def find_recipe(word: str) -> Recipe | None:
    """Return the recipe that a word means; None where it means a file, or nothing."""
    return None if os.path.isfile(word) else recipe_named(word)


def recipe_named(word: str) -> Recipe | None:
    """Return the recipe of that name, whatever files there are; None where there is none."""
    return recipes().get(word.removeprefix("apps/").removesuffix(".yaml"))


def find_program(word: str) -> Path | None:
    """Return the program of the recipes that a word means; None where it means a file, or nothing."""
    if os.path.isfile(word):
        return None
    return programs().get(word.removeprefix("apps/").removesuffix(f"/{_PROGRAM}"))


def find_config(word: str) -> str:
    """Return the file that a word means: that of a recipe, or else the word itself, which may be no file at all.

    A type for options of argparse.
    """
    word = os.path.expanduser(word)
    found = find_recipe(word)
    return word if found is None else str(found.config)


def unknown_recipe(name: str, *, path: str = "RECIPE") -> ConfigError:
    """Return the error for a name that no recipe has."""
    return ConfigError(
        "there is no such recipe",
        path=path,
        value=name,
        rule="a name that `forge recipes` lists, such as grpo/tiny",
        repair=did_you_mean(name, recipes()) or "run `forge recipes` for the list",
    )
