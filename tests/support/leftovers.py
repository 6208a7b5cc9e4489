"""What a test may have left behind. Other tests may run beside it: what a living process of theirs uses is not its.

Processes and files need time to go on a busy machine, and a look at all processes is not one moment: a file that is
mapped and closed between two looks seems unused. So the checks wait, and report only what stays.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
_SERVER = "forge.runtime.fork_server"
LIMIT_S = 60.0
"""How long a check waits for things to go. Only a test that fails waits that long."""


def running_children() -> list[psutil.Process]:
    """The processes that this one started, directly or not. Python's own tracker of shared memory and the fork servers
    that tests share, which any test may have started and which end with this process, do not count."""
    return [child for child in psutil.Process().children(recursive=True) if is_running(child)]


def processes_of(controller: int) -> list[psutil.Process]:
    """Return what a controller started, directly or not, with the ranks that are forks of servers that tests share, and
    without these servers, which stay."""
    below = psutil.Process(controller).children(recursive=True)
    for process in psutil.process_iter():
        try:
            if process.environ().get("FORGE_OWNER_PID") == str(controller):
                below += [process, *process.children(recursive=True)]
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended meanwhile
            continue
    return [process for process in dict.fromkeys(below) if is_running(process)]


def lasting_children(before: Iterable[psutil.Process] = (), *, limit_s: float = LIMIT_S) -> list[str]:
    """Wait until the processes that this one started have ended, and return the command lines of those that stay.

    Those of `before` may stay: an engine that several tests of a module share, for example.
    """
    until, known = time.monotonic() + limit_s, set(before)
    while (children := [each for each in running_children() if each not in known]) and (
        left_s := until - time.monotonic()
    ) > 0:
        psutil.wait_procs(children, timeout=left_s)
    return [line for line in map(_command_line, children) if line]


def _command_line(process: psutil.Process) -> str:
    """Return the command line of a process; nothing if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def is_running(process: psutil.Process) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        line = process.cmdline()
        return not ("resource_tracker" in " ".join(line) or (_SERVER in line and line[-1] == str(os.getpid())))
    except psutil.NoSuchProcess:
        return False


def has_ended(pid: int, *, limit_s: float = 10 * LIMIT_S) -> bool:
    """Wait until a process has ended, whether or not its parent has noticed. It may be gone already."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], limit_s)[0])
    finally:
        os.close(watched)


def shared_memory_files(folder: Path = SHARED_MEMORY) -> set[str]:
    """The names of all files in shared memory."""
    return set(os.listdir(folder))


def lasting_orphans(before: set[str], *, limit_s: float = LIMIT_S) -> set[str]:
    """Wait until `orphans_since` finds none, and return those that stay."""
    until = time.monotonic() + limit_s
    found = orphans_since(before)
    while found and time.monotonic() < until:
        time.sleep(0.05)
        found &= orphans_since(before)
    return found


def orphans_since(before: set[str], folder: Path = SHARED_MEMORY) -> set[str]:
    """The files in shared memory that have come since, and that no living process has open or mapped."""
    found = shared_memory_files(folder) - before
    if found:
        found -= _in_use(folder)
    return found & shared_memory_files(folder)


def _in_use(folder: Path) -> set[str]:
    """The names of files in the folder that some process has open or mapped."""
    names: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            names.update(path.name for path in _used_by(process) if path.parent == folder)
        except OSError:  # it has ended meanwhile
            continue
    return names


def _used_by(process: Path) -> Iterator[Path]:
    for line in (process / "maps").read_text().splitlines():
        yield Path(line[73:].strip())
    for number in os.listdir(process / "fd"):
        yield Path(os.readlink(process / "fd" / number))
