"""The benchmark of episodes with two agents runs, and both of its sides do the same work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "multi_agent.py"


def test_both_sides_have_as_many_turns_and_tokens(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    command = [sys.executable, str(BENCHMARK), "--quick", "--only", "episodes", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "times two episodes (goal <= 1.10)" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())["episodes"]
    counts = {name: [(each["num_turns"], each["num_tokens"]) for each in windows] for name, windows in found.items()}
    assert counts["two agents"] == counts["two episodes"]
    assert [turns for turns, _ in counts["two agents"]] == [2 * 8 * 2 * 4] * 2  # groups, members, agents, turns
