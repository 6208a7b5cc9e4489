"""Faults hit the processes of their own experiment, and nothing else. The processes here are plain Python."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge.chaos.faults import NotInjected, Surroundings, inject
from forge.chaos.processes import TAG, kill_all, processes_of, targets_of, wait_gone
from forge.chaos.script import Fault
from forge.observe.clock import CLOCK_FILE, CLOCK_FORMAT

WORKER = "import sys; print(flush=True); sys.stdin.read()  # forge.runtime.rank_main"


@pytest.fixture
def around(tmp_path: Path) -> Iterator[Surroundings]:
    tag, clock = uuid.uuid4().hex, tmp_path / "clock"
    clock.write_bytes(struct.pack(CLOCK_FORMAT, 0.0, 0.0))
    yield Surroundings(tag, tmp_path / "run", tmp_path / "run/checkpoints", clock)
    kill_all(tag)
    assert wait_gone(tag, limit_s=60) == []


def start(around: Surroundings, label: str, program: str = WORKER, **more: str) -> subprocess.Popen[bytes]:
    """Start a process that looks like a worker: it has a label, and the module of workers on its command line."""
    env = {**os.environ, TAG: around.tag, "FORGE_LABEL": label, **more}
    command = [sys.executable, "-c", program, "forge.runtime.rank_main"]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def hit(fault: Fault, around: Surroundings) -> str:
    return asyncio.run(inject(fault, around))


def state(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_kill_hits_the_process_that_the_script_picks(around: Surroundings) -> None:
    first, second = start(around, "generator[0]"), start(around, "generator[1]")
    other = start(around, "trainer[0]")
    assert [each.label for each in targets_of(around.tag, "generator")] == ["generator[0]", "generator[1]"]
    assert "killed generator[1]" in hit(Fault("kill", "generator", at_s=0, pick=3), around)
    assert second.wait(timeout=60) == -signal.SIGKILL
    assert (first.poll(), other.poll()) == (None, None)
    assert {each.pid for each in processes_of(around.tag)} == {first.pid, other.pid}
    assert processes_of(uuid.uuid4().hex) == []


@pytest.mark.parametrize("kind", ["stop", "slow"])
def test_a_stopped_process_continues(around: Surroundings, kind: str) -> None:
    worker = start(around, "rewardactor[0]")

    async def body() -> str:
        injecting = asyncio.create_task(inject(Fault(kind, "reward", at_s=0, duration_s=0.5), around))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while state(worker) != "T":  # noqa: ASYNC110 - the kernel's own state
                await asyncio.sleep(0)
        return await injecting

    assert "rewardactor[0]" in asyncio.run(body())
    assert state(worker) != "T"


def test_a_connection_breaks_on_both_ends(around: Surroundings) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        address = f"\0forge-chaos-{around.tag}"
        listening.bind(address)
        listening.listen()
        program = (
            "import socket, sys\n"
            "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[2]); print(flush=True)\n"
            "print('ended', s.recv(1), flush=True); sys.stdin.read()"
        )
        env = {**os.environ, TAG: around.tag, "FORGE_LABEL": "trainer[0]"}
        command = [sys.executable, "-c", program, "forge.runtime.rank_main", address[1:]]
        worker = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert worker.stdout is not None
        worker.stdout.readline()
        ours, _ = listening.accept()
        with ours:
            ours.settimeout(60)
            assert "broke a connection of trainer[0]" in hit(Fault("disconnect", "trainer", at_s=0, pick=7), around)
            assert ours.recv(1) == b""
        assert worker.stdout.readline() == b"ended b''\n"


def test_a_process_without_connections_is_not_hit(around: Surroundings) -> None:
    start(around, "trainer[0]")
    with pytest.raises(NotInjected, match="trainer\\[0\\] has no connection"):
        hit(Fault("disconnect", "trainer", at_s=0), around)


def test_connections_inside_a_process_are_left_alone(around: Surroundings) -> None:
    program = (
        "import socket, sys\n"
        "a, b = socket.socketpair(); l = socket.create_server(('127.0.0.1', 0))\n"
        "c = socket.create_connection(l.getsockname()); d, _ = l.accept(); print(flush=True); sys.stdin.read()\n"
        "a.send(b'x'); c.send(b'y'); print(b.recv(1), d.recv(1), flush=True)"
    )
    worker = start(around, "trainer[0]", program)
    with pytest.raises(NotInjected, match="trainer\\[0\\] has no connection to another process"):
        hit(Fault("disconnect", "trainer", at_s=0), around)
    said, _ = worker.communicate()
    assert said == b"b'x' b'y'\n"


def test_the_process_that_ranks_are_forks_of_can_be_hit(around: Surroundings) -> None:
    env = {**os.environ, TAG: around.tag}
    command = [sys.executable, "-c", "input()", "forge.runtime.fork_server"]
    server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE)
    while not targets_of(around.tag, "fork-server"):  # until the program has been loaded
        assert server.poll() is None
    assert "killed fork-server" in hit(Fault("kill", "fork-server", at_s=0), around)
    assert server.wait(timeout=60) == -signal.SIGKILL


def test_clocks_of_the_run_jump_and_monotonic_ones_never_back(around: Surroundings) -> None:
    program = (
        "import sys, time; from forge.observe.clock import monotonic_s, wall_s\n"
        "for _ in range(3):\n"
        "    print(round(wall_s() - time.time()), round(monotonic_s() - time.monotonic()), flush=True)\n"
        "    sys.stdin.readline()"
    )
    env = {**os.environ, CLOCK_FILE: str(around.clock)}
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "0 0\n"
    for jump, expected in ((3600.0, "3600 3600\n"), (-7200.0, "-3600 3600\n")):
        hit(Fault("clock", at_s=0, duration_s=jump), around)
        process.stdin.write("\n")
        assert process.stdout.readline() == expected
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def test_the_newest_checkpoint_is_changed_if_there_is_an_older_one(around: Surroundings) -> None:
    trainer = start(around, "trainer[0]")
    for step in (1, 2):
        if step == 2:
            with pytest.raises(NotInjected, match="no older checkpoint"):
                hit(Fault("corrupt_checkpoint", "trainer", at_s=0), around)
        folder = around.checkpoints / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text("{}")
        (folder / "data").write_bytes(bytes(1000))
        os.utime(folder / "checkpoint.json", (step, step))
    assert "step-00000002/data" in hit(Fault("corrupt_checkpoint", "trainer", at_s=0, pick=10), around)
    assert (around.checkpoints / "step-00000001/data").read_bytes() == bytes(1000)
    changed = (around.checkpoints / "step-00000002/data").read_bytes()
    assert (len(changed), changed.count(0xFF)) == (1000, 3)
    assert trainer.wait(timeout=60) == -signal.SIGKILL


def test_a_disk_that_others_use_is_not_filled(around: Surroundings) -> None:
    around.folder.mkdir()
    with pytest.raises(NotInjected, match="no file system of its own"):
        hit(Fault("disk_full", at_s=0, duration_s=0.1), around)
    assert list(around.folder.iterdir()) == []
