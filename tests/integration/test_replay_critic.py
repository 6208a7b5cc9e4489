"""`forge replay` on a run of PPO: the critic is trained again beside the policy, bit for bit."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forge.config import GRPOConfig
from forge.loops.replay.bisecting import bisect_run
from forge.loops.replay.recorded import RecordedRun
from forge.loops.replay.steps import replay_step
from forge.loops.run_paths import run_dir
from forge.rollout.step_log import step_path
from forge.rollout.step_record import pack, unpack
from grpo_runs import NUM_STEPS, config, metrics, train_here
from local_services import services_here


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    """An asynchronous run with a warm-up and two steps on each batch, which was resumed once."""
    options = (
        *("algorithm.preset=ppo", "rollout.group_size=1", "rollout.batch_groups=5", "rollout.iterations=2"),
        *("rollout.staleness=1", "critic.warmup_steps=1", "critic.training.learning_rate=3e-3"),
        *("checkpointing.keep=8", "checkpointing.save_interval=3", "checkpointing.asynchronous=false"),
    )
    folder = tmp_path_factory.mktemp("ppo") / "late"
    train_here(config(folder, *options, "training.max_steps=3"))
    chosen = config(folder, *options, "checkpointing.resume=must")
    assert train_here(chosen).step == NUM_STEPS
    return chosen


@pytest.fixture
def copied(ppo: GRPOConfig, tmp_path: Path) -> Path:
    """A copy of the run to change something in."""
    return Path(shutil.copytree(run_dir(ppo), tmp_path / "run"))


def change_critic(folder: Path, step: int, **fields: Any) -> None:
    """Change what is recorded of the critic in a step."""
    path = step_path(folder / "replay", step)
    head, columns = unpack(path.read_bytes(), path=path)
    head["critic"] |= fields
    path.write_bytes(pack(head, columns))


def test_policy_and_critic_are_reproduced_bit_for_bit(ppo: GRPOConfig) -> None:
    recorded = RecordedRun(run_dir(ppo))
    with services_here():
        found = asyncio.run(bisect_run(recorded))
    assert (found.first, found.tolerance) == (None, 0.0)
    assert found.steps == tuple(range(1, NUM_STEPS + 1)), "the warm-up among them"
    losses = [recorded.read(step).critic.outcome["critic/loss"] for step in recorded.steps]  # type: ignore[union-attr]
    assert losses == metrics(ppo, "critic/loss")


def test_what_the_critic_does_not_give_again_is_named(copied: Path) -> None:
    outcome = RecordedRun(copied).read(5).critic
    assert outcome is not None
    change_critic(copied, 5, outcome={**outcome.outcome, "critic/grad_norm": 0.5})
    with services_here():
        _, found = asyncio.run(replay_step(RecordedRun(copied), 5))
    (difference,) = found[-1].differences
    assert (found[-1].step, difference.component, difference.quantity, difference.recorded) == (
        *(5, "critic"),
        *("grad_norm", 0.5),
    )
    change_critic(copied, 4, values="0" * 32)
    with services_here():
        _, found = asyncio.run(replay_step(RecordedRun(copied), 5))
    (difference,) = found[-1].differences
    assert (found[-1].step, difference.component, found[-1].weights) == (4, "values", None), "it was not trained"


def test_a_changed_rate_of_the_critic_is_replayed(copied: Path) -> None:
    """A rate that was changed while the run ran is part of the record: with another the critic's step differs."""
    change_critic(copied, 4, learning_rate=1e-2)
    with services_here():
        _, found = asyncio.run(replay_step(RecordedRun(copied), 4))
    assert (found[-1].step, found[-1].component) == (4, "critic")


def test_on_other_hardware_the_recorded_advantages_are_learned_from(copied: Path) -> None:
    for path in (copied / "replay").glob("session_*.json"):
        session = json.loads(path.read_text())
        session["hardware"]["cpu"] = "another"
        path.write_text(json.dumps(session))
    change_critic(copied, 5, values="0" * 32)  # a digest says nothing where the last bits may differ
    with services_here():
        _, found = asyncio.run(replay_step(RecordedRun(copied), 5))
    assert (found[-1].step, found[-1].is_same, found[-1].tolerance) == (5, True, 1e-3)
