"""The state of a run: from its lock and its files, and never wrong for a killed run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from forge.trainer.checkpoint_folder import LOCK_NAME, LockState, WriterLock
from forge.ui.run_state import Evidence, has_shared_locks, judge
from forge.ui.run_summary import SummaryReader
from run_folders import make_grpo_run, write_metrics

HERE = f"process 12 on {socket.gethostname()}"
THERE = "process 12 on node7.elsewhere"
HELD, FREE, NEVER, UNSEEN = LockState(True, HERE), LockState(False, HERE), LockState(False, ""), LockState(None, HERE)
CRASH = {"event": "crash", "status": -9, "action": "stop"}


@pytest.mark.parametrize(
    ("evidence", "kind", "detail"),
    [
        (Evidence(HELD), "starting", f"{HERE}: no step is finished yet"),
        (Evidence(HELD, last_step=5, total_steps=10), "running", HERE),
        (Evidence(HELD, last_step=10, total_steps=10), "running", HERE),  # it exports, or evaluates
        (Evidence(HELD, last_step=5, events=[CRASH]), "running", HERE),
        (Evidence(FREE, last_step=10, total_steps=10), "finished", "all 10 steps"),
        (Evidence(FREE, last_step=7, is_exported=True), "finished", "its model is exported"),
        (Evidence(NEVER, has_results=True), "finished", "the evaluation has its results"),
        (Evidence(FREE, last_step=5, total_steps=10), "stopped", "after step 5"),
        (Evidence(FREE), "stopped", "before its first step"),
        (Evidence(NEVER, last_step=5, total_steps=10), "stopped", "its last step is not the last one"),
        (Evidence(NEVER), "empty", ""),
        (Evidence(FREE, last_step=5, events=[CRASH]), "failed", "after step 5, with SIGKILL"),
        (Evidence(FREE, last_step=5, events=[{**CRASH, "status": 1}]), "failed", "after step 5, with exit code 1"),
        (Evidence(FREE, last_step=5, events=[{**CRASH, "status": -99}]), "failed", "after step 5, with signal 99"),
        (
            Evidence(FREE, last_step=5, events=[{"event": "end", "status": 2}]),
            "failed",
            "after step 5, with exit code 2",
        ),
        (Evidence(FREE, last_step=5, events=[{"event": "end", "status": 143}]), "stopped", "after step 5, by a signal"),
        (Evidence(FREE, last_step=5, events=[{"event": "end", "status": -2}]), "stopped", "after step 5, by a signal"),
        (
            Evidence(FREE, last_step=5, events=[{**CRASH, "action": "restart"}]),
            "stopped",
            "after step 5; its supervisor has ended",
        ),
        (Evidence(FREE, last_step=5, events=[{"event": "end", "status": "x"}]), "stopped", "after step 5"),
        (Evidence(UNSEEN, last_step=5), "unknown", None),
        (Evidence(LockState(False, THERE), has_shared_locks=False, last_step=5), "unknown", None),
        (Evidence(LockState(False, HERE), has_shared_locks=False, last_step=5), "stopped", "after step 5"),
        (Evidence(LockState(False, THERE), has_shared_locks=True, last_step=5), "stopped", "after step 5"),
        (
            Evidence(LockState(False, THERE), has_shared_locks=False, last_step=9, total_steps=9),
            "finished",
            "all 9 steps",
        ),
    ],
)
def test_the_evidence_is_judged(evidence: Evidence, kind: str, detail: str | None) -> None:
    state = judge(evidence)
    assert state.kind == kind
    if detail is not None:
        assert state.detail == detail


def test_resumes_are_passed_on() -> None:
    assert judge(Evidence(HELD, last_step=1, num_resumes=3)).num_resumes == 3


MOUNTS = [
    "22 1 8:1 / / rw - ext4 /dev/sda1 rw",
    "30 22 0:50 / /shared rw - nfs4 server:/x rw,vers=4.2,local_lock=none",
    "31 22 0:51 / /shared/apart rw - nfs server:/y rw,nolock,local_lock=all",
    "32 22 0:52 / /lustre rw - lustre mgs:/z rw,flock",
    "33 22 0:53 / /lustre/local rw - lustre mgs:/w rw,localflock",
    "34 22 0:54 / /home\\040of rw - fuse.sshfs host: rw",
    "nonsense",
]


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/runs", True), ("/shared/runs", True), ("/shared/apart/runs", False), ("/lustre/runs", True),
        ("/lustre/local", False), ("/home of/me", False), ("/sharedness", True),
    ],
)  # fmt: skip
def test_which_file_systems_show_the_locks_of_other_machines(folder: str, expected: bool) -> None:
    assert has_shared_locks(Path(folder), mounts=MOUNTS) is expected


HOLDER = """
import pathlib, sys
from forge.trainer.checkpoint_folder import WriterLock
lock = WriterLock(pathlib.Path(sys.argv[1])); print("locked", flush=True); sys.stdin.read()
"""


def test_a_killed_run_is_seen_at_once(tmp_path: Path) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=3, max_steps=10)
    reader = SummaryReader(folder, "run")
    assert reader.read().state.kind == "stopped"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        state = reader.read().state
        assert (state.kind, state.detail) == ("running", f"process {process.pid} on {socket.gethostname()}")
        process.kill()
        process.wait()
        state = reader.read().state
        assert (state.kind, state.detail) == ("stopped", "after step 3")
    finally:
        process.kill()
        process.communicate()


def test_looking_at_a_lock_does_not_let_go_of_it(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    assert WriterLock.look(tmp_path) == LockState(True, f"this process, {os.getpid()}")
    program = "import pathlib, sys; from forge.trainer.checkpoint_folder import WriterLock as W; "
    program += "print(W.look(pathlib.Path(sys.argv[1])).is_held)"
    ran = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "True"
    lock.release()
    assert WriterLock.look(tmp_path).is_held is False
    assert WriterLock.look(tmp_path / "nothing") == LockState(False, "")


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_is_no_file_is_neither_read_nor_waited_for(tmp_path: Path, kind: str) -> None:
    """A link would show the beginning of a file that is elsewhere, and a pipe would let the server wait for ever."""
    (tmp_path / "secret").write_text("a password")
    run = tmp_path / "run"
    run.mkdir()
    if kind == "link":
        (run / LOCK_NAME).symlink_to(tmp_path / "secret")
    else:
        os.mkfifo(run / LOCK_NAME)
    program = "import pathlib, sys; from forge.trainer.checkpoint_folder import WriterLock as W\n"
    program += "print(W.look(pathlib.Path(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", program, run], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(LockState(None, ""))


def record(folder: Path, at: float, **fields: Any) -> None:
    stamp = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    with (folder / "supervisor.jsonl").open("a") as file:
        file.write(json.dumps({"time": stamp, **fields}) + "\n")


def test_what_a_supervisor_noted_before_the_last_start_is_history(tmp_path: Path) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=3, max_steps=10)
    WriterLock(folder).release()
    now = time.time()
    os.utime(folder / ".writer", (now, now))
    record(folder, now - 100, event="crash", status=-signal.SIGKILL, action="stop")
    assert SummaryReader(folder, "run").read().state.kind == "stopped"
    record(folder, now + 5, event="crash", status=1, action="stop")
    assert SummaryReader(folder, "run").read().state.kind == "failed"


def test_resumes_are_counted_from_sessions_and_restarts(tmp_path: Path) -> None:
    write_metrics(tmp_path, 2)
    record(tmp_path, time.time(), event="crash", status=1, action="restart")
    assert SummaryReader(tmp_path, "run").read().state.num_resumes == 1
    (tmp_path / "replay").mkdir()
    for step in (0, 4, 9):
        (tmp_path / "replay" / f"session_{step:06d}.json").write_text("{}")
    assert SummaryReader(tmp_path, "run").read().state.num_resumes == 2
