"""`forge config check | show | presets`: look at a configuration without running anything."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.config import ForgeConfig, Loaded

_WORDS_HELP = "YAML files, and overrides such as run.seed=7 or ~launcher.hosts; overrides win, then later files"


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

    check = commands.add_parser("check", help="say everything that is wrong with a configuration, or that nothing is")
    check.set_defaults(handler=_check)
    show = commands.add_parser("show", help="print the resolved configuration")
    show.add_argument("--origins", action="store_true", help="also say which layer set each value")
    show.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    show.set_defaults(handler=_show)
    for parser in (check, show):
        parser.add_argument("words", nargs="*", metavar="FILE|OVERRIDE", help=_WORDS_HELP)
        parser.add_argument(
            "--schema", metavar="MODULE:CLASS", help="the schema, such as my_app.config:MyConfig (default: ForgeConfig)"
        )

    presets = commands.add_parser("presets", help="list the model presets")
    presets.set_defaults(handler=_presets)


def _check(arguments: argparse.Namespace) -> int:
    if _load(arguments) is None:
        return 2
    print("The configuration is valid.")
    return 0


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
    from forge.config import load_with_origins, split_words
    from forge.errors import ConfigError

    files, overrides = split_words(arguments.words)
    try:
        schema = _find_schema(arguments.schema)
        return load_with_origins(schema, files=[os.path.expanduser(file) for file in files], overrides=overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        if arguments.schema is None:
            print(
                "(The schema is forge.config:ForgeConfig. A file of an application needs its own, such as",
                file=sys.stderr,
            )
            print(" --schema forge.config:SFTConfig for apps/sft.)", file=sys.stderr)
        return None


def _find_schema(name: str | None) -> type[ForgeConfig]:
    """The class that `--schema` names. Its module is looked for in the working directory first."""
    from importlib import import_module

    from forge.config import ConfigModel, ForgeConfig
    from forge.errors import ConfigError

    if name is None:
        return ForgeConfig
    module_name, _, class_name = name.partition(":")
    rule, repair = "must be MODULE:CLASS", "write it like my_app.config:MyConfig"
    if module_name and class_name:
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
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
