"""A program's own command line: `--config FILE` and overrides, which schema they belong to, and where the modules that
they name are found.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from forge.config.distill import DistillConfig
from forge.config.fields import old_keys
from forge.config.generator import PolicyConfig
from forge.config.grpo import GRPOConfig
from forge.config.layers import split_words
from forge.config.loading import load
from forge.config.preference import PreferenceConfig
from forge.config.reward_training import RewardTrainingConfig
from forge.config.schema import ForgeConfig
from forge.config.sft import SFTConfig
from forge.config.yaml_text import read_yaml
from forge.errors import ConfigError
from forge.log_levels import parse_with_log_flags

MODULE_FOLDERS = "FORGE_MODULE_FOLDERS"
"""Lists the folders that were added, for the processes that this one starts."""


def add_module_folders(files: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Make modules importable from the folders of these files and from the working directory.

    It can be called again: what is on `sys.path` already is not added. Workers find the same modules.
    """
    folders = [os.path.realpath(os.path.dirname(os.path.abspath(file))) for file in files]
    present = {os.path.realpath(place) for place in sys.path if place}
    new = [folder for folder in dict.fromkeys((*folders, os.getcwd())) if folder not in present]
    sys.path.extend(new)
    os.environ[MODULE_FOLDERS] = os.pathsep.join((*module_folders(), *new))


def module_folders() -> tuple[str, ...]:
    """Return the folders on `sys.path` that were added, in this process or in the one that started it."""
    return tuple(folder for folder in os.environ.get(MODULE_FOLDERS, "").split(os.pathsep) if folder in sys.path)


SCHEMAS: Final[Mapping[str, type[ForgeConfig]]] = {
    "sft": SFTConfig,
    "policy": PolicyConfig,
    "grpo": GRPOConfig,
    "dpo": PreferenceConfig,
    "reward_model": RewardTrainingConfig,
    "distill": DistillConfig,
}
"""The kinds of runs, in the order in which a file that says too little is taken for one."""


@dataclass(frozen=True, slots=True)
class Detected:
    """The schema that knows most of a configuration's sections.

    Attributes:
        kind: its key in `SCHEMAS`.
        evidence: the sections that every configuration does not have and this schema does, in alphabetical order.
        others: kinds that know as many of the sections.
    """

    kind: str
    evidence: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def schema(self) -> type[ForgeConfig]:
        return SCHEMAS[self.kind]


def detect_kind(files: Sequence[str], overrides: Sequence[str]) -> Detected:
    """Return the kind of run that files and overrides describe. Without evidence it is a guess, the first kind."""
    sections = _sections(files, overrides)
    unknown = {kind: len(sections - _known(schema)) for kind, schema in SCHEMAS.items()}
    best = [kind for kind in SCHEMAS if unknown[kind] == min(unknown.values())]
    own = _known(SCHEMAS[best[0]]) - _known(ForgeConfig)
    return Detected(best[0], tuple(sorted(sections & own)), tuple(best[1:]))


def _known(schema: type[ForgeConfig]) -> set[str]:
    """Return the keys at the top of a schema, the first part of old ones included."""
    return {*schema.model_fields, *(key.partition(".")[0] for key in old_keys(schema))}


def program_of(kind: str) -> str:
    """Return the name of the program that runs configurations of this kind: its folder in `apps/`."""
    return "vllm" if kind == "policy" else kind


def other_program(schema: type[ForgeConfig], files: Sequence[str], overrides: Sequence[str]) -> str | None:
    """Return a line that names the right program, where a configuration is one of another kind; else None."""
    if schema not in SCHEMAS.values():
        return None
    found = detect_kind(files, overrides)
    foreign = set(found.evidence) - _known(schema)
    if not foreign:
        return None
    sections = ", ".join(sorted(foreign))
    which = f"{found.schema.__name__} has the keys {sections}, {schema.__name__} does not."
    return f"{which} Is `forge run {program_of(found.kind)}` the right program?"


def _sections(files: Sequence[str], overrides: Sequence[str]) -> set[str]:
    """What stands at the top of files and overrides. A file that cannot be read is refused when it is loaded."""
    found = {word.lstrip("~").partition("=")[0].partition(".")[0] for word in overrides}
    for file in files:
        if os.path.isfile(file):
            with open(file, encoding="utf-8", errors="replace") as stream:
                data = read_yaml(stream.read(), source=file).data
            found |= set(data) if isinstance(data, dict) else set()
    return found


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
    """Return the files and the overrides that a program's arguments name; `--resume` is one of the overrides. The flags
    of logging among them have their effect."""
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
    parsed = parse_with_log_flags(parser, arguments, intermixed=True)
    files, overrides = split_words(parsed.words)
    if parsed.resume is not None and split_words([parsed.resume])[1]:
        overrides, parsed.resume = [*overrides, parsed.resume], "must"  # an override that stands behind --resume
    if parsed.resume is not None:
        overrides = [*overrides, f"checkpointing.resume={parsed.resume}"]
    return [*parsed.config, *files], overrides
