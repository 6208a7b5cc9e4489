"""`forge copy` and `forge new`: files of one's own, from a recipe or for a task."""

from __future__ import annotations

import argparse
from pathlib import Path

_TASKS = "digits, tools, environment, sft or preferences"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `copy` and `new`."""
    copy = subparsers.add_parser(
        "copy",
        help="copy a recipe into a folder of your own",
        description="Copy a recipe into a folder: its program, its configuration, what both need, and a README. "
        "Commands and paths in the copies hold there. No file is overwritten.",
        epilog="example: forge copy grpo/tiny my_project",
    )
    copy.add_argument("recipe", metavar="RECIPE", help="a name that `forge recipes` lists")
    copy.add_argument("folder", metavar="FOLDER", type=Path, help="where the copies go")
    copy.set_defaults(handler=_copy)
    new = subparsers.add_parser(
        "new",
        help="make a small project that runs, with a test",
        description="Make a project: a program, a configuration, a task or data, a test, pyproject.toml, README and "
        ".gitignore. It runs as it is on a CPU in about a minute.",
        epilog="example: forge new my_project --task tools",
    )
    new.add_argument("folder", metavar="FOLDER", type=Path, help="an empty folder, or one that does not exist")
    new.add_argument("--task", metavar="TASK", default="digits", help=f"{_TASKS} (default: digits)")
    new.set_defaults(handler=_new)


def _copy(arguments: argparse.Namespace) -> int:
    from forge.recipes import recipe_named, unknown_recipe
    from forge.recipes.copying import commands, copy_recipe, files_of

    recipe = recipe_named(arguments.recipe)
    if recipe is None:
        raise unknown_recipe(arguments.recipe)
    folder: Path = arguments.folder.expanduser()
    _print(copy_recipe(recipe, folder), folder, commands(recipe, files_of(recipe)))
    return 0


def _new(arguments: argparse.Namespace) -> int:
    from forge.recipes.project import make_project, run_command

    folder: Path = arguments.folder.expanduser()
    written = make_project(folder, arguments.task)
    _print(written, folder, [run_command(arguments.task), "python -m pytest"])
    return 0


def _print(written: list[Path], folder: Path, commands: list[str]) -> None:
    import shlex

    names = ", ".join(path.relative_to(folder).as_posix() for path in written)
    print(f"{folder}: {names}")
    print("\n".join(["", "Run it:", f"  cd {shlex.quote(str(folder))}", *(f"  {command}" for command in commands)]))
