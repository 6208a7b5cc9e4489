"""Fork servers as their owner sees them: started when the first rank needs one, ended with the run.

There is one for each set of variables that libraries read when they are loaded, and of namespaces and limits that a
fork inherits, so that a rank is a fork of a process that loaded them in the same way, in the same place. See
`forge.runtime.fork_server`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from forge.runtime import rank_stub
from forge.runtime.fork_server import PADDING, PADDING_BYTES, load_time, surroundings

_log = logging.getLogger("forge.runtime")
SWITCH: Final = "FORGE_FORK"
"""`0` starts every rank by itself."""
SCOPE: Final = "FORGE_FORK_SCOPE"
"""`NAME:PID`: the runs of that process share fork servers, and leave them to the next one; programs that it starts use
them, too."""
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
        if environment.get(SWITCH) == "0" or any(name in environment for name in _COVERAGE):
            return None
        chosen = sys.executable, load_time(environment), surroundings("self")
        key = hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]
        message = rank_stub.request(environment, preload)
        reason = "no server"
        for name, may_start in self._scopes(environment):
            address = f"forge-fork-{name}-{key}"
            try:
                if may_start:
                    self._start(address, environment)
                reason = await _ask(address, message)
            except OSError as error:
                reason = str(error)
            if not reason:
                return ForkPoint(address, rank_stub.__file__)
        _log.info("processes start by themselves, not as forks: %s", reason)
        return None

    def _scopes(self, environment: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
        """Yield the names of the servers that may be used, and whether this process starts them."""
        name, _, owner = environment.get(SCOPE, "").partition(":")
        if owner:
            yield name, owner == str(os.getpid())
        if owner != str(os.getpid()):
            yield self._name, True

    def _start(self, address: str, environment: Mapping[str, str]) -> None:
        """Start a server, unless it runs."""
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
            # Of what only the first rank was given, no more than imports need: who looks for that rank by its variables
            # would find the server.
            own = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK} | load_time(environment)
            own |= {name: environment[name] for name in ("PYTHONPATH",) if name in environment}
            self._started[address] = subprocess.Popen(
                [sys.executable, "-m", "forge.runtime.fork_server", str(listener.fileno()), str(os.getpid())],
                env={**own, PADDING: "x" * PADDING_BYTES},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
            )

    def _end(self, address: str) -> None:
        server = self._started.pop(address)
        server.kill()
        server.wait()

    def close(self) -> None:
        """End the servers, except those that are left to the next run of this process."""
        for address in list(self._started):
            if address.startswith(f"forge-fork-{self._name}-"):
                self._end(address)


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
