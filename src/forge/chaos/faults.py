"""Injects faults into processes and files of a run."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forge.chaos.processes import RunProcess, targets_of
from forge.chaos.script import CONTROLLER, TRAINER, Fault
from forge.observe.clock import CLOCK_FORMAT

_PIDFD_GETFD: Final = 438
_PEER: Final = struct.Struct("3i")
_SLOW_PERIOD_S: Final = 0.1
_KEPT_FREE_BYTES: Final = 1 << 30
"""Memory that a fault of memory leaves available, so that it presses on the run and not on the machine."""
_TARGET_WAIT_S: Final = 60.0
"""How long a fault waits for a process of its role, which may be starting again."""


class NotInjected(Exception):
    """A fault could not be injected; the message says why."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What faults reach besides processes.

    Attributes:
        tag: the experiment whose processes are hit.
        folder: the run's folder.
        checkpoints: the folder of its checkpoints.
        clock: the file that shifts the run's clocks.
    """

    tag: str
    folder: Path
    checkpoints: Path
    clock: Path


async def inject(fault: Fault, around: Surroundings) -> str:
    """Inject a fault, wait until it is over, and return what was hit. `NotInjected` where that was not possible."""
    return await _INJECTORS[fault.kind](fault, around)


async def _target(fault: Fault, around: Surroundings) -> RunProcess:
    until = asyncio.get_running_loop().time() + _TARGET_WAIT_S
    while not (found := targets_of(around.tag, fault.role)):
        if asyncio.get_running_loop().time() > until:
            raise NotInjected(f"there was no {fault.role}")
        await asyncio.sleep(0.1)
    return found[fault.pick % len(found)]


def _signal(process: RunProcess, number: signal.Signals) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        raise NotInjected(f"{process.label} had just ended") from None


async def _kill(fault: Fault, around: Surroundings) -> str:
    process = await _target(fault, around)
    _signal(process, signal.SIGKILL)
    return f"killed {process.label}, process {process.pid}"


async def _stop(fault: Fault, around: Surroundings) -> str:
    process = await _target(fault, around)
    _signal(process, signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.duration_s)
    finally:
        _resume(process)
    return f"stopped {process.label}, process {process.pid}, for {fault.duration_s:.1f} s"


async def _slow(fault: Fault, around: Surroundings) -> str:
    process = await _target(fault, around)
    loop = asyncio.get_running_loop()
    until = loop.time() + fault.duration_s
    try:
        while loop.time() < until:
            _signal(process, signal.SIGSTOP)
            await asyncio.sleep(0.8 * _SLOW_PERIOD_S)
            _signal(process, signal.SIGCONT)
            await asyncio.sleep(0.2 * _SLOW_PERIOD_S)
    except NotInjected:
        pass  # it ended while it was slow
    finally:
        _resume(process)
    return f"slowed {process.label}, process {process.pid}, for {fault.duration_s:.1f} s"


async def _take_memory(fault: Fault, around: Surroundings) -> str:
    """Let a process take what is available, except for a reserve."""
    num_bytes = max(0, _available_bytes() - _KEPT_FREE_BYTES)
    program = f"data = bytearray({num_bytes}); data[::4096] = b'x' * len(data[::4096]); print(flush=True); input()"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        await asyncio.sleep(fault.duration_s)
    finally:
        process.kill()
        await process.wait()
    return f"took {num_bytes / 1e9:.1f} GB of memory for {fault.duration_s:.1f} s"


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


async def _disconnect(fault: Fault, around: Surroundings) -> str:
    """Shut down one connected socket of a process, in its own open file: both ends see the connection break."""
    process = await _target(fault, around)
    with contextlib.ExitStack() as copied:
        found = _connections(process.pid, copied)
        if not found:
            raise NotInjected(f"{process.label} has no connection to another process")
        number, chosen = found[fault.pick % len(found)]
        try:
            chosen.shutdown(socket.SHUT_RDWR)
        except OSError:
            raise NotInjected(f"the connection of {process.label} had just ended") from None
        return (
            f"broke a connection of {process.label}, process {process.pid}: {chosen.family.name}, descriptor {number}"
        )


def _connections(pid: int, copied: contextlib.ExitStack) -> list[tuple[int, socket.socket]]:
    """Return a process's descriptors of connections to other processes, with copies of them.

    Those between two threads of one process are not a network's: without them, it dies as if it were killed.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return []
    copied.callback(os.close, handle)
    found = {number: _copy(handle, number) for number in _sockets(pid)}
    connected = {number: copied.enter_context(each) for number, each in found.items() if each is not None}
    ends = {(each.getsockname(), each.getpeername()) for each in connected.values() if each.family != socket.AF_UNIX}

    def is_internal(each: socket.socket) -> bool:
        if each.family == socket.AF_UNIX:
            return bool(_PEER.unpack(each.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0] == pid)
        return (each.getpeername(), each.getsockname()) in ends

    return [(number, each) for number, each in sorted(connected.items()) if not is_internal(each)]


def _sockets(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{entry}").startswith("socket:"):
                    found.append(int(entry))
    return found


def _copy(handle: int, number: int) -> socket.socket | None:
    """Return a copy of a process's socket, if that is connected."""
    libc = ctypes.CDLL(None, use_errno=True)
    copied = libc.syscall(_PIDFD_GETFD, handle, number, 0)
    if copied < 0:
        if ctypes.get_errno() in (errno.EBADF, errno.ESRCH):
            return None  # it was closed meanwhile
        raise NotInjected(f"its sockets cannot be reached: {os.strerror(ctypes.get_errno())}")
    found = socket.socket(fileno=copied)
    families = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    try:
        found.getpeername()
        if found.family in families and found.type == socket.SOCK_STREAM:
            return found
    except OSError:  # one that listens, or is no longer connected
        pass
    found.close()
    return None


async def _fill_disk(fault: Fault, around: Surroundings) -> str:
    """Fill the run's file system, which is the experiment's own."""
    if not around.folder.parent.is_mount():
        raise NotInjected("the run has no file system of its own (--disk-gb)")
    ballast, block = around.folder / ".chaos-ballast", b"\0" * (1 << 20)
    size = 0
    try:
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                size += file.write(block)
        await asyncio.sleep(fault.duration_s)
    finally:
        ballast.unlink(missing_ok=True)
    return f"filled the disk with {size / 1e6:.0f} MB for {fault.duration_s:.1f} s"


async def _corrupt(fault: Fault, around: Surroundings) -> str:
    """Change one byte in each of three places of the newest checkpoint's largest file, and kill who would read it.

    Who could complete a newer one meanwhile is stopped first. A controller's trainers die with it: one of them may be
    about to complete another.
    """
    process = await _target(fault, around)
    trainers = [each for each in targets_of(around.tag, TRAINER) if each.pid != process.pid]
    with contextlib.ExitStack() as stopped:
        for each in (process, *trainers):
            with contextlib.suppress(NotInjected):  # what has ended completes nothing
                _signal(each, signal.SIGSTOP)
                stopped.callback(_resume, each)
                await asyncio.to_thread(_wait_stopped, each.pid)
        changed = _change_newest_checkpoint(fault, around)
        _signal(process, signal.SIGKILL)
        if process.role == CONTROLLER:
            for each in trainers:
                with contextlib.suppress(NotInjected):
                    _signal(each, signal.SIGKILL)
    return f"changed 3 bytes of {changed} and killed {process.label}, process {process.pid}"


def _wait_stopped(pid: int) -> None:
    """Wait until every thread of a process has left what it was doing in the kernel, such as a rename, or has ended."""
    while True:
        try:
            stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            return
        if all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats):
            return
        time.sleep(0.001)


def _resume(process: RunProcess) -> None:
    with contextlib.suppress(NotInjected):
        _signal(process, signal.SIGCONT)


def _change_newest_checkpoint(fault: Fault, around: Surroundings) -> str:
    """Change the bytes, and return the names of the checkpoint and its file."""
    records = _complete_checkpoints(around)
    if len(records) < 2:
        raise NotInjected("there is no older checkpoint to fall back to")
    folder = records[-1].parent
    file = max((each for each in folder.iterdir() if each.is_file()), key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    with file.open("r+b") as opened:
        for third in range(3):
            place = (fault.pick + third * size // 3) % size
            opened.seek(place)
            byte = opened.read(1)
            opened.seek(place)
            opened.write(bytes([byte[0] ^ 0xFF]))
    return f"{folder.name}/{file.name}"


def _complete_checkpoints(around: Surroundings) -> list[Path]:
    """Return the records of complete checkpoints, the newest last."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # the run has deleted one meanwhile
            found = around.checkpoints.glob("step-????????/checkpoint.json")
            return sorted(found, key=lambda path: path.stat().st_mtime_ns)


async def _jump(fault: Fault, around: Surroundings) -> str:
    """Move the run's clocks: the wall clock both ways, the monotonic one forward only, as after a suspended machine."""
    wall, monotonic = struct.unpack(CLOCK_FORMAT, around.clock.read_bytes())
    moved = struct.pack(CLOCK_FORMAT, wall + fault.duration_s, monotonic + max(0.0, fault.duration_s))
    with around.clock.open("r+b") as file:
        file.write(moved)
    return f"moved the clocks by {fault.duration_s:+.0f} s"


_INJECTORS: Final[dict[str, Callable[[Fault, Surroundings], Awaitable[str]]]] = {
    "kill": _kill,
    "stop": _stop,
    "slow": _slow,
    "memory": _take_memory,
    "disconnect": _disconnect,
    "disk_full": _fill_disk,
    "corrupt_checkpoint": _corrupt,
    "clock": _jump,
}
