"""`forge chaos` on a small run: every kind of process dies, a checkpoint is damaged, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from grpo_runs import LIMIT_S, ROOT, SMALL

SCRIPT = (
    {"kind": "kill", "role": "generator", "at_step": 2},
    {"kind": "kill", "role": "trainer", "at_step": 3},
    {"kind": "clock", "role": "controller", "at_step": 3, "duration_s": 7200.0},
    {"kind": "corrupt_checkpoint", "role": "controller", "at_step": 5},
    {"kind": "stop", "role": "controller", "at_step": 1000, "duration_s": 1.0},
)


def test_a_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    # Enough steps for the last fault to come before the end. At step 5, the checkpoints of steps 2 and 4 are complete.
    training = {**SMALL["training"], "max_steps": 20}
    checkpointing = {**SMALL["checkpointing"], "asynchronous": False}
    (tmp_path / "run.yaml").write_text(json.dumps({**SMALL, "training": training, "checkpointing": checkpointing}))
    (tmp_path / "script.jsonl").write_text("".join(json.dumps(fault) + "\n" for fault in SCRIPT))
    words = [str(tmp_path / "run.yaml"), "--program", str(ROOT / "apps/grpo/main.py"), "--limit", str(LIMIT_S)]
    words += ["--script", str(tmp_path / "script.jsonl"), "--output", str(tmp_path / "runs"), "--json", "verdict.json"]
    path = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "forge.cli", "chaos", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=3 * LIMIT_S,
        check=False,
    )
    logs = "".join(log.read_text()[-6000:] for log in tmp_path.glob("*.log"))
    assert ended.returncode == 0, ended.stdout + ended.stderr + logs
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["problems"] == []
    assert verdict["num_faults"] == {
        "kill generator": 1,
        "kill trainer": 1,
        "clock": 1,
        "corrupt_checkpoint controller": 1,
    }
    assert verdict["num_skipped"] == 1, "there is no such step"
    assert verdict["equal_weights"] is True
    assert verdict["history"]["counts"]["steps"] >= 20
    assert verdict["goodput"] > 0
    events = [json.loads(line) for line in (tmp_path / "runs/disturbed/supervisor.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["damaged", "crash", "end"]
