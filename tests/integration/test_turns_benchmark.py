"""The benchmark of turns runs, finds both sides equal, and counts tokens that do not depend on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "turns.py"


def test_a_quick_run_computes_only_what_is_new(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(tmp_path / "turns.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "times less CPU time" in done.stdout
    found = json.loads((tmp_path / "turns.json").read_text())
    (alone,), (group,) = found["alone"], found["group"]
    whole = sum(40 + 24 * turn for turn in range(4))
    assert (alone["no reuse"]["num_computed"], alone["no reuse"]["num_reused"]) == (whole, 0)
    new = 40 + 3 * (1 + 16)
    assert (alone["reuse"]["num_computed"], alone["reuse"]["num_reused"]) == (new, whole - new)
    assert group["no reuse"]["num_computed"] == 3 * whole
    assert group["reuse"]["num_computed"] == 40 + 2 + 3 * 3 * (1 + 16), "the common prompt once, its last token thrice"
    assert group["reuse"]["num_computed"] + group["reuse"]["num_reused"] == 3 * whole
