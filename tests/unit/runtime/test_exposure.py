"""What other machines could reach needs TLS and a secret, or the user's explicit permission."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from forge.cli import main
from forge.config import KubernetesConfig, LauncherConfig, SlurmConfig
from forge.errors import ForgeError, InsecureBindError, LaunchError
from forge.runtime import exposure, sockets
from forge.runtime.launchers import check_launcher
from forge.runtime.launchers.kubernetes import manifests
from forge.runtime.launchers.slurm import job_script
from forge.runtime.rendezvous_server import RendezvousServer
from forge.runtime.sockets import TLS_VARIABLES, ConnectionFailure
from forge.runtime.worker import serve
from forge.store.transports import SegmentSource
from forge.store.transports.tcp_server import DataServer

OFF_LOOPBACK = ["0.0.0.0", "::", "10.0.0.1", "192.0.2.1", "fd00::1", "node7.invalid"]


@pytest.fixture(autouse=True)
def without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TLS_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def checked(error: ForgeError, path: str, value: object, *, option: str) -> None:
    assert isinstance(error, InsecureBindError)
    assert (error.path, error.value) == (path, value)
    assert error.rule == "off loopback, everything needs TLS and a secret, unless the user allows otherwise"
    assert option in str(error.repair)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_is_reachable_from_this_machine_only(host: str) -> None:
    assert exposure.is_loopback_only(host)


@pytest.mark.parametrize("host", [*OFF_LOOPBACK, "", "*", "."])
def test_everything_else_counts_as_exposed(host: str) -> None:
    assert not exposure.is_loopback_only(host)


@pytest.mark.parametrize("host", OFF_LOOPBACK)
def test_the_ports_of_a_run(host: str) -> None:
    address = f"tcp:[{host}]:0" if ":" in host else f"tcp:{host}:0"
    with pytest.raises(InsecureBindError) as caught:
        sockets.listen(address)
    checked(caught.value, address, host, option="launcher.insecure=true")


def test_permission_is_explicit() -> None:
    with pytest.raises(ConnectionFailure, match="cannot listen"):  # because this machine does not have the address
        sockets.listen("tcp:192.0.2.1:0", insecure=True)


def test_the_data_server() -> None:
    with pytest.raises(InsecureBindError) as caught:
        DataServer(b"s" * 32, bind="0.0.0.0", segments=cast(SegmentSource, None), on_ask=print)
    checked(caught.value, "tcp:0.0.0.0:0", "0.0.0.0", option="launcher.insecure=true")


def test_the_rendezvous_server() -> None:
    async def open_tcp(insecure: bool) -> None:
        await RendezvousServer(b"s" * 32).open_tcp("192.0.2.1", insecure=insecure)

    with pytest.raises(InsecureBindError):
        asyncio.run(open_tcp(False))
    with pytest.raises(ConnectionFailure, match="cannot listen"):
        asyncio.run(open_tcp(True))


def test_the_processes_of_a_run_inherit_the_permission() -> None:
    program = "from forge.runtime import rendezvous as r; print(r.is_insecure(), r.open_environment())"
    run = {"FORGE_RENDEZVOUS": "tcp:127.0.0.1:1", "FORGE_SECRET": "00" * 32, "FORGE_RUN": "r"}
    for said, expected in (("1", True), ("0", False), ("", False)):
        env = {**os.environ, **run, "FORGE_INSECURE": said}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=600)
        assert done.stdout.startswith(f"{expected} "), done.stderr
        assert f"'FORGE_INSECURE': '{int(expected)}'" in done.stdout


@pytest.mark.parametrize(
    ("config", "path", "value", "secured"),
    [
        (LauncherConfig(kind="hosts", hosts=("tcp://10.0.0.7:1",)), "launcher.hosts", "10.0.0.7", "tls://"),
        (LauncherConfig(kind="hosts", bind="10.0.0.1", hosts=("tcp://127.0.0.1:1",)), "launcher.bind", "10.0.0.1", ""),
        (LauncherConfig(kind="slurm", bind="10.0.0.1"), "launcher.bind", "10.0.0.1", "launcher.slurm.tls=true"),
        (
            LauncherConfig(kind="kubernetes", bind="10.0.0.1", kubernetes=KubernetesConfig(image="i")),
            "launcher.bind", "10.0.0.1", "launcher.kubernetes.tls_secret",
        ),
    ],
)  # fmt: skip
def test_launchers(config: LauncherConfig, path: str, value: str, secured: str) -> None:
    with pytest.raises(InsecureBindError) as caught:
        check_launcher(config)
    checked(caught.value, path, value, option="launcher.insecure=true")
    assert secured in str(caught.value.repair)
    check_launcher(config.model_copy(update={"insecure": True}))


@pytest.mark.parametrize(
    "config",
    [
        LauncherConfig(bind="10.0.0.1"),
        LauncherConfig(kind="hosts", hosts=("tcp://127.0.0.1:1",)),
        LauncherConfig(kind="hosts", bind="10.0.0.1", hosts=("tls://10.0.0.7:1",)),
        LauncherConfig(kind="slurm", bind="10.0.0.1", slurm=SlurmConfig(tls=True)),
        LauncherConfig(
            kind="kubernetes", bind="10.0.0.1", kubernetes=KubernetesConfig(image="i", tls_secret="forge-tls")
        ),
    ],
)
def test_launchers_that_are_secured_or_local(config: LauncherConfig) -> None:
    check_launcher(config)


def test_jobs_pass_the_permission_on(tmp_path: Path) -> None:
    for insecure in (False, True):
        slurm = LauncherConfig(kind="slurm", insecure=insecure)
        assert ("--insecure" in job_script(slurm, log_dir=tmp_path)) == insecure
        pods = LauncherConfig(kind="kubernetes", insecure=insecure, kubernetes=KubernetesConfig(image="i"))
        assert ("'--insecure'" in str(manifests(pods, token="t"))) == insecure
    secured = LauncherConfig(kind="slurm", insecure=True, slurm=SlurmConfig(tls=True))
    assert "--insecure" not in job_script(secured, log_dir=tmp_path)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1"])
def test_workers(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"tcp://{host}:22222"
    with pytest.raises(InsecureBindError) as caught:
        serve(address)
    checked(caught.value, "forge worker --address", address, option="--insecure")
    assert main(["worker", "--address", address]) == 2
    assert "--insecure" in capsys.readouterr().err


def test_a_worker_with_permission_is_not_refused_for_its_address() -> None:
    with pytest.raises(LaunchError, match="cannot listen there"):  # this machine does not have the address
        serve("tcp://192.0.2.1:22222", insecure=True)
