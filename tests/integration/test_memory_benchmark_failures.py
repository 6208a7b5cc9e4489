"""A setting that cannot be measured is told, and the others are measured all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAM = """
import asyncio, sys, time
import memory_plan as plan

settings = plan.settings_for("tiny", quick=True)
if sys.argv[1] == "dying":
    settings = [plan.Setting("trainer", (*settings[1].words, "training.learning_rate=-1")), settings[1]]
end = time.monotonic() + (300 if sys.argv[1] == "dying" else -1)
lines = asyncio.run(plan.compare("tiny", settings, None, end=end))
for each in settings:
    print("SETTING", each.label)
for line in lines:
    print("LINE", line.setting, "|", line.what)
"""


def run(case: str) -> list[str]:
    """What it says, in a process of its own: whoever waits for all children of a process takes its child from it."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(BENCHMARKS)}
    command = [sys.executable, "-c", PROGRAM, case]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=True)
    return done.stdout.splitlines()


def test_a_child_that_dies_does_not_end_the_others() -> None:
    said = run("dying")
    bad, good = (line.removeprefix("SETTING ") for line in said if line.startswith("SETTING "))
    (failed,) = (line for line in said if line.startswith(f"FAILED: tiny, {bad}"))
    assert "learning_rate" in failed.split("its process ended with 1", maxsplit=1)[1]
    measured = {line for line in said if line.startswith("LINE ")}
    assert measured == {f"LINE {good} | {what}" for what in ("lasting", "gradients", "activations")}


def test_what_the_time_does_not_hold_is_named() -> None:
    said = run("late")
    assert sum("left out, because the time is over" in line for line in said) == 2
    assert not [line for line in said if line.startswith("LINE ")]
