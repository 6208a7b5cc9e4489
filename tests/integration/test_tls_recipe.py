"""The recipe of docs/guides/security.md, run as it stands there: workers and a controller over mutual TLS."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from certificates import make_certificates, tls_environment

PROGRAM = """
import asyncio, os, ssl, sys
import forge
from forge import ForgeActor, endpoint
from forge.config import LauncherConfig

class Where(ForgeActor):
    @endpoint
    async def parent(self):
        return os.getppid()

async def main():
    async with forge.run(LauncherConfig(kind="hosts", bind="localhost", hosts=tuple(sys.argv[1:]))):
        service = await Where.options(num_replicas=2).as_service()
        print("parents", *sorted({await service.parent.route() for _ in range(4)}))
        print("stranger", await stranger(int(sys.argv[1].rsplit(":", 1)[1])))

async def stranger(port):
    context = ssl.create_default_context(cafile=os.environ["HYPERACTOR_TLS_CA"])
    try:
        reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
        writer.write(b"hello")
        return f"was answered {await reader.read(1)!r}"
    except ssl.SSLError as error:
        return error.reason

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tls")
    make_certificates(made, dict.fromkeys(("worker", "controller"), "DNS:localhost,IP:127.0.0.1"))
    return made


@contextlib.contextmanager
def worker(folder: Path, address: str) -> Iterator[int]:
    """A worker that listens; gives the process id of the one that serves."""
    log = folder / f"{address.rsplit(':', 1)[1]}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "forge.cli", "worker", "--address", address],
            stdout=subprocess.PIPE, stderr=file, text=True, env=tls_environment(folder, "worker"),
        )  # fmt: skip
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline().split("(process ")[1].rstrip(")\n"))
    finally:
        process.terminate()
        process.communicate(timeout=600)


def test_a_run_over_mutual_tls_and_a_refusal(folder: Path, held_port: Callable[[], int]) -> None:
    addresses = [f"tls://localhost:{held_port()}" for _ in range(2)]
    with worker(folder, addresses[0]) as first, worker(folder, addresses[1]) as second:
        output = folder / "output.txt"
        with output.open("w") as file:
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, *addresses],
                stdout=file, stderr=file, env=tls_environment(folder, "controller"), timeout=600,
            )  # fmt: skip
        said = output.read_text()
        assert done.returncode == 0, said
        assert f"parents {' '.join(map(str, sorted((first, second))))}" in said
        assert "stranger TLSV13_ALERT_CERTIFICATE_REQUIRED" in said
