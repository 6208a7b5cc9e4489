"""The simulated control plane runs, counts every call and group, and gives the same figures every time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "control_plane.py"


def simulate(found: Path) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    command = [sys.executable, str(BENCHMARK), "--quick", "--only", "simulation", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(found.read_text())["simulation"]
    return rows


def test_a_simulation_loses_no_call_and_is_the_same_every_time(tmp_path: Path) -> None:
    rows = simulate(tmp_path / "first.json")
    assert rows == simulate(tmp_path / "second.json")
    for row, num_replicas in zip(rows, (20, 100), strict=True):
        num_calls = 3 * 2 * num_replicas  # batches, calls in flight at each replica
        assert (row["num_answered"], row["num_ledger_lines"]) == (num_calls, num_calls // 4)
        assert row["num_sent"] == row["num_answered"] + row["num_retried"]
        assert (row["num_hosts_lost"], row["num_restarts"]) == (1, 10)  # that host's ten replicas, elsewhere
        assert row["num_retried"] >= 20
        assert 0 < row["controller_busy"] < 1
