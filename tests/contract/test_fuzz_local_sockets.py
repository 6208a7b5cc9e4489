"""Malformed requests to the sockets of one machine: a hosted environment, a run's control socket, a fork server.

The last two admit processes of their own user only. Here that user sends what breaks the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge.envs.external.hosts import fork_server as hosted
from forge.loops.run_control import SOCKET_NAME, _answered, ask_run, listening
from forge.runtime import fork_server, rank_stub
from fuzzing import inputs, num_descriptors, resident_bytes, send_and_leave, silent_connections

TOKEN = "0123456789abcdef0123456789abcdef"
NUM_OVER_SOCKETS = 1500
HOST = """
def prepare():
    pass

class Host:
    def echo(self, value):
        return value
"""


# ---- Hosted environments ---------------------------------------------------------------------------------------------

PARSE = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from forge.envs.external.hosts.fork_server import ForkServer
from fuzzing import inputs, num_descriptors, resident_bytes

server = ForkServer(None, 0)
token = os.environ["FORGE_HOST_TOKEN"].encode()
before, num_before = resident_bytes(), num_descriptors()
for data in inputs(31, [token + b"\\n", token + b'\\n{"method": "echo", "args": {"value": 1}}\\n']):
    if data.startswith(token + b"\\n"):
        data = b"?" + data
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.sendall(data)
    ours.close()
    handle = theirs.fileno()
    server._waiting[handle], server._unproved[handle] = theirs, (0.0, b"")
    while handle in server._unproved:
        server._prove(handle)
    assert not server._pids and not server._waiting, data
assert num_descriptors() == num_before
assert resident_bytes() - before < 32 << 20
print("done")
"""


def test_a_hosted_environment_forks_for_no_stranger() -> None:
    support = str(Path(__file__).parents[1] / "support")
    env = {**os.environ, hosted.TOKEN_VARIABLE: TOKEN}
    done = subprocess.run(
        [sys.executable, "-c", PARSE, support], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout == "done\n", done.stderr


@contextlib.contextmanager
def hosted_server(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], tuple[str, int]]]:
    """Run a fork server whose port this process has chosen."""
    (folder / "host.py").write_text(HOST)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, hosted.__file__, str(port), str(folder / "host.py")]
    server = subprocess.Popen(command, env={**os.environ, hosted.TOKEN_VARIABLE: TOKEN})
    try:
        yield server, ("127.0.0.1", port)
    finally:
        server.kill()
        server.wait()


def ask_host(place: tuple[str, int]) -> Any:
    with socket.create_connection(place, 600) as sock, sock.makefile("rwb") as lines:
        lines.write(f"{TOKEN}\n".encode() + json.dumps({"method": "echo", "args": {"value": 5}}).encode() + b"\n")
        lines.flush()
        return json.loads(lines.readline())


def test_a_flood_disrupts_a_hosted_environment_in_nothing(tmp_path: Path) -> None:
    with hosted_server(tmp_path) as (server, place):
        while True:
            assert server.poll() is None
            try:
                assert ask_host(place) == {"result": 5}
                break
            except ConnectionRefusedError:  # it does not listen yet
                os.sched_yield()
        before = resident_bytes(server.pid)
        silent = silent_connections(place, 2 * hosted.MAX_WAITING)
        assert ask_host(place) == {"result": 5}
        for number, data in enumerate(inputs(32, [f"{TOKEN[:-1]}?\n".encode() + b'{"method": "echo"}\n'])):
            if number == NUM_OVER_SOCKETS:
                break
            assert send_and_leave(place, data) == b""
            if number % 300 == 0:
                assert ask_host(place) == {"result": 5}
        for sock in silent:
            sock.close()
        assert ask_host(place) == {"result": 5}
        assert resident_bytes(server.pid) - before < 32 << 20
        assert num_descriptors(server.pid) < 2 * hosted.MAX_WAITING


# ---- A run's control socket ------------------------------------------------------------------------------------------

COMMAND = json.dumps({"command": "scale", "workers": {"generator": 2}}).encode() + b"\n"


def test_commands_that_break_the_protocol_are_not_carried_out() -> None:
    carried_out = []

    async def answer(request: Any) -> Any:
        assert isinstance(request, dict)
        carried_out.append(request)
        return {}

    before = resident_bytes()
    for data in inputs(33, [COMMAND]):
        work = _answered(data, answer)
        try:
            work.send(None)
        except (ValueError, RecursionError):
            continue
        except StopIteration:
            assert isinstance(json.loads(data), dict), data
    assert carried_out, "none of the inputs was JSON: the test tries nothing"
    assert resident_bytes() - before < 32 << 20


def test_a_flood_disrupts_the_control_socket_in_nothing(tmp_path: Path) -> None:
    async def answer(request: Any) -> Any:
        return {"seen": request.get("command")}

    async def run() -> None:
        async with listening(tmp_path, answer):
            assert await asyncio.to_thread(ask_run, tmp_path, {"command": "first"}) == {"ok": True, "seen": "first"}
            await asyncio.to_thread(flood)
            assert await asyncio.to_thread(ask_run, tmp_path, {"command": "last"}) == {"ok": True, "seen": "last"}

    def flood() -> None:
        place = os.path.relpath(tmp_path / SOCKET_NAME)
        silent = silent_connections(place, 100)
        for data in [b"x" * 200_000 + b"\n", b"[" * 60_000 + b"\n", *inputs(34, [COMMAND], NUM_OVER_SOCKETS)]:
            said = send_and_leave(place, data)
            assert not said or isinstance(json.loads(data.partition(b"\n")[0]), dict), data
        for sock in silent:
            sock.close()

    before = resident_bytes()
    asyncio.run(run())
    assert (tmp_path / SOCKET_NAME).exists() is False
    assert resident_bytes() - before < 32 << 20


# ---- Fork servers of ranks -------------------------------------------------------------------------------------------


def test_requests_to_a_fork_server_that_break_the_protocol_are_refused() -> None:
    valid = rank_stub.request({"A": "1", "PATH": "/bin"}, ["json"])
    before, num_before = resident_bytes(), num_descriptors()
    for number, data in enumerate(inputs(35, [valid])):
        ours, theirs = socket.socketpair()
        theirs.settimeout(600)
        if number % 50 == 0:  # with descriptors, which must not stay open
            socket.send_fds(ours, [data or b"x"], [0] * (1 + number % 5))
        else:
            ours.sendall(data)
        ours.close()
        with theirs:
            try:
                rank = fork_server.receive(theirs)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
            for fd in rank.streams:
                os.close(fd)
            assert all(isinstance(word, str) for word in (*rank.preload, *rank.environment, rank.folder))
    assert num_descriptors() == num_before
    assert resident_bytes() - before < 64 << 20


def test_a_fork_server_survives_what_breaks_the_protocol(tmp_path: Path) -> None:
    address = f"forge-fuzz-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + address)
        listener.listen(16)
        server = subprocess.Popen(
            [sys.executable, "-m", "forge.runtime.fork_server", str(listener.fileno()), str(os.getpid())],
            env={**os.environ, fork_server.PADDING: "x" * fork_server.PADDING_BYTES}, pass_fds=(listener.fileno(),),
            stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        question = rank_stub.request(dict(os.environ), ["json"])
        assert send_and_leave("\0" + address, question) == b"", "it could be a fork"
        nested = b"[" * 100_000
        for data in [rank_stub.LENGTH.pack(2**32 - 1), rank_stub.LENGTH.pack(len(nested)) + nested,
                     *inputs(36, [question[:300]], 300)]:  # fmt: skip
            send_and_leave("\0" + address, data)
        assert server.poll() is None
        assert send_and_leave("\0" + address, question) == b""
    finally:
        server.kill()
        server.wait()


async def _ask(address: str) -> str:
    from forge.runtime.forking import _ask as ask

    return await ask(address, b"the variables")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a process of another user")
def test_another_users_fork_server_learns_nothing() -> None:
    address = f"forge-squat-{os.getpid()}"
    program = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1].replace("@", chr(0)))
    listener.listen()
    print("listening", flush=True)
    sock, _ = listener.accept()
    print(repr(sock.recv(1000)), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", program, f"@{address}"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        with pytest.raises(OSError, match="belongs to another user"):
            asyncio.run(_ask(address))
        assert server.stdout.readline() == "b''\n"
