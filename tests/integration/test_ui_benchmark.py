"""The benchmark of the live page runs, on a small run, and finds what it put there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from devtools import find_browser

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "ui.py"


@pytest.mark.skipif(find_browser() is None, reason="no chromium or google-chrome on PATH")
def test_a_quick_run_measures_both_sides(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["size"] == {"num_steps": 300, "num_groups": 2, "group_size": 5}
    assert {side: len(rounds) for side, rounds in found["rounds"].items()} == {
        "ours": 1,
        "tensorboard": 1,
        "rollouts": 1,
    }
    assert all(value > 0 for side in found["medians"].values() for value in side.values())
    assert found["bytes"]["rollouts"] > 3000 * 1000
    assert "3,000 rollouts" in done.stdout
    assert "Goal: first paint of every page" in done.stdout
