"""Peers without a certificate gain nothing at a `forge worker` on tls://, and disrupt nothing."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from certificates import make_certificates, tls_environment
from fuzzing import inputs, num_descriptors, resident_bytes, silent_connections

NUM_SILENT = 300
BATCH = 200
"""Connections that are open at the same time: the worker reads them while this process opens others."""

CONTROLLER = """
import asyncio, sys
import forge
from actors import Worker
from forge.config import LauncherConfig

async def main():
    launcher = LauncherConfig(kind="hosts", bind="localhost", hosts=(sys.argv[1],), attach_timeout_s=300)
    async with forge.run(launcher):
        actor = await Worker.as_actor()
        print(await actor.pid.call_one(), flush=True)
        sys.stdin.readline()
        print(await actor.pid.call_one(), flush=True)

asyncio.run(main())
"""


def client_hello() -> bytes:
    """Return how a TLS client begins."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


HELLO = client_hello()
VALID = [
    HELLO,
    struct.pack(">BHH", 23, 0x0303, 16384) + bytes(100),  # a record of data before any handshake
    struct.pack(">Q", 2**30) + b"frame",  # a frame of Monarch's plain channel, of a gigabyte
    struct.pack(">Q", 64) + bytes(64),
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
]


def flood(place: tuple[str, int]) -> None:
    """Send every input in a connection of its own."""
    opened: list[socket.socket] = []
    for data in inputs(21, VALID):
        sock = socket.create_connection(place, timeout=600)
        with contextlib.suppress(OSError):  # it was closed while we spoke
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        opened.append(sock)
        if len(opened) == BATCH:
            drain(opened)
    drain(opened)


def drain(opened: list[socket.socket]) -> None:
    """Wait until the worker has closed each connection. What it says is an alert or a handshake of TLS at most."""
    for sock in opened:
        with sock, contextlib.suppress(ConnectionError):
            said = b""
            while part := sock.recv(65536):
                said += part
            assert not said or said[0] in (21, 22), said[:40]
    opened.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_certificates(tmp_path, dict.fromkeys(("worker", "controller"), "DNS:localhost,IP:127.0.0.1"))
    return tmp_path


@pytest.fixture
def worker(folder: Path, held_port: Callable[[], int], leaves_nothing: None) -> Iterator[tuple[int, int]]:
    """A worker that listens: its port, and the process that serves."""
    port = held_port()
    with (folder / "worker.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "forge.cli", "worker", "--address", f"tls://localhost:{port}"],
            stdout=subprocess.PIPE, stderr=log, text=True, env=tls_environment(folder, "worker"),
        )  # fmt: skip
    try:
        assert process.stdout is not None
        yield port, int(process.stdout.readline().split("(process ")[1].rstrip(")\n"))
    finally:
        process.terminate()
        process.communicate(timeout=600)


def test_strangers_disrupt_no_run(worker: tuple[int, int], folder: Path) -> None:
    port, pid = worker
    place = ("127.0.0.1", port)
    environment = tls_environment(folder, "controller") | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, f"tls://localhost:{port}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert controller.stdout is not None
    actor = controller.stdout.readline()
    assert actor.strip().isdigit()
    memory, descriptors = resident_bytes(pid), num_descriptors(pid)
    silent = silent_connections(place, NUM_SILENT)
    flood(place)
    said, _ = controller.communicate("go on\n", timeout=600)
    assert (controller.returncode, said) == (0, actor), "the run uses the worker as before"
    assert resident_bytes(pid) - memory < 64 << 20
    for sock in silent:
        sock.close()
    assert num_descriptors(pid) <= descriptors + NUM_SILENT
