"""The benchmark of weight distribution runs, and measures what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from networks import require_network

pytestmark = pytest.mark.alone
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "weight_distribution.py"


def test_a_quick_run_compares_both_ways(tmp_path: Path, leaves_nothing: None) -> None:
    require_network()
    written = tmp_path / "found.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(written)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    *_, row, _, verdict = done.stdout.splitlines()
    assert row.startswith("| 2 × 2, 0.2 Gbit/s, 4 MiB |")
    (found,) = json.loads(written.read_text())["rows"]
    assert ("met" in row) == found["met"] == (verdict == "every goal measured was met")
    (relayed,), (direct,) = found["auto"], found["direct"]
    assert found["ratio"] == direct["seconds"] / relayed["seconds"]
    assert 1 <= relayed["received"] < 1.2
    assert 2 <= direct["received"] < 2.4
    assert direct["sent"] > 4 > 2.4 > relayed["sent"]


def test_it_says_where_it_cannot_run() -> None:
    command = ["unshare", "--user", sys.executable, str(BENCHMARK), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip(f"a process without rights cannot be made here: {done.stderr}")
    assert done.returncode == 2
    assert "a test network is not possible here: it needs root on Linux" in done.stderr
