"""Run code that a model wrote, behind a boundary and within limits.

`open_sandbox()` finds the best isolation that this machine has and refuses when there is none; `Sandbox.run` runs one
program and says how it ended. `Box` is a sandbox that stays open, with a shell, a Python kernel and files. Only the
standard library is used, here and in the processes that are started. Names are imported when first used: a launcher
starts for every run, and needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge._lazy import lazy_names

if TYPE_CHECKING:
    from forge.runtime.sandbox.box import Box
    from forge.runtime.sandbox.box_records import (
        CommandResult,
        Files,
        ProgramResult,
        PythonResult,
        SandboxError,
        Snapshot,
    )
    from forge.runtime.sandbox.detection import Finding, find, open_sandbox, survey
    from forge.runtime.sandbox.records import ISOLATIONS, Isolation, KilledFor, Limits, Outcome, Sandbox, SandboxLimits

__all__ = [
    "ISOLATIONS",
    "Box",
    "CommandResult",
    "Files",
    "Finding",
    "Isolation",
    "KilledFor",
    "Limits",
    "Outcome",
    "ProgramResult",
    "PythonResult",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "Snapshot",
    "find",
    "open_sandbox",
    "survey",
]

__getattr__ = lazy_names(
    __name__,
    {
        "forge.runtime.sandbox.box": "Box",
        "forge.runtime.sandbox.box_records": "CommandResult Files ProgramResult PythonResult SandboxError Snapshot",
        "forge.runtime.sandbox.detection": "Finding find open_sandbox survey",
        "forge.runtime.sandbox.records": "ISOLATIONS Isolation KilledFor Limits Outcome Sandbox SandboxLimits",
    },
)
