"""Episodes whose worker or controller is killed between two turns: nothing is lost, trained twice or different."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from forge.config import GRPOConfig
from forge.loops.planning import plan_run
from grpo_runs import config, episodes, ledger, metrics, run_app, train_here, weights_digest

AT_ONCE = "checkpointing.asynchronous=false"
GROUP = 5
"""Of the third step, whose weights are those of the checkpoint of step 2."""


def overrides(marker: Path, victim: str, task_id: str) -> tuple[str, ...]:
    checkpoint = marker.parent / "whole" / "checkpoints" / "step-00000002" / "checkpoint.json"
    args = f"{{marker: {marker}, victim: {victim}, task_id: '{task_id}', checkpoint: {checkpoint}}}"
    rollout = ("rollout.no_signal=keep", "training.max_seq_len=128", "training.max_steps=4")
    return ("rewards.functions=[]", "episode.kind=own_episodes:killing", f"episode.args={args}", AT_ONCE, *rollout)


@pytest.fixture(scope="module")
def task_id(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The task of one group."""
    chosen = config(tmp_path_factory.mktemp("order") / "whole", *overrides(Path("none"), "nobody", "none"))
    return plan_run(chosen).prompts.at(GROUP)[1].id


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, task_id: str) -> GRPOConfig:
    """The run that nothing disturbs."""
    chosen = config(tmp_path_factory.mktemp("episodes") / "whole", *overrides(Path("none"), "nobody", "none"))
    train_here(chosen)
    return chosen


def same(chosen: GRPOConfig, whole: GRPOConfig) -> None:
    """The same weights, bit for bit, from the same groups."""
    assert weights_digest(chosen) == weights_digest(whole)
    assert ledger(chosen) == ledger(whole)
    assert metrics(chosen, "rollout/reward_mean") == metrics(whole, "rollout/reward_mean")


def replayed(chosen: GRPOConfig) -> dict[int, float]:
    """For each group of which a part came from journals: how many entries."""
    found: dict[int, float] = {}
    for episode in episodes(chosen):
        found[episode["group"]] = found.get(episode["group"], 0.0) + episode["stats"]["num_replayed"]
    return {group: count for group, count in found.items() if count}


def test_a_worker_that_is_killed_in_an_episode_needs_no_resume(whole: GRPOConfig, task_id: str, tmp_path: Path) -> None:
    chosen = config(tmp_path / "whole", *overrides(tmp_path / "marker", "worker", task_id))
    code, told = run_app(tmp_path / "whole", *overrides(tmp_path / "marker", "worker", task_id))
    assert code == 0, told
    assert (tmp_path / "marker").exists()
    same(chosen, whole)
    found = set(replayed(chosen))
    assert GROUP in found  # what its journal had was not sampled again
    assert found <= {GROUP - 1, GROUP}  # the other group of the step may have been under way in the same worker
    assert sum(metrics(chosen, "episode/faults/worker")) >= 1


def test_a_controller_that_is_killed_in_an_episode_is_taken_up(whole: GRPOConfig, task_id: str, tmp_path: Path) -> None:
    chosen = config(tmp_path / "whole", *overrides(tmp_path / "marker", "controller", task_id))
    code, told = run_app(tmp_path / "whole", *overrides(tmp_path / "marker", "controller", task_id))
    assert code == -signal.SIGKILL, told
    again = (*overrides(tmp_path / "marker", "controller", task_id), "checkpointing.resume=must")
    code, told = run_app(tmp_path / "whole", *again)
    assert (code, "resuming after step 2" in told) == (0, True), told
    same(chosen, whole)
    assert GROUP in replayed(chosen)
