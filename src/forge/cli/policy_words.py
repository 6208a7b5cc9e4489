"""What `forge chat` and `forge serve` have in common: which model, in which configuration."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from forge.cli.config import AnyOrderParser
from forge.errors import ConfigError

if TYPE_CHECKING:
    from forge.config import PolicyConfig


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """The model's folder, files, overrides and the engine."""
    parser.__class__ = AnyOrderParser  # add_parser() makes its own class; overrides may stand between options
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help="a YAML file; later ones win")
    parser.add_argument("--engine", metavar="ENGINE", help="native (the default), vllm, or module:attribute")
    parser.add_argument(
        "words", metavar="MODEL_DIR|OVERRIDE", nargs="*", help="the model's folder, and a.b=c or ~a.b for any other key"
    )


def read_policy(
    arguments: argparse.Namespace, given: Mapping[str, str | float | None], *, command: str
) -> PolicyConfig:
    """The configuration that a command line asks for; `given` are values of options by key, None where not given.

    Overrides win over options, and options over files.
    """
    from forge.config import PolicyConfig, load, split_words

    folders, overrides = split_words(arguments.words)
    if len(folders) > 1 or not (folders or arguments.config or overrides):
        raise ConfigError(
            f"{command} needs one model",
            path="MODEL_DIR",
            value=folders,
            rule="one folder with the model's files, or --config FILE, or overrides that name the model",
            repair=f"{command} models/qwen3-0.6b, or {command} model.preset=tiny for a model of random weights",
        )
    chosen = {
        "model.path": model_folder(folders[0]) if folders else None,
        "generator.engine": arguments.engine,
        **given,
    }
    options = [f"{key}={_written(value)}" for key, value in chosen.items() if value is not None]
    return load(PolicyConfig, files=arguments.config, overrides=[*options, *overrides])


def model_folder(given: str) -> str:
    """Return the folder of the model that is meant: of a run's folder, the model that the run wrote, which is printed.

    A run without one raises. Any other folder is returned as it is, to be refused by the model's own rules.
    """
    folder = Path(given).expanduser()
    if folder.suffix in (".yaml", ".yml") and folder.is_file():
        raise ConfigError(
            "a configuration was given in place of the model's folder",
            path="MODEL_DIR",
            value=given,
            rule="a folder with the model's files, and a configuration after --config",
            repair=f"--config {shlex.quote(given)}",
        )
    if (folder / "config.json").is_file():
        return given
    candidates = [folder / "checkpoints" / "hf", folder / "hf"]
    for place in candidates:
        if (place / "config.json").is_file():
            print(f"{given} is the folder of a run: using its model, {place}", file=sys.stderr)
            return str(place)
    if (folder / "metrics.jsonl").is_file() or (folder / "checkpoints").is_dir():
        raise ConfigError(
            "this is the folder of a run that has not written a model",
            path="MODEL_DIR",
            value=given,
            rule=f"a model is in {candidates[0]} once the run has ended",
            repair="let the run finish (--resume continues a stopped run), or name the folder of another model",
        )
    return given


def _written(value: str | float) -> str:
    """The value as YAML that means this and nothing else."""
    if not isinstance(value, str):
        return str(value)
    import yaml

    return str(yaml.safe_dump(value, default_style='"', allow_unicode=True, width=sys.maxsize)).rstrip("\n")
