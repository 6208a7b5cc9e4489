"""Two real worker processes on loopback stand for two hosts."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import grpo_runs
from forge.runtime.process_watch import free_port
from leftovers import has_ended

pytestmark = pytest.mark.alone

CONTROLLER = Path(__file__).parents[1] / "support" / "hosts_controller.py"


class Workers:
    """Two `forge worker` processes."""

    def __init__(self) -> None:
        self.addresses = [f"tcp://127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "forge.cli", "worker", "--address", address], stdout=subprocess.PIPE, text=True
            )
            for address in self.addresses
        ]
        self.greetings = [self.says(process) for process in self.processes]
        assert all("listening" in greeting for greeting in self.greetings)

    def says(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    def run(self, scenario: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            str(CONTROLLER),
            scenario,
            *self.addresses,
            *(str(process.pid) for process in self.processes),
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    def stop(self) -> list[int]:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(timeout=600) for process in self.processes]
        for process in self.processes:
            assert process.stdout is not None
            process.stdout.close()
        return codes


@pytest.fixture
def workers(leaves_nothing: None) -> Iterator[Workers]:
    started = Workers()
    try:
        yield started
    finally:
        started.stop()


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_the_service_goes_on_when_a_host_is_lost(workers):
    said = answer(workers.run("lose"))
    assert said["before"] == sorted(workers.addresses)
    assert said["hosts"] == [workers.addresses[1]], "everything moved to the host that is left"
    assert said["restarts"] == 2
    assert said["after"] == 4
    assert said["served"] > 0


def test_a_run_continues_without_the_host_of_its_trainer(workers, tmp_path):
    """On the host that is left, and ends with the weights of a run that nothing disturbed."""
    whole = grpo_runs.config(tmp_path / "whole")
    grpo_runs.train_here(whole)
    said = answer(workers.run("train"))
    assert said["hosts"][0] in workers.addresses
    assert said["step"] == grpo_runs.NUM_STEPS
    assert said["restarts"] == [1]
    assert said["weights"] == grpo_runs.weights_digest(whole)
    assert said["ledger"] == [repr(line) for line in grpo_runs.ledger(whole)]


def test_hosts_join_and_leave(workers):
    done = workers.run("join")
    said = answer(done)
    one, two = workers.addresses
    assert said["exits"] == [0, 1, 0, 0]
    assert f"  {two}  ready: nothing runs there\n" in done.stdout
    assert "forge hosts: this run has used this address before" in done.stderr
    assert said["resumed"] == [two], "what a resume continues with"
    assert said["first"] == [one, one]
    assert said["joined"] == sorted([one, one, two, two]), "new replicas go to the host that has fewer"
    assert said["left"] == [two] * 4, "all have moved"
    assert said["states"] == {two: "ready"}
    assert said["calls"] == ["ActorFailure", "ActorFailure", "int", "int"], "two outlasted the drain"
    bad, twice, fixed, only, unknown, again = said["refusals"]
    assert bad == "this is not a worker's address"
    assert twice == again == "this run has used this address before"
    assert "is needed by stays" in fixed
    assert "is the only one that the run can use" in only
    assert unknown == "the run has no such host"


def test_hosts_end_their_ranks_when_the_controller_is_killed(workers):
    done = workers.run("die")
    assert done.returncode == -signal.SIGKILL
    left = set()
    for pid in json.loads(done.stdout.splitlines()[-1]):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            left.add(os.pidfd_open(pid))
    while left:
        gone, _, _ = select.select(list(left), [], [], 600)
        assert gone, "ranks outlive their controller"
        for pidfd in gone:
            os.close(pidfd)
        left -= set(gone)
    assert "a fresh worker takes over" in workers.says(workers.processes[0])


HOLD = """
import asyncio, os, sys
import forge
from actors import Worker
from forge.config import LauncherConfig

async def main(address, timings):
    async with forge.run(LauncherConfig(kind="hosts", hosts=(address,), **timings)):
        actor = await Worker.as_actor()
        print(await actor.pid.call_one(), flush=True)
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], eval(sys.argv[2])))
"""


def hold(address: str, **timings: float) -> subprocess.Popen[str]:
    """Start a controller that keeps an actor on a host."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLD, address, repr(timings)]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env)


def test_a_host_waits_for_a_controller_as_long_as_its_lease(workers):
    """Two controllers are killed. The host with the short lease ends their processes, the other one still waits."""
    short = {"heartbeat_s": 0.2, "heartbeat_timeout_s": 1.0, "lease_s": 2.0}
    long = {"lease_s": 3600.0, "attach_timeout_s": 7200.0}
    controllers = [hold(workers.addresses[0], **short), hold(workers.addresses[1], **long)]
    pids = [int(controller.stdout.readline()) for controller in controllers]
    for controller in controllers:
        controller.kill()
        controller.communicate()
    assert "a fresh worker takes over" in workers.says(workers.processes[0])
    assert has_ended(pids[0])
    assert not has_ended(pids[1], limit_s=0)

    waiting = hold(workers.addresses[1], **long)
    while "waiting for the worker at" not in (line := waiting.stderr.readline()):
        assert line, "the controller ended"
    os.kill(
        int(workers.greetings[1].split("process ")[1].rstrip(")\n")), signal.SIGKILL
    )  # as the end of the lease does
    _, told = waiting.communicate(timeout=600)
    assert waiting.returncode == 1
    assert f"the worker at {workers.addresses[1]} ended while this controller waited for it" in told
    assert "start the program again now" in told


def test_replicas_and_ranks_spread_over_both_hosts_run_after_run(workers):
    """A worker serves one run after another, also one that names an address where no worker listens."""
    check_spread(workers)
    check_wrong_address(workers)
    check_spread(workers)
    assert workers.stop() == [0, 0]


def check_spread(workers):
    said = answer(workers.run("spread"))
    assert said["hosts"] == sorted(workers.addresses)
    assert said["ranks"] == ["0", "1", "2", "3"]
    assert said["sums"] == [10.0] * 4, "a gloo all-reduce across both hosts"
    assert "asked for 3 host(s), and 2 of 2 can be used" in said["refusal"]


def check_wrong_address(workers):
    """Check that it is named, and that the worker beside it is let go in order."""
    program = f"""
import asyncio, forge
from forge.config import LauncherConfig
from forge.errors import LaunchError
from forge.runtime.backend import install_fault_hook
from forge.runtime.launchers import HostsLauncher
async def main():
    hosts = ("tcp://127.0.0.1:{free_port("127.0.0.1")}", "{workers.addresses[0]}")
    config = LauncherConfig(kind="hosts", hosts=hosts, attach_timeout_s=10)
    install_fault_hook()
    try:
        await HostsLauncher(config).launch()
    except LaunchError as error:
        print(error)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert "no worker answers at tcp://127.0.0.1:" in done.stdout, done.stderr
    assert "which answers within launcher.attach_timeout_s (10 s)" in done.stdout
    assert "forge worker --address" in done.stdout
    assert done.returncode == 0, done.stderr
    assert "Unhandled" not in done.stderr
