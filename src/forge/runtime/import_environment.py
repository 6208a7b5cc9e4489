"""What ranks are told about imports: where modules are, and how many threads libraries start."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence

from forge.config.command_line import module_folders
from forge.runtime.placement import THREAD_VARIABLES
from forge.runtime.rank_main import MODULE_FOLDERS


def import_environment(num_threads: int) -> dict[str, str]:
    """Return the variables of a rank that imports depend on."""
    last = module_folders()
    return {
        **dict.fromkeys(THREAD_VARIABLES, str(num_threads)),
        "PYTHONPATH": module_path([place for place in sys.path if place not in last]),
        MODULE_FOLDERS: os.pathsep.join(last),
    }


def module_path(paths: Sequence[str]) -> str:
    """Return the places of the user's own modules, for the ranks: what the interpreter finds by itself is left out."""
    own = {os.path.realpath(place) for place in sysconfig.get_paths().values()}
    found = []
    for path in paths:
        place = os.path.realpath(path) if path else ""
        is_builtin = place in own or place.startswith(tuple(f"{place}{os.sep}" for place in own))
        if place and not is_builtin and ":" not in place and not place.endswith(".zip"):
            found.append(place)
    return ":".join(dict.fromkeys(found))
