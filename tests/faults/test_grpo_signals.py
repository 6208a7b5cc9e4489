"""Reinforcement learning that a scheduler, a terminal or a user stops: what is saved, and how the program exits."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from forge.rollout.ledger import check_ledger
from forge.trainer.checkpoint_folder import list_checkpoints
from grpo_runs import app_command, config, kept_buffer, ledger
from leftovers import is_running, processes_of
from signals import hear_ctrl_c

LIMIT_S = 600
SAVE_NEVER = ("checkpointing.save_interval=null", "checkpointing.save_interval_s=null", "training.max_steps=1000")
SHARED = "placement=shared"
"""One worker process fewer, where only the controller gets the signal."""


def listen() -> None:
    """For `preexec_fn`: hear every signal, as a program does that a shell started."""
    hear_ctrl_c()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def run_until(command: list[str], text: str, act: Callable[[subprocess.Popen[str]], None]) -> tuple[int, str]:
    """Run a program and act when a line has a text. Returns the exit code and what was printed."""
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=listen, start_new_session=True
    )
    assert program.stdout is not None
    lines: list[str] = []
    children: list[psutil.Process] = []
    for line in program.stdout:
        lines.append(line)
        if not children and text in line:
            children = processes_of(program.pid)
            act(program)
    code = program.wait(LIMIT_S)
    all_gone(children)
    return code, "".join(lines)


def all_gone(children: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs([child for child in children if is_running(child)], timeout=600)
    assert [child.cmdline() for child in alive] == []


def adds_up(folder: Path) -> int:
    """The step of the newest checkpoint, whose groups are all accounted for."""
    chosen = config(folder)
    newest = list_checkpoints(folder / "checkpoints")[-1].step
    lines = [line for line in ledger(chosen) if line.step <= newest]
    buffer = kept_buffer(chosen)
    check_ledger(lines, pending=buffer["pending"], next_number=buffer["next_number"])
    return newest


def test_a_scheduler_that_terminates_every_process_loses_no_step(tmp_path: Path) -> None:
    def terminate(program: subprocess.Popen[str]) -> None:
        """The controller last: whatever the others do, it must not hear of it first."""
        for process in (*processes_of(program.pid), program):
            with contextlib.suppress(ProcessLookupError):  # it has ended with its parent
                os.kill(process.pid, signal.SIGTERM)

    folder = tmp_path / "run"
    code, told = run_until(app_command(folder, *SAVE_NEVER), "Step 2", terminate)
    assert code == 128 + signal.SIGTERM, told
    saved = adds_up(folder)
    assert saved >= 2
    assert f"stopped after step {saved}; --resume continues after step {saved}" in told
    assert "Traceback" not in told


def test_a_terminal_that_is_closed_loses_no_step(tmp_path: Path) -> None:
    """Its controller gets SIGHUP, and cannot print any more, nor draw its panel."""
    folder = tmp_path / "run"
    master, slave = pty.openpty()
    command = ["setsid", "--ctty", *app_command(folder, *SAVE_NEVER, SHARED)]
    program = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, preexec_fn=listen)
    os.close(slave)
    printed = b""
    while b"Step 2/" not in printed:
        printed += os.read(master, 1 << 16)
    children = processes_of(program.pid)
    os.close(master)
    assert program.wait(LIMIT_S) == 128 + signal.SIGHUP
    all_gone(children)
    assert adds_up(folder) >= 2


def test_a_second_signal_names_the_checkpoint_that_is_complete(tmp_path: Path) -> None:
    """One is being written all the time."""

    def press_twice(program: subprocess.Popen[str]) -> None:
        for _ in range(2):
            program.send_signal(signal.SIGINT)

    folder = tmp_path / "run"
    command = app_command(folder, "checkpointing.save_interval=1", "training.max_steps=1000", SHARED)
    code, told = run_until(command, "Step 4", press_twice)
    assert code == 130, told
    newest = list_checkpoints(folder / "checkpoints")[-1].step
    assert f"--resume continues after step {newest}" in told
    assert "Traceback" not in told


def test_ctrl_c_before_the_first_step_exits_with_130(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = app_command(folder, "record.report=true")
    starting = "trainer: starting"
    code, told = run_until(command, starting, lambda program: program.send_signal(signal.SIGINT))
    assert code == 130, told
    assert "stopped after step 0; there is no checkpoint yet" in told
    assert "Traceback" not in told
    assert list_checkpoints(folder / "checkpoints") == ()
