"""`forge run SCRIPT --config FILE [overrides]`: run a program with a configuration."""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge.errors import INPUT_ERRORS, ConfigError, ForgeError, did_you_mean
from forge.log_levels import add_log_flags
from forge.recipes import Command, find_program, find_recipe, make_inputs, read_command, recipes

if TYPE_CHECKING:
    from forge.cli.supervise import Limits

_DRY_RUN = "--dry-run"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `run`."""
    parser = subparsers.add_parser(
        "run",
        help="run a program with a configuration",
        description="Run SCRIPT with --config and the overrides as its arguments, or a recipe by its name. One "
        "controller process drives everything; with --nproc_per_node N the script itself is started N times, as "
        "torchrun does, for programs that are written so.",
        epilog="example: forge run train.py --config train.yaml run.seed=7; "
        "to resume it: forge run train.py --config train.yaml --resume; a recipe: forge run grpo/tiny; your "
        "configuration with the program of the recipes: forge run grpo --config train.yaml",
    )
    parser.add_argument("--nproc_per_node", "--nproc-per-node", metavar="N", type=int, help="start N ranks of SCRIPT")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="resume from the newest checkpoint; after SCRIPT also --resume CHECKPOINT. Passed to SCRIPT",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show what would run, or everything that prevents it from starting; start nothing",
    )
    add_log_flags(parser)
    _add_supervision(parser)
    _add_ui(parser)
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="a Python file, or a recipe: see `forge recipes`")
    parser.add_argument(
        "--config", metavar="FILE", action="append", default=[], help="a YAML file; may be given more than once"
    )
    rest = parser.add_argument(
        "rest", metavar="OVERRIDE", nargs=argparse.REMAINDER, help="a.b=c or ~a.b, passed to SCRIPT"
    )
    rest.required = False  # argparse would name it as missing beside SCRIPT
    parser.set_defaults(handler=_run)


def _take_own_flags(arguments: argparse.Namespace) -> list[str]:
    """Return the words after SCRIPT without the flags of the supervisor and the UI, which may stand among them."""
    parser = argparse.ArgumentParser(prog="forge run", add_help=False, allow_abbrev=False)
    _add_supervision(parser)
    _add_ui(parser)
    found, words = parser.parse_known_args(arguments.rest)
    for name, value in vars(found).items():
        if value is not None and value is not False:
            setattr(arguments, name, value)
    return words


def _add_supervision(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("supervision")
    group.add_argument(
        "--supervise",
        action="store_true",
        help="run SCRIPT in a child process with --resume auto, and start it again after a crash",
    )
    group.add_argument(
        "--max-restarts",
        metavar="N",
        type=int,
        default=None,
        help="with --supervise: restarts in a row without a new checkpoint (default: 10)",
    )
    group.add_argument(
        "--restart-backoff",
        metavar="S",
        type=float,
        default=None,
        help="with --supervise: seconds before the first restart, doubled with each until there is a new checkpoint, "
        "60 at most (default: 1)",
    )


def _add_ui(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("UI")
    group.add_argument("--ui", action="store_true", help="show the run in a browser, live, until it ends")
    group.add_argument(
        "--keep-ui", action="store_true", help="as --ui, and leave it running after the run, until it is killed"
    )


def _run(arguments: argparse.Namespace) -> int:
    from forge.config.command_line import add_module_folders

    program = read_program(arguments.script, *split_configs(list(arguments.config), _take_own_flags(arguments)))
    script, configs = program.script, list(program.command.files)
    words = [*program.command.words, *(["--resume"] if arguments.resume else [])]
    passed = [part for config in configs for part in ("--config", config)] + words
    num_ranks = arguments.nproc_per_node
    if num_ranks is not None and num_ranks < 1:
        raise ConfigError(
            "a program needs at least one rank",
            path="--nproc_per_node",
            value=num_ranks,
            rule="N >= 1",
            repair="leave the flag out for a single controller",
        )
    if arguments.dry_run or _DRY_RUN in words:
        from forge.cli.dry_run import dry_run_script

        settings = program.command.settings
        return dry_run_script(
            script, [word for word in passed if word != _DRY_RUN], num_ranks=num_ranks, settings=settings
        )
    limits = _limits(arguments)
    if (status := make_inputs(program.command.settings, command="forge run")) != 0:
        return status
    if arguments.ui or arguments.keep_ui:
        from forge.cli.run_ui import start_ui

        start_ui(configs, words, keeps=arguments.keep_ui)
    if limits is not None:
        from forge.cli.supervise import supervise

        ranks = [] if num_ranks is None else ["--nproc_per_node", str(num_ranks)]
        command = [sys.executable, "-m", "forge.cli", "run", *ranks, str(script), *passed]
        return supervise(command, files=configs, words=words, limits=limits)
    if num_ranks is not None:
        return _as_ranks(script, passed, num_ranks)
    add_module_folders(configs)
    return run_here(script, passed)


@dataclass(frozen=True, slots=True)
class Program:
    """A script, and what it is run with."""

    script: Path
    command: Command


def read_program(script: Path, configs: list[str], words: list[str]) -> Program:
    """Return what a script, or the name of a recipe or of its program, stands for. Raises what cannot be run."""
    name = str(script)
    recipe, found = find_recipe(name), find_program(name)
    if recipe is not None:
        script, configs = recipe.program, [name, *configs]
    elif found is not None:
        script = found
    elif not script.is_file():
        raise _no_script(script)
    else:
        _check_script(script, [*configs, *words])
    command = read_command(configs, words)
    for config in command.files:
        if not Path(config).is_file():
            raise ConfigError(
                "there is no such configuration file",
                path="--config",
                value=config,
                rule="a YAML file that exists, or a recipe",
                repair="check the path; it is relative to the working directory",
            )
    return Program(script, command)


def _no_script(script: Path) -> ConfigError:
    inside = script / "main.py"
    if inside.is_file():
        repair = f"name a file in it, such as {inside}"
    else:
        near = did_you_mean(str(script), recipes()) if script.suffix not in (".py", ".yaml", ".yml") else None
        repair = near or "check the path, which is relative to the working directory; `forge recipes` lists the recipes"
    return ConfigError(
        "this is a folder" if script.is_dir() else "there is no such script",
        path="SCRIPT",
        value=str(script),
        rule="a Python file that exists, or the name of a recipe",
        repair=repair,
    )


def _limits(arguments: argparse.Namespace) -> Limits | None:
    """Return how a run is supervised; None where it is not."""
    given = {"max_restarts": arguments.max_restarts, "backoff_s": arguments.restart_backoff}
    flags = {"max_restarts": "--max-restarts", "backoff_s": "--restart-backoff"}
    chosen = {name: value for name, value in given.items() if value is not None}
    if not arguments.supervise:
        if chosen:
            name, value = next(iter(chosen.items()))
            raise ConfigError(
                "this flag says how a supervisor restarts a run, and there is none",
                path=flags[name],
                value=value,
                rule="only with --supervise",
                repair="add --supervise, or leave the flag out",
            )
        return None
    from forge.cli.supervise import Limits

    for name, value in chosen.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(
                "the supervisor cannot work with this number",
                path=flags[name],
                value=value,
                rule=f"{flags[name]} is 0 or more",
                repair="leave it out for the default",
            )
    return Limits(**chosen)


def _check_script(script: Path, words: Sequence[str]) -> None:
    """Refuse a configuration in place of the script, and what Python cannot read."""
    if script.suffix in (".yaml", ".yml"):
        from forge.config.command_line import detect_kind, program_of

        program = program_of(detect_kind([str(script)], []).kind)
        command = ["forge", "run", program, "--config", str(script), *words]
        raise ConfigError(
            "a configuration was given in place of the script",
            path="SCRIPT",
            value=str(script),
            rule="a Python file, and the configuration after --config",
            repair=shlex.join(command),
        )
    if script.suffix == ".pyc":
        return
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(
            "the script cannot be read as Python",
            path="SCRIPT",
            value=str(script),
            rule=f"valid Python: {error.msg if isinstance(error, SyntaxError) else error}{where}",
            repair="correct the script, or check the path",
        ) from None


def split_configs(configs: list[str], words: list[str]) -> tuple[list[str], list[str]]:
    """`--config` may also stand among the overrides."""
    left: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--config":
            if not words:
                raise ConfigError(
                    "--config needs a file",
                    path="--config",
                    rule="--config FILE",
                    repair="name the file, or leave the flag out",
                )
            configs.append(words.pop(0))
        elif word.startswith("--config="):
            configs.append(word.partition("=")[2])
        else:
            left.append(word)
    return configs, left


def run_here(script: Path, arguments: list[str]) -> int:
    """Run a program in this process, and return its exit code."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise  # the output is no longer read
    except OSError as error:
        traceback.print_exception(error)
        return 1
    except ForgeError as error:
        if isinstance(error, INPUT_ERRORS) and not hasattr(error, "remote_traceback"):
            raise  # wrong input: its text says all
        traceback.print_exception(error)
        return 1
    return 0


def _as_ranks(script: Path, arguments: list[str], num_ranks: int) -> int:
    """Become the program that starts the ranks, so that signals for this process reach it."""
    launcher = [sys.executable, "-m", "forge.runtime.torchrun", "--standalone", f"--nproc-per-node={num_ranks}"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [*launcher, str(script), *arguments], {"OMP_NUM_THREADS": "1", **os.environ})
