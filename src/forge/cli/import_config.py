"""`forge import trl|verl|titanrl FILE`: convert a configuration of another project to ours."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.migration import Conversion

_PROJECTS = {
    "trl": ("TRL", "a YAML file of `trl grpo --config`, a Python script with a GRPOConfig, or a shell script"),
    "verl": ("verl", "a YAML file of hydra, or a shell script that starts verl.trainer.main_ppo"),
    "titanrl": ("TitanRL", "a Python file with a function that returns a Controller.Config, or a shell script"),
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `import`."""
    parser = subparsers.add_parser(
        "import",
        help="convert a configuration of TRL, verl or TitanRL",
        description="Convert a configuration of another project, and report what maps, what differs and what has no "
        "counterpart here. Files are read, never run. Defaults of the other project that differ from ours are written "
        "out.",
        epilog="example: forge import trl grpo.yaml --output mine.yaml",
    )
    projects = parser.add_subparsers(dest="project", metavar="PROJECT", required=True)
    for name, (title, files) in _PROJECTS.items():
        each = projects.add_parser(name, help=f"{title}: {files}", description=f"Convert {files}.")
        each.add_argument("file", metavar="FILE", help=files)
        each.add_argument(
            "--output", metavar="CONFIG.yaml", help="write the configuration there instead of printing it"
        )
        each.add_argument("--overwrite", action="store_true", help="replace the file of --output where it exists")
        each.add_argument("--kind", metavar="KIND", help="which run of the project it is; default: found from the keys")
        each.add_argument("--json", action="store_true", help="print the report and the configuration as JSON")
        each.set_defaults(handler=_import, num_processes=None, config=None)
        if name == "trl":
            each.add_argument(
                "--num-processes",
                type=_count,
                metavar="N",
                help="processes that train (accelerate launch --num_processes); batch sizes of TRL are per process",
            )
        if name == "titanrl":
            each.add_argument("--config", metavar="NAME", help="the function that returns the configuration")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _import(arguments: argparse.Namespace) -> int:
    from forge.migration import Options, convert_file
    from forge.migration.text import plain

    options = Options(kind=arguments.kind, num_processes=arguments.num_processes, config=arguments.config)
    conversion = convert_file(arguments.project, os.path.expanduser(arguments.file), options)
    if arguments.output is not None:
        _write(conversion, Path(arguments.output), overwrite=arguments.overwrite)
    if arguments.json:
        print(json.dumps(plain(conversion), indent=1, ensure_ascii=False))
    else:
        _print(conversion, arguments.output)
    return 0


def _print(conversion: Conversion, output: str | None) -> None:
    """Print the report; without a file, the configuration below it, so that the whole is one."""
    from forge.migration.text import next_steps, report, yaml_file

    title, _ = _PROJECTS[conversion.project]
    text = report(conversion, title=title)
    if output is not None:
        print(f"{text}\n{output} is written.\n{next_steps(conversion, output)}", end="")
        return
    comments = "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())
    print(f"{comments}\n{yaml_file(conversion, title=title)}", end="")


def _write(conversion: Conversion, target: Path, *, overwrite: bool) -> None:
    from forge.errors import ConfigError
    from forge.migration.text import yaml_file

    title, _ = _PROJECTS[conversion.project]
    rule, repair = "a file that does not exist yet", "choose another name, or add --overwrite"
    try:
        with open(target, "w" if overwrite else "x", encoding="utf-8") as file:
            file.write(yaml_file(conversion, title=title))
        return
    except FileExistsError:
        pass
    except OSError as error:
        rule, repair = f"a file that can be written: {error.strerror}", "choose another folder"
    raise ConfigError("The configuration cannot be written.", path=str(target), rule=rule, repair=repair)
