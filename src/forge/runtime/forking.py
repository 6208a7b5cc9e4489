"""Fork servers as their owner sees them: started when the first rank needs one, ended with the run.

There is one for each set of variables that libraries read when they are loaded, and of namespaces and limits that a
fork inherits, so that a rank is a fork of a process that loaded them in the same way, in the same place. See
`forge.runtime.fork_server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forge.runtime import rank_stub
from forge.runtime.fork_server import PADDING, PADDING_BYTES, load_time, surroundings

_log = logging.getLogger("forge.runtime")
SWITCH: Final = "FORGE_FORK"
"""`0` starts every rank by itself."""
SCOPE: Final = "FORGE_FORK_SCOPE"
"""`NAME:PID`: the runs of that process, and of programs that it starts, share fork servers, and leave them to the next
one."""
_MAX_SERVERS: Final = 4
_OF_A_RANK: Final = (rank_stub.FORK_SERVER, rank_stub.PRELOAD)
_COVERAGE: Final = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """Where ranks of a host are forked: the server's address, and the program that asks it to."""

    address: str
    program: str


class ForkServers:
    """The fork servers of one host."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    async def find(self, variables: Mapping[str, str], preload: Sequence[str]) -> ForkPoint | None:
        """Wait for the server of ranks that import `preload`, and have these variables on top of this process's own.

        None where ranks are started by themselves: `FORGE_FORK=0`, under coverage, or if they cannot be forks.
        """
        environment = {**os.environ, **variables}
        if not _makes_forks(environment):
            return None
        message = rank_stub.request(environment, preload)
        reason, early = "no server", _early.servers
        for name, owner in self._scopes(environment, early):
            address = _address(name, environment)
            try:
                if owner:
                    self._start(address, environment, owner)
                reason = await _ask(address, message)
            except OSError as error:
                reason = str(error)
            else:
                if not reason:
                    return ForkPoint(address, rank_stub.__file__)
                if early is not None and name == early._name:
                    break  # one of our own would import the same, and refuse for the same reason
        _log.info("processes start by themselves, not as forks: %s", reason)
        return None

    def _scopes(self, environment: Mapping[str, str], early: ForkServers | None) -> Iterator[tuple[str, int | None]]:
        """Yield the names of the servers that may be used, and with whose end they end; None: they are not started."""
        name, _, owner = environment.get(SCOPE, "").partition(":")
        if owner:
            yield name, next((pid for pid in _own_and_parents() if str(pid) == owner), None)
        if early is not None:
            yield early._name, None
        if owner != str(os.getpid()):
            yield self._name, os.getpid()

    def begin(self, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        """Start a server, and tell it what a rank needs. Whether it has imported that, the first rank finds out.

        Nothing waits for it, and none is left where it cannot be started or told.
        """
        try:
            address = _address(self._name, environment)
            self._start(address, environment, os.getpid())
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.setblocking(False)  # the server reads the message when it has started
                connection.connect("\0" + address)
                connection.sendall(rank_stub.request(environment, preload))
        except (OSError, ValueError) as error:  # ValueError: of a variable that no process can have
            _log.debug("nothing is imported early: %s", error)
            self.close()

    def _start(self, address: str, environment: Mapping[str, str], owner: int) -> None:
        """Start a server that ends with its owner, unless it runs.

        One of another process outlives this one. So it holds none of its streams, and ends when it is not used.
        """
        server = self._started.get(address)
        if server is not None and server.poll() is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind("\0" + address)
            except OSError:  # a runtime of this process that has ended left it to the next one
                return
            listener.listen(512)
            if len(self._started) >= _MAX_SERVERS:
                self._end(next(iter(self._started)))
            is_own = owner == os.getpid()
            variables = {**_variables(owner, environment), PADDING: "x" * PADDING_BYTES}
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the server ignores it
            try:
                self._started[address] = subprocess.Popen(
                    [sys.executable, "-m", "forge.runtime.fork_server", str(listener.fileno()), str(owner)],
                    env=variables,
                    stdin=_life() if is_own else subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=None if is_own else subprocess.DEVNULL,
                    start_new_session=not is_own,
                    pass_fds=(listener.fileno(),),
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _end(self, address: str) -> None:
        server = self._started.pop(address)
        server.kill()
        server.wait()

    def close(self) -> None:
        """End the servers, except those that are left to the next run of this process."""
        for address in list(self._started):
            if address.startswith(f"forge-fork-{self._name}-"):
                self._end(address)


class _Early:
    """The servers that the runs of this process may use beside their own, while any of those that share them lasts."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._runs: set[object] = set()
        self.servers: ForkServers | None = None

    def enter(self, run: object, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        with self._guard:
            self._runs.add(run)
            if self.servers is None:
                self.servers = ForkServers()
                self.servers.begin(environment, preload)

    def leave(self, run: object) -> None:
        with self._guard:
            self._runs.discard(run)
            if not self._runs:
                servers, self.servers = self.servers, None
                if servers is not None:
                    servers.close()


_early: Final = _Early()


@contextlib.contextmanager
def imported_early(environment: Mapping[str, str], preload: Sequence[str]) -> Iterator[None]:
    """Let a fork server import what the ranks of runs inside the block need, beside what the block does before.

    `environment` are all variables of such a rank. Ranks that need others have servers of their own, as they do if this
    one fails. Runs at the same time share that of the first. Nothing is started where ranks share servers with other
    programs, or are not forks.
    """
    if SCOPE in environment or not _makes_forks(environment):
        yield
        return
    run = object()
    try:
        _early.enter(run, environment, preload)
        yield
    finally:
        _early.leave(run)


@functools.cache
def _life() -> int:
    """Return the end of a pipe that can be read when this process has ended, however it has: the other end stays."""
    return os.pipe()[0]


def _makes_forks(environment: Mapping[str, str]) -> bool:
    return environment.get(SWITCH) != "0" and not any(name in environment for name in _COVERAGE)


def _address(name: str, environment: Mapping[str, str]) -> str:
    """Return where a server listens: one for each set of variables and surroundings."""
    chosen = sys.executable, load_time(environment), surroundings("self")
    return f"forge-fork-{name}-{hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]}"


def _variables(owner: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a server: its owner's, and of those of the first rank no more than imports need.

    Who looks for that rank, or for the program that starts the server, by its variables would find the server.
    """
    given = dict(os.environ) if owner == os.getpid() else _variables_of(owner)
    left_out = {*_OF_A_RANK, *load_time(given), "PYTHONPATH"}
    needed = load_time(environment) | {name: environment[name] for name in ("PYTHONPATH",) if name in environment}
    return {name: value for name, value in given.items() if name not in left_out} | needed


def _variables_of(pid: int) -> dict[str, str]:
    """Return what a process was started with."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(word).partition("=")[::2] for word in words if b"=" in word)


def _own_and_parents() -> Iterator[int]:
    """Yield this process, its parent, and so on."""
    pid = os.getpid()
    while pid > 0:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended, or lives in another process namespace
            return


async def _ask(address: str, message: bytes) -> str:
    """Let a server import what a rank needs; return why it cannot be a fork, and nothing if it can."""
    reader, writer = await asyncio.open_unix_connection("\0" + address)
    try:
        if rank_stub.peer_uid(writer.get_extra_info("socket")) != os.geteuid():  # it would get all our variables
            raise OSError("the fork server belongs to another user")
        writer.write(message)
        await writer.drain()
        return (await reader.read()).decode()
    finally:
        writer.close()
