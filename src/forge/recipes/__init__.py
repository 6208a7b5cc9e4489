"""Recipes: the programs and configurations of `apps/` by name, in a checkout and in an installed wheel alike.

A wheel holds a copy of `apps/` beside this package, made when it is built. Nothing here imports a program: they are run
as files, as `forge run apps/grpo/main.py` runs one.
"""

from forge.recipes.catalogue import (
    Recipe,
    apps_folder,
    find_config,
    find_program,
    find_recipe,
    programs,
    recipe_named,
    recipes,
    unknown_recipe,
)
from forge.recipes.command import Command, read_command
from forge.recipes.inputs import Step, all_steps, make_inputs, missing_steps

__all__ = [
    "Command",
    "Recipe",
    "Step",
    "all_steps",
    "apps_folder",
    "find_config",
    "find_program",
    "find_recipe",
    "make_inputs",
    "missing_steps",
    "programs",
    "read_command",
    "recipe_named",
    "recipes",
    "unknown_recipe",
]
