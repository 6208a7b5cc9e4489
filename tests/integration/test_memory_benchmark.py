"""The benchmark of planned memory counts on a CPU what can be counted there, and says so where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "memory_plan.py"


def run(*words: str, **environment: str) -> str:
    command = [sys.executable, str(BENCHMARK), *words]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_without_a_gpu_it_says_so() -> None:
    assert "There is no GPU here" in run(PATH="")


def test_what_a_cpu_can_count_agrees(tmp_path: Path) -> None:
    out = run("--quick", "--json", str(tmp_path / "found.json"))
    assert "FAILED" not in out
    lines = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert {line["what"] for line in lines} == {"lasting", "gradients", "activations"}
    assert len(lines) == 6
    for line in lines:
        near = 0.3 if line["what"] == "activations" and "precision=float32" in line["setting"] else 0.05
        assert line["predicted"] == pytest.approx(line["measured"], rel=near), line
