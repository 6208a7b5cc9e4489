"""Reinforcement learning whose processes are killed: what goes on by itself, and what a resume takes up."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from forge.config import GRPOConfig
from forge.errors import ActorFailure, ServiceStopped
from forge.loops.workers import Workers
from forge.rollout.ledger import check_ledger
from forge.trainer.checkpoint_folder import list_checkpoints
from grpo_runs import (
    NUM_STEPS,
    config,
    kept_buffer,
    ledger,
    metrics,
    run_app,
    train_here,
    train_watched,
    weights_digest,
)

KILLED, INTERRUPTED = -signal.SIGKILL, 130
LIMIT_S = 600
AT_ONCE = "checkpointing.asynchronous=false"
"""Checkpoints are complete before the next step begins: steps are so short here that a kill would come before that."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    """The run that nothing disturbs."""
    chosen = config(tmp_path_factory.mktemp("faults") / "whole")
    train_here(chosen)
    return chosen


def resume(folder: Path, *overrides: str) -> GRPOConfig:
    """Take a run up from its folder alone, and let it come to its end."""
    chosen = config(folder, "checkpointing.resume=must", *overrides)
    train_here(chosen)
    return chosen


def same(chosen: GRPOConfig, whole: GRPOConfig) -> None:
    """The same weights, bit for bit, from the same groups."""
    assert weights_digest(chosen) == weights_digest(whole)
    assert ledger(chosen) == ledger(whole)
    assert metrics(chosen, "rollout/reward_mean") == metrics(whole, "rollout/reward_mean")


def test_a_controller_that_is_killed_is_taken_up(whole: GRPOConfig, tmp_path: Path) -> None:
    """By the program that a user starts again, whose generators load the weights of the checkpoint."""
    folder = tmp_path / "whole"
    code, _ = run_app(folder, AT_ONCE, until="Step 3")
    assert code == KILLED
    code, told = run_app(folder, "checkpointing.resume=must")
    assert (code, "resuming after step 2" in told) == (0, True), told
    same(config(folder), whole)


def test_ctrl_c_saves_and_a_resume_takes_it_up(whole: GRPOConfig, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    code, told = run_app(folder, "placement=shared", until="Step 3", send=signal.SIGINT)
    assert code == INTERRUPTED, told
    saved = [checkpoint.step for checkpoint in list_checkpoints(folder / "checkpoints")][-1]
    assert saved >= 3
    assert f"--resume continues after step {saved}" in told
    same(resume(folder), whole)


def test_a_trainer_that_is_killed_ends_the_run_and_a_resume_takes_it_up(whole: GRPOConfig, tmp_path: Path) -> None:
    async def kill_trainer(workers: Workers, version: int) -> None:
        if version == 3:
            service: Any = workers.trainer.service  # type: ignore[attr-defined]
            os.kill((await service.get_metrics()).replicas[0].pids[0], signal.SIGKILL)

    chosen = config(tmp_path / "whole", AT_ONCE)
    with pytest.raises((ActorFailure, ServiceStopped)):
        train_watched(chosen, kill_trainer)
    same(resume(tmp_path / "whole"), whole)


def test_generators_and_rewards_that_are_killed_need_no_resume(whole: GRPOConfig, tmp_path: Path) -> None:
    """Every request is made again elsewhere, with its seed: the weights that come out are the same to the last bit."""
    killed: list[str] = []

    async def kill(workers: Workers, version: int) -> None:
        service: Any = {2: workers.policy.service, 4: workers.rewards}.get(version)
        if service is not None:
            killed.append(service.name)
            pid = (await service.get_metrics()).replicas[0].pids[0]
            os.kill(pid, signal.SIGKILL)

    chosen = config(tmp_path / "whole")
    assert train_watched(chosen, kill).step == NUM_STEPS
    assert killed == ["generator", "rewards"]
    same(chosen, whole)


def test_an_asynchronous_run_that_is_killed_twice_loses_no_group(tmp_path: Path) -> None:
    folder = tmp_path / "late"
    overrides = ("rollout.staleness=2", "training.max_steps=9", "rollout.no_signal=replace", AT_ONCE)
    assert run_app(folder, *overrides, until="Step 3")[0] == KILLED
    assert run_app(folder, *overrides, "checkpointing.resume=auto", until="Step 6")[0] == KILLED
    chosen = resume(folder, *overrides)
    buffer = kept_buffer(chosen)
    check_ledger(ledger(chosen), pending=buffer["pending"], next_number=buffer["next_number"])
    assert sorted({line.step for line in ledger(chosen)}) == list(range(1, 10))
    assert max(metrics(chosen, "rollout/staleness_max")) <= 2
    assert len(metrics(chosen, "rollout/reward_mean")) == 9
