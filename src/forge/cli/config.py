"""`forge config check | show | presets`: look at a configuration without running anything."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.cli.dry_run import Chosen
    from forge.config import ForgeConfig, Loaded
    from forge.recipes import Command

_WORDS_HELP = (
    "YAML files or recipes, and overrides such as run.seed=7 or ~launcher.hosts; overrides win, then later files"
)


class AnyOrderParser(argparse.ArgumentParser):
    """Lets options stand between the words, which argparse by itself does not for a list of them."""

    _inside = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if self._inside:
            return super().parse_known_args(args, namespace)
        self._inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `config` and what stands below it."""
    config = subparsers.add_parser("config", help="check, show or list configurations")
    commands = config.add_subparsers(dest="config_command", required=True, parser_class=AnyOrderParser)

    check = commands.add_parser(
        "check",
        help="report everything that would prevent a run from starting, or what it would do",
        description="Check a configuration as `forge run --dry-run` does: its keys, the modules it names, its model, "
        "data, memory and checkpoints, on this machine. Nothing is started. `forge config show` checks the keys alone.",
    )
    check.set_defaults(handler=_check)
    show = commands.add_parser("show", help="print the resolved configuration")
    show.add_argument("--origins", action="store_true", help="also show which layer set each value")
    show.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    show.set_defaults(handler=_show)
    for parser in (check, show):
        parser.add_argument("words", nargs="*", metavar="FILE|OVERRIDE", help=_WORDS_HELP)
        parser.add_argument(
            "--schema",
            metavar="MODULE:CLASS",
            help="the schema, such as my_app.config:MyConfig; default: found from the sections of the file",
        )

    presets = commands.add_parser("presets", help="list the model presets")
    presets.set_defaults(handler=_presets)


def _check(arguments: argparse.Namespace) -> int:
    from forge.cli.dry_run import check
    from forge.errors import ConfigError
    from forge.recipes.stand_ins import stand_ins

    try:
        chosen, command = _read(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    with stand_ins(command.settings) as found:
        return check(chosen, command.files, [*command.words, *found.overrides], found=found)


def _show(arguments: argparse.Namespace) -> int:
    from forge.config import dump, explain

    loaded = _load(arguments)
    if loaded is None:
        return 2
    if arguments.json:
        plain: dict[str, Any] = loaded.config.model_dump(mode="json", by_alias=True, warnings=False)
        if arguments.origins:
            plain = {"config": plain, "origins": {path: str(origin) for path, origin in loaded.origins.items()}}
        print(json.dumps(plain, indent=2))
    else:
        print(explain(loaded) if arguments.origins else dump(loaded.config), end="")
    return 0


def _presets(arguments: argparse.Namespace) -> int:
    from forge.config import ForgeConfig, load, preset_names

    for name in preset_names():
        model = load(ForgeConfig, overrides=[f"model.preset={name}"]).model
        shape = f"{model.num_layers} layers, width {model.hidden_size}"
        print(f"{name:<14}  {model.hf_repo or '(random weights, no download)':<30}  {model.family}, {shape}")
    return 0


def _load(arguments: argparse.Namespace) -> Loaded[ForgeConfig] | None:
    """The configuration that the command line asks for; None when it is wrong, after saying so."""
    from forge.config import load_with_origins
    from forge.errors import ConfigError

    chosen: Chosen | None = None
    try:
        chosen, command = _read(arguments)
        return load_with_origins(chosen.schema, files=command.files, overrides=command.words)
    except ConfigError as error:
        print(error if chosen is None else f"{error}\n(The schema is {chosen}.)", file=sys.stderr)
        return None


def _read(arguments: argparse.Namespace) -> tuple[Chosen, Command]:
    """The schema, and the files and the overrides that the command line names."""
    from forge.cli.dry_run import Chosen, choose_schema
    from forge.config import add_module_folders, split_words
    from forge.recipes import read_command

    command = read_command(*split_words(arguments.words))
    add_module_folders(command.files)
    if arguments.schema is None:
        return choose_schema(command.files, command.words), command
    return Chosen(_find_schema(arguments.schema), "named by --schema"), command


def _find_schema(name: str) -> type[ForgeConfig]:
    """The class that `--schema` names."""
    from importlib import import_module

    from forge.config import ConfigModel
    from forge.errors import ConfigError

    module_name, _, class_name = name.partition(":")
    rule, repair = "must be MODULE:CLASS", "write it like my_app.config:MyConfig"
    if module_name and class_name:
        try:
            found = getattr(import_module(module_name), class_name, None)
        except ImportError as error:
            rule, repair = f"the module must be importable: {error}", "run from the folder that holds it, or install it"
        else:
            if isinstance(found, type) and issubclass(found, ConfigModel):
                return found  # type: ignore[return-value]
            rule = "must name a class that derives from forge.config.ConfigModel"
            repair = f"check the name of the class in {module_name}"
    raise ConfigError("The schema cannot be used.", path="--schema", value=name, rule=rule, repair=repair)
