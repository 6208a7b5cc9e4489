"""PPO with a critic, whole: what is learned from, in which order, and what a checkpoint brings back."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.config import GRPOConfig
from forge.errors import CheckpointError
from forge.loops.grpo import GRPOLoop
from forge.loops.planning import plan_run
from forge.loops.rollouts import make_source
from forge.loops.run_paths import run_dir
from forge.loops.workers import start_workers
from forge.trainer.checkpoint_folder import list_checkpoints
from forge.trainer.handles import ServiceTrainer
from grpo_runs import NUM_STEPS, config, episodes, ledger, metrics, train_here, weights_digest
from local_services import services_here

PPO = (
    *("algorithm.preset=ppo", "rollout.group_size=1", "rollout.batch_groups=5", "rollout.iterations=2"),
    *("critic.warmup_steps=1", "critic.training.learning_rate=3e-3", "checkpointing.asynchronous=false"),
)


def critic_digest(chosen: GRPOConfig) -> str:
    """Of the critic's exported weights."""
    folder = run_dir(chosen) / "checkpoints" / "critic" / "hf"
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    """The run that nothing disturbs: groups of one, two optimizer steps on each batch, one step of warm-up."""
    chosen = config(tmp_path_factory.mktemp("ppo") / "whole", *PPO)
    assert train_here(chosen).step == NUM_STEPS
    return chosen


def same(chosen: GRPOConfig, whole: GRPOConfig) -> None:
    """The same policy and the same critic, bit for bit, from the same groups."""
    assert weights_digest(chosen) == weights_digest(whole)
    assert critic_digest(chosen) == critic_digest(whole)
    assert ledger(chosen) == ledger(whole)
    for name in ("critic/loss", "critic/value_mean", "train/loss"):
        assert metrics(chosen, name) == metrics(whole, name)


def test_groups_of_one_are_all_learned_from(whole: GRPOConfig) -> None:
    assert [line.outcome for line in ledger(whole)] == ["trained"] * 5 * NUM_STEPS
    assert set(metrics(whole, "rollout/num_no_signal")) == {0.0}
    rewards = metrics(whole, "rollout/reward_mean")
    assert len(set(rewards)) > 1


def test_advantages_are_the_whitened_estimates_of_the_recorded_values(whole: GRPOConfig) -> None:
    """Computed again from the records: A_t = r + V_(t+1) - V_t + 0.95 A_(t+1), moved and scaled over the batch."""
    for step in range(1, NUM_STEPS + 1):
        raw, recorded, returns = [], [], []
        for episode in (each for each in episodes(whole) if each["step"] == step):
            values = [*episode["values"], 0.0]
            advantage, found = 0.0, []
            for place in reversed(range(len(episode["values"]))):
                reward = episode["reward"] if place == len(episode["values"]) - 1 else 0.0
                advantage = reward + values[place + 1] - values[place] + 0.95 * advantage
                found.append(advantage)
            raw += found[::-1]
            returns += [one + value for one, value in zip(found[::-1], episode["values"], strict=True)]
            recorded += episode["token_advantages"]
        mean = sum(raw) / len(raw)
        deviation = math.sqrt(sum((each - mean) ** 2 for each in raw) / (len(raw) - 1)) + 1e-4
        assert recorded == pytest.approx([(each - mean) / deviation for each in raw], abs=1e-4)
        assert metrics(whole, "critic/return_mean")[step - 1] == pytest.approx(sum(returns) / len(returns), abs=1e-4)


def test_in_the_warm_up_the_critic_learns_alone(whole: GRPOConfig) -> None:
    """So the policy takes two optimizer steps less."""
    assert metrics(whole, "train/grad_norm")[0] == 0.0
    assert min(metrics(whole, "critic/grad_norm")) > 0
    newest = list_checkpoints(run_dir(whole) / "checkpoints")[-1]
    assert newest.step == 2 * NUM_STEPS
    assert newest.extra["step"] == 2 * (NUM_STEPS - 1)
    critic = json.loads((newest.path / "critic" / "checkpoint.json").read_text())
    assert critic["extra"]["step"] == 2 * NUM_STEPS
    assert max(metrics(whole, "critic/clip_fraction")) > 0, "the second step on a batch sees values that have moved"


# ---- Killed between the two saves, and resumed ----------------------------------------------------------------------


class KillingTrainer(ServiceTrainer):
    """Kills this process when the policy is to be saved after step 2: the critic has been saved."""

    async def save(self, *, extra: Mapping[str, Any], metric: float | None = None, **options: Any) -> None:
        if extra["step"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        await super().save(extra=extra, metric=metric, **options)


async def _train_and_die(chosen: GRPOConfig) -> None:
    plan = plan_run(chosen)
    async with forge.run():
        opened = await start_workers(plan.config, plan.trainer, loss=plan.loss, run=plan.run)
        trainer = KillingTrainer(opened.trainer.service)  # type: ignore[attr-defined]
        workers = replace(opened, trainer=trainer)
        await GRPOLoop(plan, workers, make_source(plan, workers)).run()


def test_a_kill_between_the_saves_of_critic_and_policy_loses_neither(whole: GRPOConfig, tmp_path: Path) -> None:
    """The policy's last checkpoint is of the warm-up. The run resumes from it bit for bit, and a second time later."""
    overrides = [*PPO, "checkpointing.save_interval=1"]
    chosen = config(tmp_path / "whole", *overrides)
    code = (
        "import test_ppo, asyncio\nfrom forge.config import GRPOConfig, load\nwith test_ppo.services_here(): "
        f"asyncio.run(test_ppo._train_and_die(load(GRPOConfig, files={[str(tmp_path / 'whole.yaml')]!r}, "
        f"overrides={overrides!r})))"
    )
    here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": here}, timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL

    folder = run_dir(chosen) / "checkpoints"
    assert [info.extra["step"] for info in list_checkpoints(folder / "critic")] == [4], "the critic's is complete"
    assert [info.extra["caller"]["step"] for info in list_checkpoints(folder)] == [1], "the policy's is not there"
    for most in (4, NUM_STEPS):
        resumed = config(tmp_path / "whole", *PPO, "checkpointing.resume=must", f"training.max_steps={most}")
        train_here(resumed)
    same(resumed, whole)
    assert not list_checkpoints(folder / "critic")
    for info in list_checkpoints(folder):
        assert (info.path / "critic" / "checkpoint.json").is_file()


# ---- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["missing", "damaged", "of another step"])
def test_a_checkpoint_without_its_critic_is_refused_before_anything_starts(
    whole: GRPOConfig, tmp_path: Path, wrong: str
) -> None:
    shutil.copytree(run_dir(whole), tmp_path / "whole")
    newest = list_checkpoints(tmp_path / "whole" / "checkpoints")[-1].path / "critic"
    if wrong == "missing":
        shutil.rmtree(newest)
        policy = json.loads((newest.parent / "checkpoint.json").read_text())
        policy["files"].pop("critic/checkpoint.json")
        (newest.parent / "checkpoint.json").write_text(json.dumps(policy))
    elif wrong == "damaged":
        file = newest / ".metadata"
        file.write_bytes(file.read_bytes() + b"x")
    else:
        (newest / "checkpoint.json").write_text(
            (newest / "checkpoint.json").read_text().replace('"step": 6', '"step": 5')
        )
    chosen = config(tmp_path / "whole", *PPO, "checkpointing.resume=must", "training.max_steps=9")
    with pytest.raises(CheckpointError) as caught:
        plan_run(chosen)
    assert str(newest.parent) in str(caught.value.path)
    assert caught.value.repair


# ---- Episodes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["tokens", "turns"])
@pytest.mark.parametrize("kind", ["dialogue", "branching"])
def test_episodes_of_several_turns_and_branches(tmp_path: Path, kind: str, over: str) -> None:
    """With a staleness of 1. Over turns, all tokens of a turn have one advantage, and the critic learns once a turn."""
    chosen = config(
        tmp_path / "episodes",
        *("rewards.functions=[]", f"episode.kind=own_episodes:{kind}", "algorithm.preset=ppo", "rollout.staleness=1"),
        *(f"algorithm.advantage.args={{over: {over}}}", "rollout.group_size=1", "training.max_steps=2"),
        "checkpointing.export_hf=false",
    )
    with services_here():
        asyncio.run(asyncio.wait_for(forge.loops.grpo.run_grpo(chosen), 600))
    seen = list(episodes(chosen))
    assert len(seen) == 4
    for episode in seen:
        assert len(episode["turns"]) == 3
        assert len(episode["values"]) == len(episode["token_ids"])
        for turn in episode["turns"]:
            own = episode["token_advantages"][turn["start"] : turn["end"]]
            assert len(set(own)) == (1 if over == "turns" else len(own))
    assert metrics(chosen, "rollout/staleness_max")[0] == 0
