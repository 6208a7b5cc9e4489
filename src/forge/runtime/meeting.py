"""Who belongs to a run, and how its processes find each other.

A run has one root: the process whose program started it. Its meeting point opens with the runtime, or when somebody
first asks for it, and closes with the runtime. Every rank, and whatever a rank starts, has the addresses and the secret
in its environment; `meet` connects to a desk there. A process that was started without them is the root of a run of its
own.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import os
import secrets
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forge.runtime.control import control
from forge.runtime.lines import LineError
from forge.runtime.meeting_line import Line, open_lines
from forge.runtime.meeting_point import SERVICES, Desk, MeetingPoint, Session

__all__ = [
    "HOST",
    "MEETING",
    "RUN",
    "SECRET",
    "SERVICES",
    "Desk",
    "Line",
    "LineError",
    "MeetingPoint",
    "Session",
    "close_point",
    "environment",
    "host_id",
    "is_point_open",
    "meet",
    "open_environment",
    "open_point",
    "run_id",
    "run_secret",
    "secret_environment",
]

MEETING: Final = "FORGE_MEETING"
"""The addresses of the meeting point, best first, separated by spaces."""

SECRET: Final = "FORGE_SECRET"
RUN: Final = "FORGE_RUN"
HOST: Final = "FORGE_HOST"
"""Replaces the identity of the host, so that one machine can stand for two."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What a process must know to belong to a run."""

    id: str
    secret: bytes
    addresses: tuple[str, ...] = ()


def _inherited() -> _Run | None:
    addresses, secret = os.environ.get(MEETING), os.environ.get(SECRET)
    if not addresses or not secret:
        return None
    try:
        return _Run(os.environ.get(RUN, ""), bytes.fromhex(secret), tuple(addresses.split()))
    except ValueError:
        raise LineError(
            "the run's secret cannot be read",
            path=SECRET,
            rule="hexadecimal digits, set by the process that started this one",
            repair=f"unset {SECRET} and {MEETING}: this process then has a run of its own",
        ) from None


_member: _Run | None = None
_own: _Run | None = None
_point: MeetingPoint | None = None
_lines: dict[str, Line] = {}
_meeting = threading.Lock()
_knowing = threading.Lock()
_opening = asyncio.Lock()


def _membership() -> _Run | None:
    """The run that this process was started in. None in a root, and in a rank that has not been told the secret yet."""
    global _member
    if _member is None and _own is None:
        _member = _inherited()
    return _member


def _identity() -> _Run:
    """The run of this process: the one it was started in, or its own, which begins here."""
    global _own
    with _knowing:
        if (member := _membership()) is not None:
            return member
        if _own is None:
            _own = _Run(secrets.token_hex(6), secrets.token_bytes(32))
        return _own


def run_id() -> str:
    """The run's name, the same in all its processes and in no other run."""
    return _identity().id


def run_secret() -> bytes:
    """What only processes of this run know. For lines between them; never to be printed or stored."""
    return _identity().secret


def host_id() -> str:
    """Equal in two processes exactly when they can share memory through `/proc/<pid>/fd`."""
    return os.environ.get(HOST) or _real_host_id()


@functools.cache
def _real_host_id() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}/{os.geteuid()}"


def environment() -> dict[str, str]:
    """The variables that make a process that this one starts on its machine part of the run.

    Opens the meeting point where that has not happened.
    """
    return open_environment() | secret_environment()


def open_environment(*, is_remote: bool = False) -> dict[str, str]:
    """Those of the variables that everyone may see; `is_remote` for a process on another host."""
    run = _reachable()
    addresses = run.addresses  # a root has its Unix line first, and a rank what is best where it is
    if is_remote:
        addresses = tuple(sorted(addresses, key=lambda address: not address.startswith("tcp:")))
    return {MEETING: " ".join(addresses), RUN: run.id}


def secret_environment() -> dict[str, str]:
    """The rest of them, never to be shown, logged or put on a command line."""
    return {SECRET: run_secret().hex()}


def meet(service: str) -> Line:
    """This process's line to a desk of the meeting point, opened on first use and again when it was lost.

    Raises `LineError` when the run has ended or its root is out of reach. May block for a moment: not for the control
    loop.
    """
    line = _lines.get(service)
    if line is not None and line.is_open:
        return line
    with _meeting:
        line = _lines.get(service)
        if line is None or not line.is_open:
            run = _reachable()
            line = _lines[service] = Line.open(run.addresses, run.secret, service=service, host=host_id())
        return line


def _reachable() -> _Run:
    """The run with its addresses; in a root, the meeting point is opened for it."""
    if (member := _membership()) is not None:
        return member
    point = _point
    if point is None:
        if asyncio._get_running_loop() is control().loop:
            raise LineError(
                "the meeting point is not open, and the control loop cannot wait for it",
                path="forge.runtime.meeting",
                rule="on the control loop, `await open_point()` comes first",
            )
        point = control().start(open_point()).result()
        assert point is not None  # this process is a root
    return _Run(point.run_id, point.secret, point.addresses)


def is_point_open() -> bool:
    """Whether this process has a meeting point that listens."""
    return _point is not None


async def open_point(bind: str | None = None) -> MeetingPoint | None:
    """Open the meeting point of a root, and with `bind` a tcp line on that address. On the control loop.

    Where it is open already it stays; in a process of another's run there is none to open.
    """
    global _point
    if _membership() is not None:
        return None
    async with _opening:
        if _point is None:
            run = _identity()
            point = MeetingPoint(run.secret, run_id=run.id)
            await point.open()
            _close_at_exit()
            _point = point
        if bind is not None:
            await _point.open_tcp(bind)
        return _point


async def close_point() -> None:
    """Close the meeting point of a root; the next one is that of a new run. On the control loop."""
    global _point, _own
    async with _opening:
        point, _point = _point, None
        with _knowing:
            _own = None
        if point is not None:
            await point.close()


@functools.cache
def _close_at_exit() -> None:
    """Registered with the first opening, before the runtime's own end is: so it comes after that one."""

    def close() -> None:
        if _point is not None and _point.pid == os.getpid():
            with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
                control().start(close_point()).result(timeout=5)

    atexit.register(close)


def _after_fork() -> None:
    """A forked child belongs to its parent's run, through connections of its own."""
    global _member, _own, _point, _meeting, _knowing, _opening
    _meeting, _knowing, _opening = threading.Lock(), threading.Lock(), asyncio.Lock()
    _lines.clear()
    for line in list(open_lines):
        line.abandon()
    if _point is not None:
        _member = _Run(_point.run_id, _point.secret, _point.addresses)
        _point.abandon()
    _point = _own = None


os.register_at_fork(after_in_child=_after_fork)
