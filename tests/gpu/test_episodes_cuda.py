"""Reinforcement learning on episodes of several turns with a tool, on one GPU: tokens, the cache of turns, learning."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from forge.config import GRPOConfig
from forge.loops.grpo import run_grpo
from grpo_runs import LIMIT_S, config, episodes, metrics
from tool_episodes import NUM_TURNS, looking, teach

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here"),
]

NUM_STEPS = 16
MISMATCH = {"mean": 0.02, "max": 0.25}
"""Of a token's logprob between sampler and trainer in bfloat16 on the same weights, at this size."""
SETTINGS = (
    *("rewards.functions=[]", "rollout.batch_groups=8", "rollout.group_size=8", "rollout.no_signal=keep"),
    *("generator.sampling.max_tokens=48", "training.max_seq_len=256", "training.learning_rate=3e-4"),
    "training.max_grad_norm=0.1",
    *(f"training.max_steps={NUM_STEPS}", "checkpointing.save_interval=null", "model.head_precision=float32"),
)


def run(folder: Path, model: Path, *overrides: str, with_gpus: bool = True) -> GRPOConfig:
    precision = "bfloat16" if with_gpus else "float32"
    devices = tuple(f"{section}.with_gpus={str(with_gpus).lower()}" for section in ("distributed", "generator"))
    settings = (*SETTINGS, *devices, f"distributed.precision={precision}", f"model.path={model}", "model.preset=null")
    chosen = config(folder, *settings, *overrides)
    result = asyncio.run(asyncio.wait_for(run_grpo(chosen, episode=looking), LIMIT_S))
    assert result.step == NUM_STEPS
    return chosen


def check(chosen: GRPOConfig, *, is_synchronous: bool) -> None:
    seen = list(episodes(chosen))
    assert len(seen) == NUM_STEPS * 8 * 8
    whole = [episode for episode in seen if len(episode["turns"]) == NUM_TURNS]
    assert len(whole) > 0.8 * len(seen), "the model calls its tool"
    for episode in whole:
        later = episode["turns"][1:]
        assert [turn["parent"] for turn in episode["turns"]] == [None, 0, 1]
        assert [turn["prefix_break"] for turn in later] == [None, None]
        if is_synchronous:  # new weights between two turns make the keys of the first one useless
            assert 0 < later[0]["num_cached"] < later[1]["num_cached"], "the keys of earlier turns are used again"
            assert {version for version, _, _ in episode["versions"]} == {episode["step"] - 1}
    reused = [turn["num_cached"] > 0 for episode in whole for turn in episode["turns"][1:]]
    assert sum(reused) > 0.5 * len(reused)
    calls = metrics(chosen, "episode/num_tool_calls")
    assert sum(calls) / len(calls) > 0.8
    assert max(metrics(chosen, "episode/num_faults")) == 0
    mismatch, largest = metrics(chosen, "train/mismatch"), metrics(chosen, "train/mismatch_max")
    if is_synchronous:
        assert len(mismatch) == NUM_STEPS
        assert max(mismatch) < MISMATCH["mean"], mismatch
        assert max(largest) < MISMATCH["max"], largest
    assert min(metrics(chosen, "train/grad_norm")) > 0
    rewards = metrics(chosen, "rollout/reward_mean")
    assert len(rewards) == NUM_STEPS
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teach(tmp_path_factory.mktemp("taught"), with_gpus=True)


def test_one_process_learns_from_episodes_with_a_tool(tmp_path: Path, taught: Path) -> None:
    check(run(tmp_path / "shared", taught, "placement=shared"), is_synchronous=True)


def test_trainer_and_generator_beside_each_other_learn_from_episodes(tmp_path: Path, taught: Path) -> None:
    chosen = run(tmp_path / "beside", taught, "placement=beside", "rollout.staleness=1")
    check(chosen, is_synchronous=False)
    assert max(metrics(chosen, "rollout/staleness_max")) == 1.0
