"""The files of a run that have to do with time: its trace, and the profiles of its steps."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

from forge.ui.run_files import fingerprint

TRACE: Final = "trace.json"
PROFILES: Final = "profiles"
_MAX_PROFILES: Final = 500
_PROFILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}\.json(\.gz)?")


def trace_marks(folder: Path) -> tuple[object, ...]:
    """Return what changes when a trace appears, or a profile."""
    try:
        changed = os.lstat(folder / PROFILES).st_mtime_ns
    except OSError:
        changed = 0
    return fingerprint(folder / TRACE) is not None, changed


def list_profiles(folder: Path) -> list[dict[str, Any]]:
    """Return the profiles in a run's folder, the newest steps first."""
    place = folder / PROFILES
    try:
        is_folder = place.is_dir() and not place.is_symlink()
        names = sorted(os.listdir(place), reverse=True) if is_folder else []
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for name in names:
        facts = fingerprint(place / name) if _PROFILE.fullmatch(name) else None
        if facts is not None and len(found) < _MAX_PROFILES:
            found.append({"name": name, "size": facts.size, "time": facts.changed_ns / 1e9})
    return found
