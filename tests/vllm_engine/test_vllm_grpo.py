"""The whole loop with vLLM as the generator: the same program, another word in its configuration."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from grpo_runs import app_command, config, episodes, ledger, metrics


def test_the_loop_runs_on_vllm_and_its_weights_are_the_trainers(tmp_path: Path) -> None:
    overrides = ("generator.engine=vllm", "training.max_steps=3", "rollout.group_size=4")
    done = subprocess.run(
        app_command(tmp_path / "vllm", *overrides), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    chosen = config(tmp_path / "vllm", *overrides)
    assert len(metrics(chosen, "rollout/reward_mean")) == 3
    assert sorted(line.group for line in ledger(chosen)) == list(range(6))
    assert max(metrics(chosen, "sync/canary")) < 1e-3
    for episode in episodes(chosen):
        assert [version for version, _, _ in episode["versions"]] == [episode["step"] - 1]
        assert episode["logprobs"] == pytest.approx(episode["trainer_logprobs"], abs=2e-3)
