"""A program's own command line: `--config FILE` and overrides, as `forge run` passes them on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TypeVar

from forge.config.kinds import other_program
from forge.config.loading import load
from forge.config.module_folders import add_module_folders
from forge.config.overrides import split_words
from forge.config.schema import ForgeConfig
from forge.errors import ConfigError

Schema = TypeVar("Schema", bound=ForgeConfig)


def from_command_line(schema: type[Schema], arguments: Sequence[str] | None = None) -> Schema:
    """The configuration that `program.py --config FILE [--config FILE] [a.b=c …]` asks for.

    Without arguments these are the process's own. A configuration that breaks a rule is printed and ends the program
    with exit code 2, as a command line does. Modules that the configuration names are from then on also found beside
    its files and in the working directory.
    """
    files, overrides = read_arguments(arguments, description=schema.__doc__)
    add_module_folders(files)
    try:
        return load(schema, files=files, overrides=overrides)
    except ConfigError as error:
        print("\n".join(filter(None, [str(error), other_program(schema, files, overrides)])), file=sys.stderr)
        raise SystemExit(2) from None


def read_arguments(
    arguments: Sequence[str] | None = None, *, description: str | None = None
) -> tuple[list[str], list[str]]:
    """Return the files and the overrides that a program's arguments name; `--resume` is one of the overrides."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help="a YAML file; later ones win")
    parser.add_argument(
        "--resume",
        metavar="CHECKPOINT",
        nargs="?",
        const="must",
        help="resume from the newest checkpoint, or from this one; the same as checkpointing.resume=must",
    )
    parser.add_argument("words", metavar="OVERRIDE", nargs="*", help="a.b=c sets a value, ~a.b removes one")
    parsed = parser.parse_intermixed_args(arguments)
    files, overrides = split_words(parsed.words)
    if parsed.resume is not None and split_words([parsed.resume])[1]:
        overrides, parsed.resume = [*overrides, parsed.resume], "must"  # an override that stands behind --resume
    if parsed.resume is not None:
        overrides = [*overrides, f"checkpointing.resume={parsed.resume}"]
    return [*parsed.config, *files], overrides
