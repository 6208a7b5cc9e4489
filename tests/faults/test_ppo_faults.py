"""PPO whose critic is killed: it is restored from its part of the newest checkpoint, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from forge.loops.run_paths import run_dir
from forge.loops.workers import Workers
from grpo_runs import config, ledger, metrics, train_here, train_watched, weights_digest

PPO = (
    *("algorithm.preset=ppo", "rollout.group_size=1", "rollout.batch_groups=4", "training.max_steps=4"),
    "checkpointing.asynchronous=false",
)


def test_a_critic_that_is_killed_is_restored(tmp_path: Path) -> None:
    async def kill_critic(workers: Workers, version: int) -> None:
        if version == 3:
            service: Any = workers.critic.service  # type: ignore[union-attr]
            os.kill((await service.get_metrics()).replicas[0].pids[0], signal.SIGKILL)

    whole = config(tmp_path / "a" / "run", *PPO)
    train_here(whole)
    killed = config(tmp_path / "b" / "run", *PPO)
    train_watched(killed, kill_critic)
    assert weights_digest(killed) == weights_digest(whole)
    assert ledger(killed) == ledger(whole)
    assert metrics(killed, "recovery/steps_retrained") == [1], "of the critic, whose last checkpoint is of step 2"
    critics = [run_dir(chosen) / "checkpoints" / "critic" / "hf" / "model.safetensors" for chosen in (killed, whole)]
    assert critics[0].read_bytes() == critics[1].read_bytes()
