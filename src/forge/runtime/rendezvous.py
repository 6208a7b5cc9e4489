"""Who belongs to a run, and how its processes find each other.

A run has one root: the process whose program started it. Its rendezvous server opens with the runtime, or on first use,
and closes with the runtime. Every rank, and whatever a rank starts, has the addresses and the secret in its
environment; `connect` connects to a registry there. A process started without them is the root of a run of its own.
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
from forge.runtime.exposure import INSECURE
from forge.runtime.rendezvous_client import Connection, open_connections
from forge.runtime.rendezvous_server import REGISTRIES, Registry, RendezvousServer, Session
from forge.runtime.sockets import ConnectionFailure

__all__ = [
    "HOST",
    "REGISTRIES",
    "RENDEZVOUS",
    "RUN",
    "SECRET",
    "Connection",
    "ConnectionFailure",
    "Registry",
    "RendezvousServer",
    "Session",
    "close_server",
    "connect",
    "environment",
    "host_id",
    "is_insecure",
    "is_server_open",
    "open_environment",
    "open_server",
    "run_id",
    "run_secret",
    "secret_environment",
]

RENDEZVOUS: Final = "FORGE_RENDEZVOUS"
"""The addresses of the rendezvous server, best first, separated by spaces."""

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
    is_insecure: bool = False


def _inherited() -> _Run | None:
    addresses, secret = os.environ.get(RENDEZVOUS), os.environ.get(SECRET)
    if not addresses or not secret:
        return None
    try:
        is_insecure = os.environ.get(INSECURE) == "1"
        return _Run(os.environ.get(RUN, ""), bytes.fromhex(secret), tuple(addresses.split()), is_insecure)
    except ValueError:
        raise ConnectionFailure(
            "the run's secret cannot be read",
            path=SECRET,
            rule="hexadecimal digits, set by the process that started this one",
            repair=f"unset {SECRET} and {RENDEZVOUS}: this process then starts its own run",
        ) from None


_member: _Run | None = None
_own: _Run | None = None
_server: RendezvousServer | None = None
_connections: dict[str, Connection] = {}
_connecting = threading.Lock()
_identifying = threading.Lock()
_opening = asyncio.Lock()


def _membership() -> _Run | None:
    """Return the run that this process was started in; None in a root, and in a rank that has no secret yet."""
    global _member
    if _member is None and _own is None:
        _member = _inherited()
    return _member


def _identity() -> _Run:
    """Return the run of this process: the one it was started in, or a new one of its own."""
    global _own
    with _identifying:
        if (member := _membership()) is not None:
            return member
        if _own is None:
            _own = _Run(secrets.token_hex(6), secrets.token_bytes(32))
        return _own


def run_id() -> str:
    """Return the run's name, the same in all its processes and in no other run."""
    return _identity().id


def run_secret() -> bytes:
    """Return what only processes of this run know. Never print or store it."""
    return _identity().secret


def host_id() -> str:
    """Return an identity that is equal in two processes exactly when they can share memory through `/proc/<pid>/fd`."""
    return os.environ.get(HOST) or _real_host_id()


@functools.cache
def _real_host_id() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}/{os.geteuid()}"


def environment() -> dict[str, str]:
    """Return the variables that make a process that this one starts on its machine part of the run.

    Opens the rendezvous server where that has not happened.
    """
    return open_environment() | secret_environment()


def open_environment(*, is_remote: bool = False) -> dict[str, str]:
    """Return the variables that are not secret; `is_remote` for a process on another host."""
    run = _reachable()
    addresses = run.addresses  # a root has its Unix socket first, and a rank what is best where it is
    if is_remote:
        addresses = tuple(sorted(addresses, key=lambda address: not address.startswith("tcp:")))
    return {RENDEZVOUS: " ".join(addresses), RUN: run.id, INSECURE: "1" if run.is_insecure else "0"}


def secret_environment() -> dict[str, str]:
    """Return the secret variables, never to be shown, logged or put on a command line."""
    return {SECRET: run_secret().hex()}


def connect(registry: str) -> Connection:
    """Return this process's connection to a registry of the rendezvous server, opened again when it was lost.

    Raises `ConnectionFailure` when the run has ended or its root is out of reach. May block for a moment: not
    for the control loop.
    """
    connection = _connections.get(registry)
    if connection is not None and connection.is_open:
        return connection
    with _connecting:
        connection = _connections.get(registry)
        if connection is None or not connection.is_open:
            run = _reachable()
            connection = _connections[registry] = Connection.open(
                run.addresses, run.secret, registry=registry, host=host_id()
            )
        return connection


def _reachable() -> _Run:
    """Return the run with its addresses; in a root, open the rendezvous server."""
    if (member := _membership()) is not None:
        return member
    server = _server
    if server is None:
        if asyncio._get_running_loop() is control().loop:
            raise ConnectionFailure(
                "the rendezvous server is not open, and the control loop cannot wait for it",
                path="forge.runtime.rendezvous",
                rule="on the control loop, `await open_server()` comes first",
            )
        server = control().start(open_server()).result()
        assert server is not None  # this process is a root
    return _Run(server.run_id, server.secret, server.addresses, server.is_insecure)


def is_insecure() -> bool:
    """Return whether the user allows plain TCP between the machines of this run (`launcher.insecure`)."""
    return _reachable().is_insecure


def is_server_open() -> bool:
    """Return whether this process has a rendezvous server that listens."""
    return _server is not None


async def open_server(bind: str | None = None, *, insecure: bool = False) -> RendezvousServer | None:
    """Open the rendezvous server of a root, and with `bind` also listen on that TCP address. On the control loop.

    An open server stays. A process that belongs to another process's run has none: None.
    """
    global _server
    if _membership() is not None:
        return None
    async with _opening:
        if _server is None:
            run = _identity()
            server = RendezvousServer(run.secret, run_id=run.id)
            await server.open()
            _close_at_exit()
            _server = server
        if bind is not None:
            await _server.open_tcp(bind, insecure=insecure)
        return _server


async def close_server() -> None:
    """Close the rendezvous server of a root; the next one belongs to a new run. On the control loop."""
    global _server, _own
    async with _opening:
        server, _server = _server, None
        with _identifying:
            _own = None
        if server is not None:
            await server.close()


@functools.cache
def _close_at_exit() -> None:
    """Close the server at exit; registered before the runtime's own handler, so it runs after that one."""

    def close() -> None:
        if _server is not None and _server.pid == os.getpid():
            with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
                control().start(close_server()).result(timeout=5)

    atexit.register(close)


def _after_fork() -> None:
    """Make a forked child a member of its parent's run, with its own connections."""
    global _member, _own, _server, _connecting, _identifying, _opening
    _connecting, _identifying, _opening = threading.Lock(), threading.Lock(), asyncio.Lock()
    _connections.clear()
    for connection in list(open_connections):
        connection.abandon()
    if _server is not None:
        _member = _Run(_server.run_id, _server.secret, _server.addresses, _server.is_insecure)
        _server.abandon()
    _server = _own = None


os.register_at_fork(after_in_child=_after_fork)
