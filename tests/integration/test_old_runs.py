"""Run folders that an earlier release wrote resume to their end and make a report.

`tests/fixtures/old_runs.tar.xz` was recorded at commit 2b8ec3e, with the two YAML files in it. Both runs were killed
with `kill -9` after a checkpoint. The GRPO run is asynchronous (staleness 2): its checkpoint after step 4 has pending
groups; its ledger, metrics and rollouts reach step 5.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from forge.config import GRPOConfig, SFTConfig, load
from forge.observe import read_jsonl
from forge.observe.report import write_report
from forge.rollout.ledger import check_ledger, read_ledger
from forge.trainer.checkpoint_folder import list_checkpoints
from user_cache import cache_with_kernels

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
SFT_LOSSES = {5: 6.165292, 7: 6.127468, 8: 6.154043, 10: 6.187707, 11: 6.174719}
"""Losses of the fine-tuning run where the earlier release was not killed."""
SFT_VALIDATION = 6.113909

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def old_runs(tmp_path: Path) -> Path:
    with tarfile.open(ROOT / "tests" / "fixtures" / "old_runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def resume(kind: str, folder: Path) -> str:
    """Resume a run in the folder that it was started in. Returns what it printed."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "apps" / kind / "main.py"), "--config", f"{kind}.yaml", "--resume"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **cache_with_kernels(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def values(folder: Path, name: str) -> dict[int, float]:
    return {line.step: float(line.values[name]) for line in read_jsonl(folder / "metrics.jsonl") if name in line.values}


def test_an_old_grpo_run_resumes_and_makes_a_report(old_runs: Path) -> None:
    folder = old_runs / "grpo"
    pending = list_checkpoints(folder / "checkpoints")[-1].extra["caller"]["buffer"]["pending"]
    assert pending == [32, 33, 34, 35, 36, 37]
    before = write_report(folder)
    assert (before.last_step, before.num_samples > 0, before.notes) == (5, True, ())

    printed = resume("grpo", old_runs)

    assert "resuming after step 4; 6 groups are back in the queue" in printed
    newest = list_checkpoints(folder / "checkpoints")[-1]
    buffer = newest.extra["caller"]["buffer"]
    assert newest.step == 8
    lines = [
        line for line in read_ledger(folder / "ledger.jsonl") if line.step <= 8
    ]  # later ones were dropped at the end
    check_ledger(lines, pending=buffer["pending"], next_number=buffer["next_number"])
    assert sorted({line.step for line in lines}) == list(range(1, 9))
    assert set(pending) <= {line.group for line in lines} | set(buffer["pending"])
    assert sorted(values(folder, "rollout/reward_mean")) == list(range(1, 9))
    assert sorted(values(folder, "evaluation/reward")) == [0, 2, 4, 6, 8]
    after = write_report(folder)
    assert (after.last_step, after.notes) == (8, ())
    assert (folder / "checkpoints" / "hf" / "model.safetensors").is_file()


def test_an_old_sft_run_resumes_and_makes_a_report(old_runs: Path) -> None:
    folder = old_runs / "sft"
    assert write_report(folder).last_step == 6
    resume("sft", old_runs)
    losses = values(folder, "train/loss")
    assert sorted(losses) == list(range(1, 13))
    assert {step: losses[step] for step in SFT_LOSSES} == pytest.approx(SFT_LOSSES, abs=2e-5)
    assert values(folder, "validation/loss")[12] == pytest.approx(SFT_VALIDATION, abs=2e-5)
    report = write_report(folder)
    assert (report.last_step, report.notes) == (12, ())


def test_configurations_of_old_run_folders_load(old_runs: Path) -> None:
    """The file that a run writes into its folder is also one that starts a run."""
    grpo = load(GRPOConfig, files=[old_runs / "grpo" / "config.yaml"])
    assert (grpo.rollout.staleness, grpo.training.max_steps, grpo.algorithm.kl.coefficient) == (2, 8, 0.01)
    sft = load(SFTConfig, files=[old_runs / "sft" / "config.yaml"])
    assert (sft.validation.interval, sft.training.max_steps) == (3, 12)
