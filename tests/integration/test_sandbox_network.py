"""Commands in a sandbox, and its one connection: a loopback address where the library accepts, and nothing else."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge.errors import OptionError
from forge.runtime.sandbox import Box, SandboxError, SandboxLimits
from forge.runtime.sandbox.detection import _make
from forge.runtime.sandbox.network import PORT
from forge.runtime.sandbox.runner import LaunchedSandbox
from sandboxes import BOUNDARIES, boundary

pytestmark = pytest.mark.usefixtures("leaves_nothing")

LIMITS = SandboxLimits(wall_s=200, output_bytes=4096)
SHORT_S = 1.0
"""A time limit for what never ends. Nothing that is to succeed has it."""

REACH = f"""
import socket
for family, kind, protocol in ((2, 1, 0), (2, 1, 6), (1, 1, 0), (2, 2, 0), (10, 1, 0), (16, 3, 0), (17, 3, 0), (2, 1, 132)):
    try:
        socket.socket(family, kind, protocol).close()
        print(family, kind, protocol, "made")
    except OSError as error:
        print(family, kind, protocol, error.strerror)
with socket.create_connection(("127.0.0.1", {PORT})) as connection:
    connection.sendall(b"question")
    print(connection.recv(100).decode())
for address in (("127.0.0.1", OTHER), ("10.0.0.1", 80), ("8.8.8.8", 53)):
    try:
        socket.create_connection(address, timeout=60)
        print("connected", address)
    except OSError as error:
        print(error.strerror)
"""  # noqa: E501


@pytest.fixture(scope="module", params=BOUNDARIES)
def backend(request: pytest.FixtureRequest) -> LaunchedSandbox:
    return boundary(request.param)


@pytest.fixture(scope="module")
def one_backend() -> LaunchedSandbox:
    return boundary("namespaces")


def use(backend: LaunchedSandbox, body: Callable[[Box], Awaitable[Any]], **options: Any) -> Any:
    async def inside() -> Any:
        async with asyncio.timeout(500), Box(backend, **{"limits": LIMITS, **options}) as box:
            return await body(box)

    return asyncio.run(inside())


def test_a_program_reaches_the_listener_and_nothing_else(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        loop = asyncio.get_running_loop()

        async def answer() -> bytes:
            assert box.listener is not None
            client, _ = await loop.sock_accept(box.listener)
            with client:
                asked = await loop.sock_recv(client, 100)
                await loop.sock_sendall(client, b"answer")
            return asked

        with socket.create_server(("127.0.0.1", 0)) as other:  # on this machine's own loopback address
            serving = asyncio.create_task(answer())
            source = REACH.replace("OTHER", str(other.getsockname()[1]))
            found = await box.run(["python3", "-c", source])
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.accept()
        assert await serving == b"question"
        lines = found.stdout.splitlines()
        assert lines[:3] == ["2 1 0 made", "2 1 6 made", "1 1 0 made"]
        assert all(line.endswith("Operation not permitted") for line in lines[3:8]), lines
        assert lines[8:] == ["answer", "Connection refused", "Network is unreachable", "Network is unreachable"]

    use(backend, body, port=PORT)


def test_without_a_port_no_network_socket_can_be_made(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        assert box.listener is None
        found = await box.run(["python3", "-c", "import socket; socket.socket()"])
        assert "Operation not permitted" in found.stderr

    use(backend, body)


def test_a_command_has_input_two_outputs_and_an_exit_code(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        source = (
            "import os, sys; print(len(sys.stdin.read()), os.getcwd(), os.environ['A']); print('e', file=sys.stderr)"
        )
        large = "x" * 1_000_000
        found = await box.run(["python3", "-c", source + "; sys.exit(3)"], stdin=large, environ={"A": "b c"})
        assert (found.stdout, found.stderr, found.exit_code) == ("1000000 /sandbox b c\n", "e\n", 3)
        unread = await box.run(["true"], stdin=large)
        assert (unread.exit_code, unread.timed_out) == (0, False)
        killed = await box.run(["bash", "-c", "kill -9 $$"])
        assert killed.exit_code == -9
        await box.write_file("agent.sh", "#!/bin/sh\necho $1\n")
        await box.bash("chmod +x agent.sh")
        assert (await box.run(["./agent.sh", "hi"])).stdout == "hi\n"

    use(backend, body)


def test_a_flood_of_output_keeps_its_ends(one_backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        source = "import sys; print('start'); sys.stdout.write('x' * 3_000_000); sys.stderr.write('y' * 200_000)"
        found = await box.run(["python3", "-c", source + "; print('end')"])
        assert found.stdout.startswith("start\n")
        assert found.stdout.endswith("end\n")
        assert "bytes left out" in found.stdout
        assert "bytes left out" in found.stderr
        assert len(found.stdout) + len(found.stderr) < 3 * 4096

    use(one_backend, body)


def test_what_a_command_left_running_ends_with_it_and_the_shell_stays(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        await box.bash("export KEPT=1")
        await box.python("kept = 2")
        leave = "import os, subprocess; subprocess.Popen(['setsid', 'sleep', '1000']); print('left')"
        assert (await box.run(["python3", "-c", leave])).stdout == "left\n"
        count = "cat /proc/[0-9]*/comm | grep -c sleep"
        if (await box.bash("test -e /proc/self && echo yes")).output == "yes\n":
            assert (await box.bash(f"{count}; echo $KEPT")).output == "0\n1\n"
        late = await box.run(["sleep", "1000"], timeout_s=SHORT_S)
        assert (late.timed_out, late.exit_code) == (True, None)
        assert (await box.bash("echo $KEPT")).output == "1\n"
        assert (await box.python("kept")).value == "2"

    use(backend, body)


def test_commands_that_do_not_exist_are_named(one_backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        with pytest.raises(FileNotFoundError, match="nonesuch is not in"):
            await box.run(["nonesuch"])
        await box.write_file("data", "not a program")
        with pytest.raises(PermissionError, match=r"\./data"):
            await box.run(["./data"])
        for command, environ in (([], {}), (["a\0b"], {}), (["true"], {"A=B": "c"})):
            with pytest.raises(OptionError, match="not a command"):
                await box.run(command, environ=environ)
        assert (await box.run(["true"])).exit_code == 0

    use(one_backend, body)


def test_further_folders_can_be_read_and_not_written(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        path = folder / "tool" / "data.txt"
        assert (await box.run(["cat", str(path)])).stdout == "shown"
        assert (await box.run(["cat", str(folder / "secret.txt")])).exit_code == 1
        assert "Read-only" in (await box.run(["bash", "-c", f"echo x > {path}"])).stderr

    with (
        tempfile.TemporaryDirectory() as name
    ):  # pytest's own can be read by nobody else, and one boundary is another user
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "tool").mkdir()
        (folder / "tool" / "data.txt").write_text("shown")
        (folder / "secret.txt").write_text("hidden")
        use(backend, body, readable=[str(folder / "tool")])


@pytest.mark.parametrize("path", ["/", "/tmp", "/proc/1", "/nonesuch"])
def test_paths_that_cannot_be_shown_are_refused(one_backend: LaunchedSandbox, path: str) -> None:
    with pytest.raises(OptionError, match="readable"):
        Box(one_backend, readable=[path])


def test_without_a_boundary_there_is_no_network_of_ones_own() -> None:
    with pytest.raises(OptionError, match="boundary"):
        Box(_make("process", None), port=PORT)


def test_a_sandbox_that_dies_while_a_command_runs_is_an_error(one_backend: LaunchedSandbox) -> None:
    before = set(psutil.Process().children())

    async def body(box: Box) -> None:
        await box.bash("mkfifo started")
        running = asyncio.create_task(box.run(["bash", "-c", "echo yes > started; sleep 1000"]))
        assert (await box.bash("cat started")).output == "yes\n"
        (server,) = [each for each in psutil.Process().children() if each not in before]
        (launcher,) = server.children()
        (guest,) = launcher.children()
        guest.kill()
        with pytest.raises(SandboxError) as caught:
            await running
        assert caught.value.kind == "sandbox_died"

    use(one_backend, body)
