"""Run Python that a model wrote, behind a boundary and within limits.

`open_sandbox()` finds the best isolation that this machine has and refuses when there is none; `Sandbox.run` runs one
program and says how it ended. Only the standard library is used, here and in the processes that are started. Names are
imported when first used: a launcher starts for every run, and needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.runtime.sandbox.choosing import Finding, find, open_sandbox, survey
    from forge.runtime.sandbox.records import ISOLATIONS, Isolation, KilledFor, Limits, Outcome, Sandbox

_HOMES = {
    **dict.fromkeys(("Finding", "find", "open_sandbox", "survey"), "choosing"),
    **dict.fromkeys(("ISOLATIONS", "Isolation", "KilledFor", "Limits", "Outcome", "Sandbox"), "records"),
}

__all__ = [
    "ISOLATIONS",
    "Finding",
    "Isolation",
    "KilledFor",
    "Limits",
    "Outcome",
    "Sandbox",
    "find",
    "open_sandbox",
    "survey",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'forge.runtime.sandbox' has no attribute {name!r}")
    value = getattr(import_module(f"forge.runtime.sandbox.{home}"), name)
    globals()[name] = value
    return value
