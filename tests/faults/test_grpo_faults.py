"""Reinforcement learning whose processes are killed: what goes on by itself, and what a resume takes up."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from dying_parts import DyingLoss
from forge.config import GRPOConfig
from forge.errors import ActorFailure
from forge.loops.grpo import run_grpo
from forge.loops.planning import plan_run
from forge.loops.run_paths import run_dir
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
    train,
    train_here,
    train_watched,
    weights_digest,
)
from leftovers import processes_of

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
    code, _ = run_app(folder, AT_ONCE, until=3)
    assert code == KILLED
    code, told = run_app(folder, "checkpointing.resume=must")
    assert (code, "resuming after step 2" in told) == (0, True), told
    same(config(folder), whole)


def test_ctrl_c_saves_and_a_resume_takes_it_up(whole: GRPOConfig, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    code, told = run_app(folder, "placement=shared", until=3, send=signal.SIGINT)
    assert code == INTERRUPTED, told
    saved = [checkpoint.step for checkpoint in list_checkpoints(folder / "checkpoints")][-1]
    assert saved >= 3
    assert f"--resume continues after step {saved}" in told
    same(resume(folder), whole)


def test_a_run_resumes_with_another_number_of_trainer_ranks(whole: GRPOConfig, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    train_here(config(folder, "training.max_steps=4"))
    chosen = config(folder, "checkpointing.resume=must", "distributed.shard=2")
    assert train(chosen).step == NUM_STEPS
    numbers = [[(line.group, line.step, line.outcome) for line in ledger(run)] for run in (chosen, whole)]
    assert numbers[0] == numbers[1], "the same groups, each once"
    rewards, expected = (metrics(run, "rollout/reward_mean") for run in (chosen, whole))
    assert rewards[:5] == expected[:5], "step 5 begins with the weights of the checkpoint, bit for bit"
    found, wanted = (load_file(run_dir(run) / "checkpoints/hf/model.safetensors") for run in (chosen, whole))
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-4, msg=name)  # two ranks round otherwise


def test_a_trainer_that_is_killed_when_it_has_published_is_restored(whole: GRPOConfig, tmp_path: Path) -> None:
    """The run goes on with the same generators, and ends with the same weights, ledger and rewards."""

    async def kill_trainer(workers: Workers, version: int) -> None:
        if version == 3:
            service: Any = workers.trainer.service  # type: ignore[attr-defined]
            os.kill((await service.get_metrics()).replicas[0].pids[0], signal.SIGKILL)

    chosen = config(tmp_path / "whole", AT_ONCE)
    assert train_watched(chosen, kill_trainer).step == NUM_STEPS
    same(chosen, whole)
    assert metrics(chosen, "recovery/restarts") == [1]
    assert metrics(chosen, "recovery/steps_retrained") == [1], "the last checkpoint is of step 2"
    assert not (tmp_path / "whole" / "ledger.discarded.jsonl").exists()


def test_a_trainer_that_is_killed_between_steps_is_named_where_it_is_not_restored(tmp_path: Path) -> None:
    """What it died of is raised, and not that its service has no replica left."""
    sink = "metrics.sinks=[{kind: 'killing_sinks:KillTrainer', args: {at_step: 2}}]"
    chosen = config(tmp_path / "run", "recovery.max_restarts=0", sink)
    with pytest.raises(ActorFailure, match="rank 0"):
        asyncio.run(asyncio.wait_for(run_grpo(chosen), LIMIT_S))


def test_a_policy_in_one_process_that_is_killed_is_started_again(whole: GRPOConfig, tmp_path: Path) -> None:
    """In the middle of step 4. The groups since the checkpoint are rolled out again, as after a resume."""
    sink = f"metrics.sinks=[{{kind: 'dying_parts:Arming', args: {{marks: '{tmp_path}', at: {{'3': 1}}}}}}]"
    chosen = config(tmp_path / "whole", AT_ONCE, "placement=shared", sink)
    loss: Any = DyingLoss(plan_run(chosen).loss, tmp_path)
    result = asyncio.run(asyncio.wait_for(run_grpo(chosen, loss=loss), LIMIT_S))
    assert (result.step, result.is_stopped) == (NUM_STEPS, False)
    same(chosen, whole)
    assert metrics(chosen, "recovery/restarts") == [1]
    assert metrics(chosen, "recovery/steps_retrained") == [1]


def pid_of(label: str) -> int:
    """The process of a service that no part of the run gives away."""
    children = processes_of(os.getpid())
    (found,) = [each.pid for each in children if label_of(each) == label]
    return int(found)


def label_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("FORGE_LABEL")
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended meanwhile
        return None


def test_generators_rewards_and_volumes_that_are_killed_need_no_resume(
    whole: GRPOConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every request is made again elsewhere, with its seed: the weights that come out are the same to the last bit."""
    killed: list[str] = []

    async def kill(workers: Workers, version: int) -> None:
        if version == 3:
            os.kill(pid_of("store-volume-0[0]"), signal.SIGKILL)
        service: Any = {2: workers.policy.service, 4: workers.rewards}.get(version)
        if service is not None:
            killed.append(service.name)
            pid = (await service.get_metrics()).replicas[0].pids[0]
            os.kill(pid, signal.SIGKILL)

    chosen = config(tmp_path / "whole", "store.volumes=1")
    assert train_watched(chosen, kill).step == NUM_STEPS
    assert killed == ["generator", "rewards"]
    assert "service store-volume-0: replica 0 was lost" in caplog.text
    same(chosen, whole)


def test_an_asynchronous_run_that_is_killed_twice_loses_no_group(tmp_path: Path) -> None:
    folder = tmp_path / "late"
    overrides = ("rollout.staleness=2", "training.max_steps=9", "rollout.no_signal=replace", AT_ONCE)
    assert run_app(folder, *overrides, until=3)[0] == KILLED
    assert run_app(folder, *overrides, "checkpointing.resume=auto", until=6)[0] == KILLED
    chosen = resume(folder, *overrides)
    buffer = kept_buffer(chosen)
    check_ledger(ledger(chosen), pending=buffer["pending"], next_number=buffer["next_number"])
    assert sorted({line.step for line in ledger(chosen)}) == list(range(1, 10))
    assert max(metrics(chosen, "rollout/staleness_max")) <= 2
    assert len(metrics(chosen, "rollout/reward_mean")) == 9
