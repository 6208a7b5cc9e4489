"""Processes of this machine: find those of a group, see them end, and end them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from forge.observe.logs.log_file import read_end
from forge.runtime.forking import ForkPoint, ForkServers
from forge.runtime.rank_main import GROUP, RANK


def free_port(address: str = "") -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def find_marked(group: str) -> dict[int, int]:
    """Return the rank of every process of this machine that belongs to `group`, descendants of ranks included."""
    mark, rank_mark = f"{GROUP}={group}".encode(), f"{RANK}=".encode()
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            words = Path(entry.path, "environ").read_bytes().split(b"\0")
        except OSError:  # it ended, or is another user's
            continue
        if mark in words:
            rank = next((word for word in words if word.startswith(rank_mark)), rank_mark + b"0")
            found[int(entry.name)] = int(rank.removeprefix(rank_mark))
    return found


def find_ranks(group: str) -> dict[int, int]:
    """Return the process of each rank of `group`. What a rank has started is marked too, but has a marked parent."""
    marked = find_marked(group)
    return {rank: pid for pid, rank in marked.items() if _parent(pid) not in marked}


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def end_marked(group: str) -> None:
    """SIGKILL every process of `group` that is left."""
    for pid in find_marked(group):
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if pid in find_marked(group):  # still the same process, now that the pidfd holds it
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            continue
        finally:
            os.close(pidfd)


class ProcessWatch(Protocol):
    """Sees and ends processes on one host. Everything here runs on the control loop."""

    async def watch(self, pid: int, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` once, soon after process `pid` has ended (at once if it has)."""

    async def kill(self, pids: Sequence[int]) -> None:
        """SIGKILL processes that were watched; those that have ended are passed over."""

    async def find(self, group: str) -> dict[int, int]:
        """Return the process of each rank of a group, as far as they have been started."""

    async def end(self, group: str) -> None:
        """SIGKILL whatever is left of a group, also what its ranks have started."""

    async def free_port(self) -> int: ...

    async def read_end(self, path: str, num_lines: int) -> list[str]:
        """Return the last lines of a file; nothing where it cannot be read."""

    async def fork_point(self, variables: Mapping[str, str], preload: Sequence[str]) -> ForkPoint | None:
        """Return where ranks with these variables and modules are forked; None if they start by themselves."""

    async def close(self) -> None: ...


class LocalWatch:
    """Watches processes of this machine through pidfds, in the control loop itself."""

    def __init__(self) -> None:
        self._fds: dict[int, list[int]] = {}
        self._fork_servers = ForkServers()

    async def watch(self, pid: int, on_exit: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            on_exit()
            return
        self._fds.setdefault(pid, []).append(fd)

        def ended() -> None:
            self._fds[pid].remove(fd)
            if not self._fds[pid]:
                del self._fds[pid]
            _stop_watching(fd, loop)
            on_exit()

        loop.add_reader(fd, ended)

    async def kill(self, pids: Sequence[int]) -> None:
        for pid in pids:
            for fd in self._fds.get(pid, [])[:1]:  # through the pidfd: a recycled pid is never hit
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    async def find(self, group: str) -> dict[int, int]:
        return find_ranks(group)

    async def end(self, group: str) -> None:
        end_marked(group)

    async def free_port(self) -> int:
        return free_port("127.0.0.1")

    async def read_end(self, path: str, num_lines: int) -> list[str]:
        return read_end(path, num_lines=num_lines)

    async def fork_point(self, variables: Mapping[str, str], preload: Sequence[str]) -> ForkPoint | None:
        return await self._fork_servers.find(variables, preload)

    async def close(self) -> None:
        self._fork_servers.close()
        loop = asyncio.get_running_loop()
        for fds in self._fds.values():
            for fd in fds:
                _stop_watching(fd, loop)
        self._fds.clear()


def _stop_watching(fd: int, loop: asyncio.AbstractEventLoop) -> None:
    loop.remove_reader(fd)
    os.close(fd)
