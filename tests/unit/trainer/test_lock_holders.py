"""The lock of a folder whose holder is about to end, because its controller was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forge.errors import CheckpointError
from forge.trainer.checkpoint_folder import WriterLock
from forge.trainer.lock_holders import is_ending, name_of, wait_while_ending

HOLD = """
import sys
from pathlib import Path
from forge.trainer.checkpoint_folder import WriterLock
lock = WriterLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def hold(folder: Path, owner: int) -> subprocess.Popen[str]:
    """Start a process that holds the lock, as the rank of a controller, until its input is closed."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    environment = os.environ | {"FORGE_OWNER_PID": str(owner)}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_resume_waits_for_a_rank_of_a_controller_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_waiting, sleep = threading.Event(), time.sleep

    def note(seconds: float) -> None:
        is_waiting.set()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", note)
    with hold(tmp_path, ended_pid()) as holder, ThreadPoolExecutor(1) as threads:
        checking = threads.submit(WriterLock.check, tmp_path)
        is_waiting.wait(60)
        assert holder.stdin is not None
        holder.stdin.close()
        checking.result(60)  # raises where it did not wait
    assert is_waiting.is_set()
    WriterLock(tmp_path).release()


def test_a_run_that_lives_is_refused_at_once(tmp_path: Path) -> None:
    with hold(tmp_path, os.getpid()) as holder:
        assert not is_ending(name_of(holder.pid))
        with pytest.raises(CheckpointError, match="Another run"):
            WriterLock.check(tmp_path)
        assert holder.stdin is not None
        holder.stdin.close()


def test_one_that_does_not_end_is_not_waited_for_longer_than_the_limit(tmp_path: Path) -> None:
    asked = []

    def holder() -> str:
        asked.append(1)
        return name_of(ended_pid())

    wait_while_ending(holder, limit_s=0.0)
    assert asked == [1]


def test_others_are_not_ending() -> None:
    for holder in (name_of(os.getpid()), "process 1 on elsewhere", "another process", ""):
        assert not is_ending(holder)


def test_a_controller_that_ended_and_was_not_reaped_has_ended(tmp_path: Path) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert zombie.stdout is not None
    zombie.stdout.read()  # it has closed its output: it is ending
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    with hold(tmp_path, zombie.pid) as holder:
        assert is_ending(name_of(holder.pid))
        assert holder.stdin is not None
        holder.stdin.close()
    zombie.wait()
