"""Run pytest so that the run ends: within a time limit, and with every process that it started.

    python scripts/run_tests.py --limit-s 5400 -n 2 tests/unit

Tests start hundreds of processes. They share compiled modules in `__pycache__`, whatever PYTHONDONTWRITEBYTECODE says.
Threads of OpenMP sleep while they wait: those that spin take the cores from the tests of other workers.

All other arguments go to pytest, and its exit status is the result. With -n, each worker runs whole files, and is
replaced when it dies, however often. A run that exceeds the limit, or that gets SIGTERM, is interrupted as by Ctrl-C:
pytest then reports what it knows. A minute later it is killed. The exit status is 124, as from timeout(1).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

import psutil

PR_SET_CHILD_SUBREAPER = 36
STOPPED = 124
ENDING_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]  # which nohup and shells may have ignored
SPREAD = ("--dist", "loadfile", "--max-worker-restart", "1000")
TIME_TO_REPORT_S = 60.0
TIME_TO_END_S = 5.0
TIME_TO_DIE_S = 30.0


class Terminated(Exception):
    """SIGTERM arrived."""


class Run:
    """A process and all that it starts. Orphans become children of this process, which reaps them as init would."""

    def __init__(self, command: Sequence[str]) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        self.status = STOPPED
        self.ended, self.all_ended = threading.Event(), threading.Event()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._pid = os.posix_spawn(command[0], command, environment, setsigdef=ENDING_SIGNALS)
        threading.Thread(target=self._reap, daemon=True).start()

    def interrupt(self) -> None:
        if not self.ended.is_set():
            os.kill(self._pid, signal.SIGINT)

    def end_rest(self) -> list[str]:
        """Kill every process that is left, and return the command lines."""
        killed: dict[psutil.Process, str] = {}
        until = time.monotonic() + TIME_TO_DIE_S
        while not self.all_ended.is_set() and time.monotonic() < until:
            for process in psutil.Process().children(recursive=True):
                if process not in killed:
                    killed[process] = _kill(process)
            self.all_ended.wait(0.1)
        return [line for line in killed.values() if line]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.wait()
            except ChildProcessError:
                self.all_ended.set()
                return
            if pid == self._pid:
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code
                self.ended.set()


def _kill(process: psutil.Process) -> str:
    """Kill a process and return its command line; nothing if it has ended before."""
    try:
        line = " ".join(process.cmdline())
        process.kill()
    except psutil.NoSuchProcess:
        return ""
    return line


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise Terminated


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--limit-s", type=float, required=True, help="seconds that the whole run may take")
    given, for_pytest = parser.parse_known_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest gets it as well, and ends
    signal.signal(signal.SIGTERM, _on_sigterm)
    run = Run([sys.executable, "-m", "pytest", *SPREAD, *for_pytest])
    try:
        reason = "" if run.ended.wait(given.limit_s) else f"did not end within {given.limit_s:g} s"
    except Terminated:
        reason = "got SIGTERM"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if reason:
        _say(f"the run {reason}: interrupting it")
        run.interrupt()
        run.ended.wait(TIME_TO_REPORT_S)
    run.all_ended.wait(TIME_TO_END_S)
    for line in run.end_rest():
        _say(f"killed a process that was left: {line}")
    if reason:
        _say(f"failed: the run {reason}")
    return STOPPED if reason else run.status


def _say(text: str) -> None:
    print(f"run_tests: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
