"""The page's explanation of a run that was really trained agrees with what its trainer measured, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from forge.ui.live_run import LiveRun
from forge.ui.rollouts.query import Filters, SampleName
from forge.ui.rollouts.view import Window
from grpo_runs import config, train_here

LOSS = ("algorithm.loss.clip_low=0.02", "algorithm.loss.clip_high=0.02", "algorithm.advantage.scale=none")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    folder = tmp_path_factory.mktemp("runs") / "trained"
    train_here(config(folder, *LOSS, "rollout.staleness=1", "training.learning_rate=1e-2", "training.max_steps=5"))
    found = LiveRun(folder)
    while found.advance():
        pass
    return found


def samples_of(run: LiveRun, step: int) -> list[dict[str, Any]]:
    """What the page is told about every sample of a step."""
    listed = run.rollouts.find(Filters.of({"step": str(step), "outcome": "trained"}), "oldest", Window(limit=200))
    names = [SampleName.of(row["name"], parameter="name") for row in listed["rows"]]
    found = [run.rollouts.sample(name, limit=8192, metric=run.metric_at) for name in names]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_ratios_clipping_and_weights_are_those_of_the_trainer(run: LiveRun, step: int) -> None:
    samples = samples_of(run, step)
    tokens = [sample["gradient"]["tokens"] for sample in samples]
    assert len(samples) == 6
    assert all(sample["gradient"]["unknown"] == "" for sample in samples)
    ratios = [ratio for each in tokens for ratio in each["ratio"] if ratio is not None]
    bounds = [bound for each in tokens for bound in each["bound"] if bound is not None]
    num_tokens = run.metric_at("train/num_loss_tokens", step)
    assert len(ratios) == num_tokens
    (weight,) = {weight for each in tokens for weight in each["weight"]}
    assert weight == pytest.approx(1 / len(ratios), rel=1e-5)
    measured = {name: run.metric_at(f"train/{name}", step) for name in ("ratio", "ratio_max", "clip_low", "clip_high")}
    assert sum(ratios) / len(ratios) == pytest.approx(measured["ratio"], rel=1e-4)
    assert max(ratios) == pytest.approx(measured["ratio_max"], rel=1e-4)
    for name in ("low", "high"):
        assert bounds.count(name) / len(bounds) == pytest.approx(measured[f"clip_{name}"], abs=1e-6)
    for sample in samples:
        told = sample["advantageFrom"]
        assert told["value"] == pytest.approx(sample["item"]["advantage"], abs=1e-5)


def test_the_bounds_acted_in_some_step(run: LiveRun) -> None:
    assert any(run.metric_at("train/clip_high", step) or run.metric_at("train/clip_low", step) for step in range(1, 6))
