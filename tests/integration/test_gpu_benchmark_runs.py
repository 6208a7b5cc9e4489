"""The table of one GPU, tried out on a CPU: its programs start each other, measure, and leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_table_runs_a_step_of_our_side(tmp_path: Path, leaves_nothing: None) -> None:
    written, markdown = tmp_path / "found.json", tmp_path / "found.md"
    command = [sys.executable, str(BENCHMARKS / "gpu_table.py"), "--quick", "--device", "cpu", "--minutes", "12"]
    command += ["--stages", "grpo", "--folder", str(tmp_path), "--json", str(written), "--markdown", str(markdown)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]

    stage = json.loads(written.read_text())["stages"]["grpo"]
    found = stage["found"]
    plan, side = found["plan"], found["sides"]["native-shared"]
    assert stage["status"] == side["status"] == "ok"
    steps = [event for event in found["outcomes"]["native-shared"]["events"] if event["event"] == "step"]
    assert len(steps) == plan["num_warm"] + plan["num_steps"]
    for step in steps:
        assert step["samples"] == plan["num_prompts"] * plan["group_size"]
        assert step["tokens"] == step["samples"] * plan["max_tokens"]
        assert step["max_apart"] == 0.0  # one copy of the weights, float32, a CPU
    assert len(side["steps_s"]) == plan["num_steps"]
    assert 0 < side["split"]["training"] < side["step_s"]
    assert side["staleness_max"] == 0
    assert side["peak_gb"] > 0.1
    assert "| native-shared | " in markdown.read_text()
    assert str(tmp_path) not in markdown.read_text()
