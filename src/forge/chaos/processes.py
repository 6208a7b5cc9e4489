"""The processes of a run, found by their environment: also those that hang, and those that have lost their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forge.chaos.script import CONTROLLER

TAG: Final = "FORGE_CHAOS"
"""The environment variable that names an experiment in every process of its run."""
_LABEL, _RANK_MAIN, _SUPERVISE = "FORGE_LABEL", "forge.runtime.rank_main", "--supervise"
_FORK_SERVER: Final = "forge.runtime.fork_server"
FORK_SERVER: Final = "fork-server"
"""The role of processes that ranks are forks of."""


@dataclass(frozen=True, slots=True)
class RunProcess:
    """A living process of a run. `role` is empty for one that is neither a worker nor the controller."""

    pid: int
    role: str
    label: str


def processes_of(tag: str) -> list[RunProcess]:
    """Return the living processes of an experiment, in the order of their ids."""
    return sorted(_found(tag), key=lambda process: process.pid)


def targets_of(tag: str, role: str) -> list[RunProcess]:
    """Return the processes whose role starts with `role`, by label: workers of the run, or its controller."""
    found = (each for each in _found(tag) if each.role.startswith(role))
    return sorted(found, key=lambda process: (process.label, process.pid))


def _found(tag: str) -> Iterator[RunProcess]:
    own = os.getpid()
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == own:
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            process = _read(int(entry), tag)
            if process is not None:
                yield process


def is_tagged(pid: int, tag: str) -> bool:
    """Return whether a process belongs to an experiment. Raise `OSError` if it has ended."""
    return f"\0{TAG}={tag}\0" in f"\0{_text(Path(f'/proc/{pid}/environ'))}\0"


def _read(pid: int, tag: str) -> RunProcess | None:
    folder = Path(f"/proc/{pid}")
    if not is_tagged(pid, tag):
        return None
    if (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
        return None
    words = _text(folder / "cmdline").split("\0")
    variables = dict(word.partition("=")[::2] for word in _text(folder / "environ").split("\0"))
    if _FORK_SERVER in words:
        return RunProcess(pid, FORK_SERVER, FORK_SERVER)
    if _RANK_MAIN in words:
        label = variables.get(_LABEL, "")
        return RunProcess(pid, label.partition("[")[0], label)
    is_controller = _LABEL not in variables and "run" in words and _SUPERVISE not in words
    return RunProcess(pid, CONTROLLER if is_controller else "", CONTROLLER if is_controller else "")


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


def wait_gone(tag: str, *, limit_s: float) -> list[RunProcess]:
    """Wait until an experiment's processes have ended, and return those that stay."""
    until = time.monotonic() + limit_s
    while (left := processes_of(tag)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def kill_all(tag: str) -> None:
    """Kill whatever is left of an experiment."""
    for process in processes_of(tag):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
