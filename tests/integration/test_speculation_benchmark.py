"""The benchmark of speculative decoding runs, and finds the same tokens on all sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "speculation.py"


def test_a_quick_run_takes_fewer_steps_with_drafts(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(tmp_path / "speculation.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "tokens a step" in done.stdout
    rows = json.loads((tmp_path / "speculation.json").read_text())["rows"]
    keys = {(row["load"], row["batch"], row["temperature"]) for row in rows}
    assert len(rows) == 3 * len(keys) == 24
    for key in keys:
        sides = {row["side"]: row for row in rows if (row["load"], row["batch"], row["temperature"]) == key}
        assert len({row["num_tokens"] for row in sides.values()}) == 1
        steps = [sides[name]["num_steps"] for name in ("without", "prompt lookup", "draft model")]
        assert steps[0] >= max(steps[1:])
        assert sides["without"]["num_drafted"] == 0
        assert sides["draft model"]["num_drafted"] > 0
