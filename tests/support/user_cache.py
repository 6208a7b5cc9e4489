"""A user's cache of its own for programs that tests start, without compiling every kernel again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from forge.kernels.native_build import cache_directory


def cache_with_kernels(folder: Path) -> dict[str, str]:
    """Make a cache in `folder` that has the kernels compiled so far; return the variable that names it.

    A kernel's name has the hash of its source, so what is out of date is not loaded.
    """
    variable = {"XDG_CACHE_HOME": str(folder)}
    cache = cache_directory(variable)
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    for library in cache_directory(os.environ).glob("*.so"):
        shutil.copy2(library, cache)
    return variable
