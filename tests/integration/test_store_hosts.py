"""Weights between two hosts that share no memory: two worker processes on loopback stand for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.alone

CONTROLLER = Path(__file__).parents[1] / "support" / "store_hosts_controller.py"
HOSTS = ("first", "second")


class Workers:
    """Two `forge worker` processes that say that they are different hosts."""

    def __init__(self, held_port: Callable[[], int]) -> None:
        self.addresses = [f"tcp://127.0.0.1:{held_port()}" for _ in HOSTS]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "forge.cli", "worker", "--address", address],
                stdout=subprocess.PIPE, text=True, env=os.environ | {"FORGE_HOST": host},
            )
            for address, host in zip(self.addresses, HOSTS, strict=True)
        ]  # fmt: skip
        for process in self.processes:
            assert process.stdout is not None
            assert "listening" in process.stdout.readline()

    def run(self, scenario: str) -> dict[str, Any]:
        pids = [str(process.pid) for process in self.processes]
        command = [sys.executable, str(CONTROLLER), scenario, *self.addresses, *pids]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=600)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def workers(leaves_nothing: None, held_port: Callable[[], int]) -> Iterator[Workers]:
    started = Workers(held_port)
    try:
        yield started
    finally:
        started.stop()


def test_other_shards_on_another_host_and_the_loss_of_the_one_that_published(workers: Workers) -> None:
    said = workers.run("reshard and lose")
    check_reshard(said["reshard"])
    check_loss(said["lose"])


def check_reshard(said: dict[str, Any]) -> None:
    """Check that other shards on another host got the bytes they needed."""
    assert said["hosts"] == list(HOSTS)
    version_0 = [0, said["digest"]]
    assert said["halves"] == said["full"] == said["rows"] == [version_0, version_0]
    found = sorted(said["relaying"], key=lambda each: each["relays"])
    assert found == [{"relays": 0, "maps": 2, "publishers": 0}, {"relays": 2, "maps": 0, "publishers": 0}]
    assert said["needed"] <= said["sent"] <= 1.02 * said["needed"], "each byte comes once, with little around it"


def check_loss(said: dict[str, Any]) -> None:
    """Check that the loss of the publishing host was reported, and that a later version was found."""
    assert [version for version, _ in said["first"]] == [0, 0]
    for text in said["said"]:
        assert "on host first" in text
        assert any(f"pid {pid}" in text for pid in said["pids"]), text
    assert [version for version, _ in said["later"]] == [2, 2]


def test_what_is_on_volumes_outlives_the_publishing_host(workers: Workers) -> None:
    said = workers.run("volumes")
    assert said["volumes"] == 2
    assert [version for version, _ in said["found"]] == [1, 1]
    assert [version for version, _ in said["later"]] == [2, 2]
