"""TorchTitan is imported after what prepares it, whichever of our modules comes first."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import forge

SOURCE = Path(forge.__file__).parent
SETUP = "forge.models.titan_setup"


def imported(tree: ast.Module) -> list[str]:
    """Return the modules that a module imports when it is loaded, in their order."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


USERS = [
    path
    for path in sorted(SOURCE.rglob("*.py"))
    if path.stem != "titan_setup"
    and any(name.startswith("torchtitan") for name in imported(ast.parse(path.read_text())))
]


def test_there_are_modules_to_look_at():
    assert len(USERS) > 5


@pytest.mark.parametrize("path", USERS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_setup_comes_first(path):
    names = imported(ast.parse(path.read_text()))
    first = next(number for number, name in enumerate(names) if name.startswith("torchtitan"))
    assert SETUP in names[:first]
