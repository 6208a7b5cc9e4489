"""Projects of `forge new` run as they are made: with fewer steps than they have, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forge.recipes.project import make_project

LIMIT_S = 900

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def run(folder: Path, *command: str) -> str:
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_project_with_data_runs(tmp_path: Path) -> None:
    make_project(tmp_path / "mine", "preferences")
    few = ["training.max_steps=2", "validation.max_samples=8", "metrics.tensorboard=false"]
    run(tmp_path / "mine", "-m", "forge.cli", "run", "main.py", "--config", "train.yaml", *few)
    assert (tmp_path / "mine" / "runs" / "mine" / "checkpoints" / "hf" / "model.safetensors").is_file()


def test_a_project_with_an_episode_runs_both_stages(tmp_path: Path) -> None:
    make_project(tmp_path / "mine", "environment")
    shown = tmp_path / "mine" / "sft.yaml"
    shown.write_text(re.sub(r"max_steps: \d+", "max_steps: 2", shown.read_text()))
    few = ["training.max_steps=1", "training.warmup_steps=0", "rollout.batch_groups=2", "rollout.group_size=2"]
    few += ["rollout.no_signal=keep", "evaluation.max_prompts=2"]
    assert "1 steps; " in run(tmp_path / "mine", "main.py", "--seed", "3", *few)
    assert (tmp_path / "mine" / "runs" / "mine-3" / "grpo" / "metrics.jsonl").is_file()
