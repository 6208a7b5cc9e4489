"""Signals that are for the controller do not end a rank, and what a rank starts hears them again."""

from __future__ import annotations

import signal
import subprocess
import sys

PROGRAM = """
import os, signal, subprocess
from forge.runtime.rank_main import leave_to_controller

leave_to_controller()
for number in (signal.SIGTERM, signal.SIGHUP):
    os.kill(os.getpid(), number)
print("alive", flush=True)
started = subprocess.Popen(["sleep", "600"])
started.terminate()
print("started:", started.wait(), flush=True)
forked = os.fork()
if not forked:
    os.kill(os.getpid(), signal.SIGHUP)
    os._exit(0)
print("forked:", os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), flush=True)
"""


def test_a_rank_survives_what_its_children_do_not() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600, check=False)
    expected = f"alive\nstarted: {-signal.SIGTERM}\nforked: {-signal.SIGHUP}\n"
    assert (ended.stdout, ended.returncode) == (expected, 0), ended.stderr
