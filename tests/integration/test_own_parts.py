"""A run that is extended at every point, without a program of its own and from Python."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import own_parts
from forge.loops.grpo import run_grpo
from forge.loops.run_paths import run_dir
from grpo_runs import LIMIT_S, config, metrics, train


@pytest.fixture(autouse=True)
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "marks"
    folder.mkdir()
    monkeypatch.setenv(own_parts.FOLDER, str(folder))
    return folder


def test_every_part_of_a_run_can_be_named_in_its_configuration(tmp_path: Path, marks: Path) -> None:
    chosen = config(
        tmp_path / "own",
        *("training.max_steps=2", "checkpointing.export_hf=false", "algorithm.loss.kind=own_parts:surrogate"),
        *("algorithm.advantage.function=own_parts:ranked", "algorithm.advantage.args={spread: 2.0}"),
        "prompts.sources=[{task: 'own_parts:Doubling', task_args: {top: 50}, num_prompts: 40}]",
        "rewards.functions=[{kind: 'own_parts:even'}]",
        "generator.engine=own_parts:OwnEngine",
        "metrics.sinks=[{kind: 'own_parts:FileSink', args: {file: names.txt}}]",
    )
    assert train(chosen).step == 2
    assert {mark.name for mark in marks.iterdir()} == {"surrogate", "advantage", "task", "reward", "engine", "sink"}
    assert "train/loss" in (run_dir(chosen) / "names.txt").read_text()


def test_a_loss_and_advantages_can_be_given_from_python(tmp_path: Path, marks: Path) -> None:
    chosen = config(
        tmp_path / "python", "training.max_steps=2", "generator.sampling.temperature=0.7", "placement=shared"
    )
    loss = own_parts.OnlyBetter(factor=2.0, temperature=0.7)
    result = asyncio.run(asyncio.wait_for(run_grpo(chosen, loss=loss, advantage=own_parts.ranked), LIMIT_S))
    assert result.step == 2
    assert {"loss", "advantage"} <= {mark.name for mark in marks.iterdir()}
    assert len(metrics(chosen, "train/entropy")) == 2
