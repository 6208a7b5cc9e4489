"""Runs whose settings change, and whose processes are killed: every step is trained again as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commanding_sinks import command_sink
from forge.config import GRPOConfig
from forge.loops.replay.bisecting import bisect_run
from forge.loops.replay.recorded import RecordedRun
from forge.loops.run_paths import run_dir
from forge.loops.runtime_changes import read_changes
from forge.loops.workers import Workers
from forge.observe.history import check_history
from grpo_runs import (
    LIMIT_S,
    NUM_STEPS,
    app_command,
    config,
    ledger,
    metrics,
    train_here,
    train_watched,
    weights_digest,
)
from live_commands import AtVersions
from local_services import services_here

RATE, TEMPERATURE = "training.learning_rate", "generator.sampling.temperature"
CHANGE = {RATE: 4e-4, TEMPERATURE: 0.6}
OPTIONS = ("checkpointing.keep=9", "checkpointing.asynchronous=false")

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    """The run that nothing disturbs, whose settings change after step 3."""
    chosen = config(tmp_path_factory.mktemp("control") / "run", *OPTIONS)
    commands = AtVersions(run_dir(chosen), {2: lambda run: run.set(CHANGE)})
    with services_here():
        assert train_watched(chosen, commands).step == NUM_STEPS
    assert commands.answers()[2].from_step == 4
    return chosen


def same(chosen: GRPOConfig, whole: GRPOConfig) -> None:
    """The same weights, bit for bit, from the same groups, at the same rates."""
    assert weights_digest(chosen) == weights_digest(whole)
    assert ledger(chosen) == ledger(whole)
    for name in ("train/learning_rate", "train/loss", "rollout/reward_mean"):
        assert metrics(chosen, name) == metrics(whole, name)
    recorded = RecordedRun(run_dir(chosen))
    temperatures = {step: {group.temperature for group in recorded.read(step).groups} for step in recorded.steps}
    assert temperatures == {step: {1.0 if step < 4 else 0.6} for step in range(1, NUM_STEPS + 1)}
    assert check_history(run_dir(chosen)).violations == []


def test_a_controller_that_is_killed_after_a_change_is_resumed_to_the_same_weights(
    whole: GRPOConfig, tmp_path: Path
) -> None:
    """The newest checkpoint is from before the change, which the resume makes again after the same step."""
    folder = tmp_path / "run"
    request = {"command": "set", "values": CHANGE}
    kill = "{kind: 'killing_sinks:KillController', args: {at_step: 4}}"
    sinks = f"metrics.sinks=[{command_sink(tmp_path, step_2=request)}, {kill}]"
    ended = subprocess.run(
        app_command(folder, *OPTIONS, sinks), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert [(change.step, change.key) for change in read_changes(folder)] == [(3, RATE), (3, TEMPERATURE)]
    resumed = config(folder, *OPTIONS, "checkpointing.resume=must")
    train_here(resumed)
    same(resumed, whole)
    with services_here():
        found = asyncio.run(bisect_run(RecordedRun(folder)))
    assert (found.first, found.steps) == (None, tuple(range(1, NUM_STEPS + 1)))


def test_a_trainer_that_is_killed_after_a_change_trains_each_step_as_it_was(whole: GRPOConfig, tmp_path: Path) -> None:
    """All steps since the initial weights: there is no checkpoint, and the change is in the middle."""
    chosen = config(
        tmp_path / "run", *OPTIONS, "checkpointing.save_interval=null", "checkpointing.save_interval_s=null"
    )
    commands = AtVersions(run_dir(chosen), {2: lambda run: run.set(CHANGE)})

    async def watch(workers: Workers, version: int) -> None:
        await commands(workers, version)
        if version == 5:
            service: Any = workers.trainer.service  # type: ignore[attr-defined]
            os.kill((await service.get_metrics()).replicas[0].pids[0], signal.SIGKILL)

    assert train_watched(chosen, watch).step == NUM_STEPS
    assert commands.answers()[2].from_step == 4
    assert metrics(chosen, "recovery/steps_retrained") == [5], "from the initial weights"
    same(chosen, whole)
