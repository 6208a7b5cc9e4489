"""What is asked of a sandbox, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal, Protocol

from forge.errors import OptionError

Isolation = Literal["bubblewrap", "namespaces", "process"]
ISOLATIONS: Final[tuple[Isolation, ...]] = ("bubblewrap", "namespaces", "process")
"""The ways to run a program apart, best first. The last is not a boundary, and is used only when asked for by name."""

KilledFor = Literal["time", "cpu", "output"]

_MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use.

    Attributes:
        wall_s: seconds from its start to its end; then it is killed with all that it started.
        cpu_s: processor seconds of each of its processes, rounded up to whole ones.
        memory_bytes: address space of each of its processes.
        processes: processes and threads that it may have at once, itself included.
        file_bytes: size of a file that it writes.
        folder_bytes: size of everything in its folder (not with `process`).
        output_bytes: what it may write to each of its two outputs; more, and it is killed.
        open_files: files that each of its processes may have open.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * _MIB
    processes: int = 8
    file_bytes: int = 16 * _MIB
    folder_bytes: int = 64 * _MIB
    output_bytes: int = _MIB
    open_files: int = 64

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for entry in fields(self):
            value, least = getattr(self, entry.name), self._least().get(entry.name, 1)
            in_seconds = entry.name.endswith("_s")
            fits = isinstance(value, (int, float) if in_seconds else int) and not isinstance(value, bool)
            if not fits or not math.isfinite(value) or not (value > 0 if in_seconds else value >= least):
                raise OptionError(
                    f"the limit {entry.name} of a sandbox is not valid",
                    path=f"{kind}({entry.name}=)",
                    value=value,
                    rule="a finite number of seconds > 0" if in_seconds else f"a whole number >= {least}",
                    repair=f"{kind}({entry.name}={entry.default})",
                )

    @staticmethod
    def _least() -> Mapping[str, int]:
        return {"memory_bytes": 32 * _MIB, "open_files": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits(Limits):
    """What a long-lived sandbox may use.

    Attributes:
        wall_s: seconds that one call, `bash` or `python`, may take; then its command is killed.
        open_s: seconds that the sandbox may be open; then it is closed.
        cpu_s: processor seconds of each of its processes, rounded up to whole ones.
        memory_bytes: address space of each of its processes.
        processes: processes and threads that it may have at once.
        file_bytes: size of a file that it writes.
        folder_bytes: size of everything in its work folder, and of everything in /tmp (not with `process`).
        output_bytes: what a call gives back of its output; of more, the middle is left out.
        open_files: files that each of its processes may have open.
    """

    wall_s: float = 30.0
    open_s: float = 3600.0
    cpu_s: float = 600.0
    processes: int = 32
    file_bytes: int = 64 * _MIB
    folder_bytes: int = 128 * _MIB
    output_bytes: int = 64 * 1024
    open_files: int = 256

    @staticmethod
    def _least() -> Mapping[str, int]:
        return {"memory_bytes": 32 * _MIB, "open_files": 32, "output_bytes": 256}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended.

    Attributes:
        stdout, stderr: what it wrote, as UTF-8, cut at the limit; bytes that are no text become U+FFFD.
        exit_code: its exit code; the negative number of the signal where one ended it.
        timed_out: whether it was killed because `wall_s` was over.
        killed_for: the limit that it was killed for; None when it ended by itself. A program that asks for too much
            memory, too many processes or too large a file is not killed: it gets an error, and may end with that.
        seconds: from its start to its end.
    """

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool
    killed_for: KilledFor | None
    seconds: float


class Sandbox(Protocol):
    """Runs Python programs that are not trusted. Made by `open_sandbox`.

    A sandbox keeps nothing between runs, and several threads and processes may use one at once.
    """

    @property
    def isolation(self) -> Isolation:
        """What stands between the program and this machine."""
        ...

    def run(self, program: str, *, stdin: str = "", limits: Limits = ...) -> Outcome:
        """Run a program to its end. When this returns, nothing that it started is left.

        Whatever the program does becomes an `Outcome`. `LaunchError` is raised when the sandbox itself does not work.
        """
        ...
