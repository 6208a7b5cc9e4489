"""Where modules of the user are looked for: one rule for runs, dry runs, `forge rewards try` and every worker.

In this order: the script's own folder, `PYTHONPATH`, installed packages, the folders of the configuration files, the
working directory. The last two come last, so that no file there can hide a module of Python or of a package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

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
