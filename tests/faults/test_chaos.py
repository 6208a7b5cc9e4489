"""`forge chaos` on a small run: every kind of process dies, a checkpoint is damaged, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_runs import LIMIT_S, ROOT, SMALL

SCRIPT = (
    {"kind": "kill", "role": "generator", "at_step": 2},
    {"kind": "kill", "role": "trainer", "at_step": 3},
    {"kind": "clock", "role": "controller", "at_step": 3, "duration_s": 7200.0},
    {"kind": "corrupt_checkpoint", "role": "controller", "at_step": 5},
    {"kind": "stop", "role": "controller", "at_step": 1000, "duration_s": 1.0},
)


def chaos(place: Path, script: Sequence[Mapping[str, Any]], *options: str, **training: Any) -> Mapping[str, Any]:
    """Run `forge chaos` with a script of faults on the small run, and return its verdict."""
    checkpointing = {**SMALL["checkpointing"], "asynchronous": False}
    config = {**SMALL, "training": {**SMALL["training"], **training}, "checkpointing": checkpointing}
    (place / "run.yaml").write_text(json.dumps(config))
    (place / "script.jsonl").write_text("".join(json.dumps(fault) + "\n" for fault in script))
    words = [str(place / "run.yaml"), "--program", str(ROOT / "apps/grpo/main.py"), "--limit", str(LIMIT_S)]
    words += ["--script", str(place / "script.jsonl"), "--output", str(place / "runs"), "--json", "verdict.json"]
    path = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "forge.cli", "chaos", *words, *options],
        cwd=place,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=3 * LIMIT_S,
        check=False,
    )
    logs = "".join(log.read_text()[-6000:] for log in place.glob("runs*.log"))
    assert ended.returncode == 0, ended.stdout + ended.stderr + logs
    verdict = json.loads((place / "verdict.json").read_text())
    assert verdict["problems"] == []
    assert verdict["equal_weights"] is True
    return verdict


def test_a_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    # Enough steps for the last fault to come before the end. At step 5, the checkpoints of steps 2 and 4 are complete.
    verdict = chaos(tmp_path, SCRIPT, max_steps=20)
    assert verdict["num_faults"] == {
        "kill generator": 1,
        "kill trainer": 1,
        "clock": 1,
        "corrupt_checkpoint controller": 1,
    }
    assert verdict["num_skipped"] == 1, "there is no such step"
    assert verdict["history"]["counts"]["steps"] >= 20
    assert verdict["goodput"] > 0
    events = [json.loads(line) for line in (tmp_path / "runs/disturbed/supervisor.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["damaged", "crash", "end"]


def test_a_run_whose_disk_was_full_continues_when_there_is_room(tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    full = {"kind": "disk_full", "role": "controller", "at_step": 3, "duration_s": 2.0}
    verdict = chaos(tmp_path, [full], "--disk-gb", "0.2", max_steps=20)
    assert verdict["num_faults"] == {"disk_full controller": 1}
    assert verdict["history"]["counts"]["steps"] >= 20
    log = (tmp_path / "runs-disturbed.log").read_text()
    assert "restart 1, from the checkpoint of step" in log, "the supervisor's own file was on the disk, which is gone"
