"""Reinforcement learning on one GPU: every placement learns, with either engine, and goes on from its checkpoint.

The tiny model learns to give even answers; what is looked at is that the reward rises, that every step generates with
the weights that it is said to, and that sampler and trainer agree as far as bfloat16 lets them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from forge.config import GRPOConfig
from grpo_runs import config, episodes, metrics, train

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here"),
]

HALF = ("distributed.precision=bfloat16", "model.head_precision=float32")
NUM_STEPS = 30
LEARNING = (
    *("rollout.batch_groups=8", "rollout.group_size=8"),
    *(f"training.max_steps={NUM_STEPS}", f"checkpointing.save_interval={NUM_STEPS}"),
)
MISMATCH = {"mean": 0.02, "max": 0.25}
"""Of a token's logprob between sampler and trainer in bfloat16 on the same weights, at this size."""


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def run(folder: Path, *overrides: str) -> GRPOConfig:
    chosen = config(folder, *HALF, *overrides)
    train(chosen)
    return chosen


def check_learning(chosen: GRPOConfig) -> None:
    rewards = metrics(chosen, "rollout/reward_mean")
    assert len(rewards) == NUM_STEPS
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards


def check_agreement(chosen: GRPOConfig, *, num_steps: int) -> None:
    """Where training is synchronous, what sampler and trainer differ by is arithmetic alone."""
    assert len(metrics(chosen, "train/mismatch")) == num_steps
    assert max(metrics(chosen, "train/mismatch")) < MISMATCH["mean"]
    assert max(metrics(chosen, "train/mismatch_max")) < MISMATCH["max"]
    assert max(metrics(chosen, "train/mismatch")) > 0, "the sampler was asked"
    for episode in episodes(chosen):
        assert episode["versions"] == [[episode["step"] - 1, 0, len(episode["token_ids"])]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    return run(tmp_path_factory.mktemp("grpo") / "shared", "placement=shared", *LEARNING)


def test_one_process_learns(shared: GRPOConfig) -> None:
    check_learning(shared)
    check_agreement(shared, num_steps=NUM_STEPS)


def test_a_run_goes_on_from_its_checkpoint(shared: GRPOConfig) -> None:
    before = metrics(shared, "rollout/reward_mean")
    folder = shared.run.output_dir / shared.run.name
    chosen = run(
        folder, "placement=shared", *LEARNING, f"training.max_steps={NUM_STEPS + 2}", "checkpointing.resume=must"
    )
    after = metrics(chosen, "rollout/reward_mean")
    assert after[:NUM_STEPS] == before, "what was learned is not learned again"
    assert len(after) == NUM_STEPS + 2
    assert sum(after[-2:]) / 2 > sum(before[:5]) / 5 + 0.1, "it did not start anew"


def test_one_copy_of_the_weights_serves_both_in_one_precision(tmp_path: Path) -> None:
    whole = ("distributed.precision=float32", "generator.precision=float32")
    chosen = run(tmp_path / "one", "placement=shared", *whole, "training.max_steps=2")
    check_agreement(chosen, num_steps=2)
    assert max(metrics(chosen, "train/mismatch_max")) < 2e-3


def test_taking_turns_learns(tmp_path: Path) -> None:
    chosen = run(tmp_path / "turns", "placement=turns", *LEARNING)
    check_learning(chosen)
    check_agreement(chosen, num_steps=NUM_STEPS)
    assert max(metrics(chosen, "sync/canary")) < 0.1


def test_beside_each_other_they_learn_asynchronously(tmp_path: Path) -> None:
    chosen = run(tmp_path / "beside", "placement=beside", "rollout.staleness=1", *LEARNING)
    check_learning(chosen)
    assert metrics(chosen, "rollout/staleness_max")[1] == 1.0
    assert max(metrics(chosen, "rollout/staleness_max")) == 1.0
    assert max(metrics(chosen, "sync/canary")) < 0.1


@pytest.mark.skipif(not has_vllm(), reason="vLLM is not installed")
@pytest.mark.parametrize("placement", ["turns", "beside"])
def test_vllm_on_the_trainers_gpu(tmp_path: Path, placement: str) -> None:
    """Few steps: starting vLLM takes longer than all of them. Steps are not compiled, which halves the start."""
    engine = ("generator.engine=vllm", "generator.cuda_graphs=false", "generator.gpu_memory_share=0.2")
    chosen = run(tmp_path / placement, f"placement={placement}", *engine, "training.max_steps=3")
    check_agreement(chosen, num_steps=3)
    assert max(metrics(chosen, "sync/canary")) < 0.1
