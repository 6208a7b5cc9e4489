"""What can be said about addresses and channels before anything is connected."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from forge.config import LauncherConfig
from forge.errors import LaunchError
from forge.runtime.jobs import is_loopback
from forge.runtime.launchers import HostsLauncher, make_launcher, open_transport
from forge.runtime.launchers.submit import is_listening, is_this_host, run_command, run_regardless
from forge.runtime.sockets import TLS_VARIABLES
from forge.runtime.worker import check_address, serve


def fields(error: LaunchError) -> tuple[str | None, object]:
    assert error.rule
    assert error.repair
    return error.path, error.value


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:22222", "tcp://[::1]:1", "tcp://node-7.cluster:65535", "tcp://$(POD).forge.rl.svc:22222"],
)
def test_addresses_of_workers(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:22222",
        "tcp://127.0.0.1",
        "tcp://:22222",
        "tcp://h:99999",
        "tcp://h:x",
        "http://h:1",
        "tcp://h:1/x",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(LaunchError) as caught:
        check_address(address)
    assert fields(caught.value) == ("forge worker --address", address)


def test_the_refusal_comes_before_anything_is_started() -> None:
    with pytest.raises(LaunchError, match="not a worker's address"):
        serve("nonsense")


def test_tls_needs_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TLS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError) as caught:
        check_address("tls://h:1")
    assert fields(caught.value) == ("environment", list(TLS_VARIABLES))
    for name in TLS_VARIABLES:
        monkeypatch.setenv(name, "/etc/forge/tls/file.pem")
    assert check_address("tls://h:1") == "tls://h:1"


def test_channels_are_not_mixed() -> None:
    with pytest.raises(LaunchError) as caught:
        open_transport(["tcp://a:1", "tls://b:1"], bind="127.0.0.1")
    assert fields(caught.value) == ("launcher.hosts", ["tcp://a:1", "tls://b:1"])


def test_hosts_needs_an_address() -> None:
    with pytest.raises(LaunchError) as caught:
        asyncio.run(HostsLauncher(LauncherConfig()).launch())
    assert fields(caught.value) == ("launcher.hosts", [])


def test_the_configuration_chooses_it() -> None:
    assert isinstance(make_launcher(LauncherConfig(kind="hosts", hosts=("tcp://h:1",))), HostsLauncher)


def test_the_channel_cannot_change_after_the_first_use() -> None:
    program = """
from forge.errors import LaunchError
from forge.runtime.launchers import open_transport
open_transport(["tcp://127.0.0.1:1"], bind="127.0.0.1")
open_transport(["tcp://127.0.0.1:2"], bind="127.0.0.2")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert "already uses Monarch over another channel" in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "a.localhost", "0.0.0.0", "::"]
)
def test_where_nobody_else_can_reach(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "node7", "localhost.example.org"])
def test_where_others_can_reach(host: str) -> None:
    assert not is_loopback(host)


def test_names_of_this_machine() -> None:
    assert is_this_host(socket.gethostname())
    assert is_this_host("localhost")
    assert not is_this_host("node7.invalid")


def test_a_listener_is_seen() -> None:
    async def look() -> tuple[bool, bool, bool]:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        up = await is_listening(f"tcp://127.0.0.1:{port}")
        server.close()
        await server.wait_closed()
        return up, await is_listening(f"tcp://127.0.0.1:{port}"), await is_listening("tcp://node7.invalid:1")

    assert asyncio.run(look()) == (True, False, False)


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def test_a_command_is_run_to_its_end() -> None:
    lines: list[str] = []
    program = "import sys; print(sys.stdin.read()); print('two'); print('bad', file=sys.stderr); sys.exit(3)"
    outcome = asyncio.run(run_command(python(program), stdin="one", on_line=lines.append))
    assert (outcome.code, outcome.stdout, outcome.stderr, outcome.words) == (3, "one\ntwo\n", "bad\n", "bad")
    assert lines == ["one", "two"]


def test_a_command_that_does_not_answer_is_ended() -> None:
    outcome = asyncio.run(run_command(python("import signal; print(1, flush=True); signal.pause()"), timeout_s=0.5))
    assert outcome.code == -9
    assert "did not answer within 0.5 s" in outcome.words


def test_a_cancelled_caller_ends_its_command() -> None:
    pids: list[int] = []

    async def give_up() -> None:
        began = asyncio.Event()

        def started(line: str) -> None:
            pids.append(int(line))
            began.set()

        program = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
        task = asyncio.create_task(run_command(python(program), on_line=started))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_command_that_runs_regardless_says_how_it_ended() -> None:
    outcome = asyncio.run(run_regardless(python("import sys; print('out'); sys.exit('bad')")))
    assert (outcome.code, outcome.stdout, outcome.words) == (1, "out\n", "bad")
    late = asyncio.run(run_regardless(python("import signal; signal.pause()"), timeout_s=0.5))
    assert "did not answer within 0.5 s" in late.words


def test_a_command_that_runs_regardless_survives_its_caller(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    go, goes = os.pipe()  # the command ends only after its caller was cancelled

    async def give_up() -> None:
        wait = f"import os; os.read(os.open('/proc/{os.getpid()}/fd/{go}', os.O_RDONLY), 1)"
        program = f"{wait}; open({str(mark)!r}, 'w').write(str(os.getsid(0) == os.getpid()))"
        task = asyncio.create_task(run_regardless(python(program)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not mark.exists()
        os.write(goes, b"1")

    asyncio.run(give_up())  # returns when the thread that waits for the command has ended
    os.close(go)
    os.close(goes)
    assert mark.read_text() == "True", "a session of its own: the terminal's Ctrl-C does not reach it"
