"""How the programs in apps/ end: what they print, and their exit status."""

from __future__ import annotations

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.loops.grpo import GRPOResult

ROOT = Path(__file__).parents[2]
LIMIT_S = 600


def summary(**changes: Any) -> list[str]:
    app = runpy.run_path(str(ROOT / "apps" / "grpo" / "main.py"))
    plain: dict[str, Any] = {"step": 3, "reward": 0.5, "is_stopped": False, "report": None, "export": None}
    result = GRPOResult(first_evaluation=None, evaluation=None, **(plain | changes))
    lines: list[str] = app["summary"](result).splitlines()
    return lines


def test_a_run_that_was_stopped_is_not_done() -> None:
    assert summary() == ["Done after 3 steps: mean reward 0.500"]
    assert summary(is_stopped=True) == ["Stopped after 3 steps: mean reward 0.500"]


def test_without_a_step_there_is_no_mean_reward() -> None:
    assert summary(reward=math.nan) == ["Done after 3 steps: nothing was left to do"]
    assert summary(reward=math.nan, step=0, is_stopped=True) == ["Stopped after 0 steps: no step was taken"]


def test_commands_can_be_pasted_whatever_the_path() -> None:
    export = Path("my runs/a/checkpoints/hf")
    assert summary(export=export)[-1] == f"model: {export} (try: forge chat '{export}')"


@pytest.mark.parametrize("config", ["apps/vllm/llama3_8b.yaml", "apps/vllm/tiny.yaml"])
def test_a_gpu_that_is_not_there_is_named(config: str) -> None:
    words = ["--config", config, "generator.with_gpus=true"]
    ended = subprocess.run(
        [sys.executable, "-m", "apps.vllm.main", *words],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    for part in ("this machine has none", "path:   generator.with_gpus", "generator.with_gpus=false"):
        assert part in ended.stderr
