"""The SLURM launcher: the exact job, and what is done with SLURM's answers. The programs are stand-ins on PATH."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from attaching import Attached
from forge.config import LauncherConfig, SlurmConfig
from forge.errors import LaunchError
from forge.runtime.hosts import HostTimings
from forge.runtime.launchers import make_launcher
from forge.runtime.launchers.slurm import JobState, SlurmLauncher, job_script, parse_state, submission_environment
from forge.runtime.sockets import TLS_VARIABLES
from stand_in_programs import Programs

GOLDEN = Path(__file__).parents[1] / "unit" / "runtime" / "golden"
ACCEPTED = {"sbatch": [{"out": "41;cluster\n"}], "scancel": [{}]}


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def put_on_path(plan: dict[str, list[dict[str, Any]]]) -> Programs:
        programs = Programs(tmp_path / "bin", plan)
        monkeypatch.setenv("PATH", str(programs.folder))
        monkeypatch.chdir(tmp_path)
        return programs

    return put_on_path


def config(**slurm: Any) -> LauncherConfig:
    wanted = SlurmConfig(**slurm)
    return LauncherConfig(kind="slurm", bind="10.0.0.1", insecure=True, heartbeat_timeout_s=6.0, slurm=wanted)


def plan(*states: str, nodes: str = "127.0.0.1\n") -> dict[str, list[dict[str, Any]]]:
    return {**ACCEPTED, "squeue": [{"out": state + "\n"} for state in states], "scontrol": [{"out": nodes}]}


def running(launcher_config: LauncherConfig, clock: Clock, attach: Attached) -> SlurmLauncher:
    return SlurmLauncher(launcher_config, attach=attach, clock=clock, sleep=clock.sleep)


def refused(launcher: SlurmLauncher) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        asyncio.run(launcher.launch())
    assert None not in (caught.value.path, caught.value.rule, caught.value.repair)
    return caught.value


@contextlib.contextmanager
def listeners(*hosts: str) -> Any:
    """Something that accepts connections on the same port of each host."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(socket.create_server((hosts[0], 0)))
        port = first.getsockname()[1]
        for host in hosts[1:]:
            stack.enter_context(socket.create_server((host, port)))
        yield port


def test_the_smallest_job() -> None:
    script = job_script(LauncherConfig(kind="slurm"), log_dir=Path("/shared/logs"), python="/opt/env/bin/python")
    assert script == (GOLDEN / "slurm_smallest.sh").read_text()


def test_a_job_with_every_option() -> None:
    every = LauncherConfig(
        kind="slurm",
        job_name="qwen3-grpo",
        slurm=SlurmConfig(
            partition="gpu", nodes=4, gpus_per_node=8, time_limit="1-12:00:00", account="rl team", qos="high",
            exclusive=False, extra_sbatch=("--constraint=h200", "--cpus-per-task=96"), port=23456, tls=True,
        ),
    )  # fmt: skip
    script = job_script(every, log_dir=Path("/shared/100% logs"), python="/opt/my env/bin/python")
    assert script == (GOLDEN / "slurm_every_option.sh").read_text()


def test_the_guide_shows_the_job_that_is_submitted() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "hosts.md").read_text(encoding="utf-8")
    (settings,) = re.findall(r"```yaml\n(launcher:\n  kind: slurm\n.*?)```", guide, re.DOTALL)
    (shown,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", guide, re.DOTALL)
    home = Path("/home/me/project")
    wanted = LauncherConfig.model_validate(yaml.safe_load(settings)["launcher"])
    assert job_script(wanted, log_dir=home / "runs/slurm", python=str(home / ".venv/bin/python")) == shown


def test_what_slurm_has_set_for_the_controllers_own_job_is_not_submitted() -> None:
    """srun would take it for options."""
    own = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "300", "SLURMD_NODENAME": "n1", "CUDA_VISIBLE_DEVICES": ""}
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "rl", "HOME": "/root"}
    assert submission_environment(own | kept) == kept
    outside = kept | {"SLURM_CPU_BIND": "none"}
    assert submission_environment(outside) == outside, "on a login node they are the user's"


@pytest.mark.parametrize("name", ["slurm_smallest.sh", "slurm_every_option.sh"])
def test_the_golden_scripts_are_shell(name: str) -> None:
    subprocess.run(["bash", "-n", str(GOLDEN / name)], check=True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("PENDING|Resources|\n", JobState("PENDING", "Resources", "")),
        ("RUNNING|None|gpu[01-02,7]\n", JobState("RUNNING", "None", "gpu[01-02,7]")),
        ("PENDING|a|b|\n", JobState("PENDING", "a|b", "")),
        ("\n", None),
    ],
)
def test_states_are_read(text: str, found: JobState | None) -> None:
    assert parse_state(text) == found


def test_a_launch_waits_attaches_and_cancels_at_the_end(use: Any, caplog: pytest.LogCaptureFixture) -> None:
    states = (
        "PENDING|Resources|",
        "PENDING|Resources|",
        "PENDING|Priority|",
        "CONFIGURING|None|",
        "RUNNING|None|n[1-2]",
    )
    programs = use(plan(*states, nodes="127.0.0.1\n127.0.0.2\n"))
    clock, attach = Clock(), Attached()
    with caplog.at_level(logging.WARNING), listeners("127.0.0.1", "127.0.0.2") as port:
        wanted = config(nodes=2, port=port)

        async def use_it() -> None:
            allocation = await running(wanted, clock, attach).launch()
            assert programs.calls("scancel") == []
            await allocation.release()

        asyncio.run(use_it())
    folder = Path.cwd() / "runs/slurm"
    assert folder.is_dir()
    assert programs.stdin_of("sbatch") == job_script(wanted, log_dir=folder)
    squeue = ["squeue", "--noheader", "--states=all", "--jobs=41", "--format=%T|%r|%N"]
    assert programs.calls() == [
        ["sbatch", "--parsable"],
        *[squeue] * 5,
        ["scontrol", "show", "hostnames", "n[1-2]"],
        ["scancel", "41"],
    ]
    assert attach.addresses == [f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.2:{port}"]
    assert (attach.bind, attach.num_releases) == ("10.0.0.1", 1)
    assert attach.timings == HostTimings(heartbeat_timeout_s=6.0)
    assert clock.naps == [1.0, 2.0, 4.0, 8.0]
    said = [message for message in caplog.messages if " is " in message]
    assert said == [
        "SLURM job 41 is PENDING (Resources)",
        "SLURM job 41 is PENDING (Priority)",
        "SLURM job 41 is CONFIGURING (None)",
        "SLURM job 41 is RUNNING (None)",
    ]


def test_no_sbatch_on_path(use: Any) -> None:
    use({"squeue": [{}]})
    error = refused(SlurmLauncher(config()))
    assert "`sbatch`" in str(error)
    assert error.path == "PATH"


def test_sbatch_refuses(use: Any) -> None:
    programs = use(
        {**plan("RUNNING||n1"), "sbatch": [{"err": "sbatch: error: invalid partition specified: gpuu\n", "code": 1}]}
    )
    error = refused(SlurmLauncher(config(partition="gpuu")))
    assert "invalid partition specified: gpuu" in str(error)
    assert error.path == "launcher.slurm"
    assert [call[0] for call in programs.calls()] == ["sbatch"]


@pytest.mark.parametrize(
    "state", ["FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED", "COMPLETING", "PREEMPTED"]
)
def test_the_job_ends_before_it_runs(use: Any, state: str) -> None:
    programs = use(plan("PENDING|Resources|", f"{state}|JobLaunchFailure|"))
    error = refused(running(config(), Clock(), Attached()))
    assert f"{state} (JobLaunchFailure)" in str(error)
    assert error.value == state
    assert str(Path.cwd() / "runs/slurm/forge-41.log") in str(error.repair)
    assert programs.calls("scancel") == [["scancel", "41"]]


def test_the_job_ends_before_its_worker_listens(use: Any) -> None:
    with listeners("127.0.0.1") as port:
        pass
    programs = use(plan("RUNNING|None|n1", "RUNNING|None|n1", "FAILED|NonZeroExitCode|n1"))
    error = refused(running(config(port=port, start_timeout_s=60), Clock(), Attached()))
    assert "FAILED (NonZeroExitCode)" in str(error)
    assert programs.calls("scancel") == [["scancel", "41"]]


def test_the_queue_is_too_long(use: Any) -> None:
    programs = use(plan("PENDING|Priority|"))
    clock = Clock()
    error = refused(running(config(start_timeout_s=40.5), clock, Attached()))
    assert (error.path, error.value) == ("launcher.slurm.start_timeout_s", 40.5)
    assert "PENDING (Priority)" in str(error)
    assert clock.naps == [1.0, 2.0, 4.0, 8.0, 15.0, 10.5]
    assert programs.calls("scancel") == [["scancel", "41"]]


def test_a_worker_that_never_listens(use: Any) -> None:
    with listeners("127.0.0.1") as port:
        pass
    use(plan("RUNNING|None|n1"))
    error = refused(running(config(port=port, start_timeout_s=5), Clock(), Attached()))
    assert f"no worker listens at tcp://127.0.0.1:{port}" in str(error)


def test_squeue_may_fail_for_a_while(use: Any) -> None:
    silent = {"err": "slurm_load_jobs error: Socket timed out\n", "code": 1}
    answers = {**plan(), "squeue": [silent, silent, {"out": "\n"}, silent, {"out": "RUNNING|None|n1\n"}]}
    use(answers)
    attach = Attached()
    with listeners("127.0.0.1") as port:
        asyncio.run(running(config(port=port), Clock(), attach).launch())
    assert attach.addresses == [f"tcp://127.0.0.1:{port}"]


def test_squeue_that_never_knows_the_job(use: Any) -> None:
    programs = use({**plan(), "squeue": [{"err": "slurm_load_jobs error: Invalid job id specified\n", "code": 1}]})
    error = refused(running(config(), Clock(), Attached()))
    assert "5 times in a row" in str(error)
    assert len(programs.calls("squeue")) == 5


def test_too_few_nodes(use: Any) -> None:
    programs = use(plan("RUNNING|None|n1", nodes="127.0.0.1\n"))
    error = refused(running(config(nodes=2), Clock(), Attached()))
    assert (error.path, error.value) == ("launcher.slurm.nodes", "n1")
    assert "1 node(s) instead of 2" in str(error)
    assert programs.calls("scancel") == [["scancel", "41"]]


def test_a_loopback_controller_cannot_serve_two_nodes(use: Any) -> None:
    programs = use(plan("RUNNING|None|n[1-2]"))
    error = refused(SlurmLauncher(LauncherConfig(kind="slurm", slurm=SlurmConfig(nodes=2))))
    assert (error.path, error.value) == ("launcher.bind", "127.0.0.1")
    assert programs.calls() == []


@pytest.mark.parametrize("bind", ["127.0.0.1", "::1", "localhost"])
def test_a_loopback_controller_cannot_serve_another_node(use: Any, bind: str) -> None:
    programs = use(plan("RUNNING|None|node7.invalid", nodes="node7.invalid\n"))
    launcher_config = LauncherConfig(kind="slurm", bind=bind, slurm=SlurmConfig(start_timeout_s=5))
    error = refused(running(launcher_config, Clock(), Attached()))
    assert (error.path, error.value) == ("launcher.bind", bind)
    assert programs.calls("scancel") == [["scancel", "41"]]


def test_tls_needs_the_controllers_certificates(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(plan("RUNNING|None|n1"))
    for name in TLS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    error = refused(SlurmLauncher(config(tls=True)))
    assert (error.path, error.value) == ("environment", list(TLS_VARIABLES))


def test_a_log_folder_that_cannot_be_made(use: Any, tmp_path: Path) -> None:
    programs = use(plan("RUNNING|None|n1"))
    (tmp_path / "file").write_text("")
    error = refused(SlurmLauncher(config(log_dir=tmp_path / "file" / "logs")))
    assert error.path == "launcher.slurm.log_dir"
    assert programs.calls() == []


def test_the_job_is_cancelled_when_attaching_fails(use: Any) -> None:
    programs = use(plan("RUNNING|None|n1"))
    with listeners("127.0.0.1") as port, pytest.raises(LaunchError, match="no worker answers"):
        asyncio.run(running(config(port=port), Clock(), Attached(LaunchError("no worker answers"))).launch())
    assert programs.calls("scancel") == [["scancel", "41"]]


def test_the_job_is_cancelled_when_the_release_fails(use: Any) -> None:
    programs = use(plan("RUNNING|None|n1"))

    async def use_it(port: int) -> None:
        attach = Attached(release_error=RuntimeError("lost"))
        allocation = await running(config(port=port), Clock(), attach).launch()
        await allocation.release()

    with listeners("127.0.0.1") as port, pytest.raises(RuntimeError, match="lost"):
        asyncio.run(use_it(port))
    assert programs.calls("scancel") == [["scancel", "41"]]


def test_the_job_is_cancelled_with_the_wait_for_it(use: Any) -> None:
    programs = use(plan("PENDING|Priority|"))

    async def give_up() -> None:
        asleep = asyncio.Event()

        async def sleep(seconds: float) -> None:
            asleep.set()
            await asyncio.Event().wait()

        waiting = asyncio.create_task(SlurmLauncher(config(), attach=Attached(), sleep=sleep).launch())
        await asleep.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    assert programs.calls("scancel") == [["scancel", "41"]]


def test_a_job_that_was_being_submitted_is_cancelled(use: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    programs = use({**plan("PENDING|Priority|"), "sbatch": [{"out": "41\n", "tell": str(gate)}]})

    async def give_up() -> None:
        submitting = asyncio.create_task(SlurmLauncher(config(), attach=Attached()).launch())
        reader = os.open(gate, os.O_RDONLY | os.O_NONBLOCK)
        began = asyncio.Event()
        asyncio.get_running_loop().add_reader(reader, began.set)
        await began.wait()
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        asyncio.get_running_loop().remove_reader(reader)
        os.close(reader)

    asyncio.run(give_up())
    assert programs.calls("scancel") == [["scancel", "41"]]


def test_a_job_that_cannot_be_cancelled_is_named(use: Any, caplog: pytest.LogCaptureFixture) -> None:
    use(
        {
            **plan("FAILED|None|"),
            "scancel": [{"err": "scancel: error: Unable to contact slurm controller\n", "code": 1}],
        }
    )
    refused(running(config(), Clock(), Attached()))
    assert any("run `scancel 41`" in message for message in caplog.messages)


def test_the_configuration_chooses_it() -> None:
    assert isinstance(make_launcher(config()), SlurmLauncher)
