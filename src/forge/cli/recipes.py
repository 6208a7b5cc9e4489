"""`forge recipes`: the programs and configurations that come with the library, by name."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.recipes import Recipe


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `recipes`."""
    parser = subparsers.add_parser(
        "recipes",
        help="list the recipes, which can be run by name",
        description="List the programs and configurations that come with the library, or show one. `forge run NAME` "
        "runs a recipe, `forge copy NAME FOLDER` makes it yours.",
        epilog="example: forge recipes cpu agent; forge recipes grpo/tiny",
    )
    parser.add_argument("words", metavar="NAME|WORD", nargs="*", help="a recipe, or words that a recipe has: grpo, cpu")
    parser.add_argument("--all", action="store_true", help="also list the steps that prepare other recipes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_recipes)


def _recipes(arguments: argparse.Namespace) -> int:
    from forge.recipes import recipe_named, recipes, unknown_recipe

    words: list[str] = arguments.words
    named = recipe_named(words[0]) if len(words) == 1 else None
    if named is not None:
        print(json.dumps(_plain(named), indent=2) if arguments.json else _described(named))
        return 0
    chosen = [each for each in recipes().values() if arguments.all or not each.is_step]
    found = [each for each in chosen if all(word.lower() in _text(each) for word in words)]
    if not found:
        raise unknown_recipe(" ".join(words))
    if arguments.json:
        print(json.dumps([_plain(each) for each in found], indent=2))
    else:
        print(_table(found))
        print("\nforge run NAME runs one, forge recipes NAME shows one, forge copy NAME FOLDER makes it yours.")
    return 0


def _text(recipe: Recipe) -> str:
    return " ".join((recipe.name, recipe.method, recipe.hardware, recipe.teaches)).lower()


def _table(found: Sequence[Recipe]) -> str:
    rows = [("NAME", "HARDWARE", "CPU TIME", "METHOD", "WHAT IT TEACHES")]
    rows += [
        (each.name, each.hardware, each.cpu_time or "-", each.method, each.teaches or "(a step)") for each in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join([*(f"{row[i]:<{widths[i]}}" for i in range(4)), row[4]]).rstrip() for row in rows)


def _plain(recipe: Recipe) -> dict[str, Any]:
    from forge.recipes import all_steps, read_command

    settings = read_command([str(recipe.name)], []).settings or {}
    return {
        "name": recipe.name,
        "teaches": recipe.teaches,
        "method": recipe.method,
        "hardware": recipe.hardware,
        "cpu_time": recipe.cpu_time,
        "is_step": recipe.is_step,
        "program": str(recipe.program),
        "config": str(recipe.config),
        "before": [step.command for step in all_steps(settings)],
        "run": f"forge run {recipe.name}",
    }


def _described(recipe: Recipe) -> str:
    facts = _plain(recipe)
    lines = [f"{recipe.name}: {recipe.teaches or 'a step that prepares other recipes'}"]
    shown = [key for key in ("method", "hardware", "cpu_time", "program", "config") if facts[key]]
    lines += [f"  {key.replace('_', ' '):<9} {facts[key]}" for key in shown]
    lines += [f"  {'before':<9} {command} (unless it was done)" for command in facts["before"]]
    lines += [f"  {'run':<9} {facts['run']}", f"  {'copy':<9} forge copy {recipe.name} my_project", ""]
    comment = takewhile(lambda line: line.startswith("#"), recipe.config.read_text(encoding="utf-8").splitlines())
    return "\n".join([*lines, *(line[1:].removeprefix(" ") for line in comment)])
