"""Runs in which a fixed version of the policy answers for an agent: what it says, what is kept, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge.config import GRPOConfig
from forge.errors import CheckpointError, ConfigError
from forge.loops.bound_versions import versions_dir
from forge.loops.run_paths import run_dir
from forge.models.locate import resolve
from forge.store.version_file import version_path
from forge.trainer.checkpoint_folder import list_checkpoints
from grpo_runs import NUM_STEPS, config, episodes, metrics, train_here, weights_digest

PENNIES = ("rewards.functions=[]", "episode.kind=own_games:pennies", "episode.args={num_rounds: 1}")
VERSION_0 = "episode.agents={column: {version: 0}}"


def said(chosen: GRPOConfig, name: str = "column") -> list[tuple[Any, ...]]:
    return [
        (each["group"], each["index"], turn["text"])
        for each in episodes(chosen)
        for turn in each["turns"]
        if turn["agent"] == name
    ]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    """A run against its own initial weights."""
    chosen = config(tmp_path_factory.mktemp("versions") / "whole", *PENNIES, VERSION_0, "checkpointing.export_hf=true")
    assert train_here(chosen).step == NUM_STEPS
    return chosen


def test_the_version_answers_and_the_record_says_so(played: GRPOConfig) -> None:
    for episode in episodes(played):
        column = episode["agents"]["column"]
        assert (column["policy"], column["advantage"]) == ("version 0", None)
        assert episode["agents"]["row"]["policy"] == "live"
        (turn,) = [turn for turn in episode["turns"] if turn["agent"] == "column"]
        assert (turn["start"], turn["is_trained"]) == (turn["end"], False)
        assert {version for version, _, _ in episode["versions"]} == {episode["step"] - 1}  # of the live agent alone
        assert episode["logprobs"] == episode["trainer_logprobs"]
    assert set(metrics(played, "train/mismatch_max")) == {0.0}
    assert [path.name for path in versions_dir(played).iterdir()] == ["version-00000000.safetensors"]


def test_it_says_what_the_initial_model_says(played: GRPOConfig, tmp_path: Path) -> None:
    """The same weights as a model's folder, with generators of its own, give the same texts at every step."""
    source = resolve(played.model).folder
    other = config(tmp_path / "model", *PENNIES, f"episode.agents={{column: {{model: '{source}'}}}}")
    train_here(other)
    assert said(other) == said(played)
    assert said(other, "row") == said(played, "row")


def test_a_resumed_run_has_the_same_version(played: GRPOConfig, tmp_path: Path) -> None:
    options = (*PENNIES, VERSION_0, "checkpointing.export_hf=true")
    first = config(tmp_path / "parts", *options, "training.max_steps=3", "checkpointing.save_interval=1")
    train_here(first)
    second = config(tmp_path / "parts", *options, "checkpointing.resume=must")
    assert train_here(second).step == NUM_STEPS
    assert weights_digest(second) == weights_digest(played)
    assert said(second) == said(played)

    step = list_checkpoints(run_dir(second) / "checkpoints")[-1].step
    for number in (2, step + 1):
        agents = f"episode.agents={{column: {{version: {number}}}}}"
        other = config(tmp_path / "parts", *PENNIES, agents, "checkpointing.resume=must")
        with pytest.raises(ConfigError, match="no such version when the run starts") as caught:
            train_here(other)
        assert f"{step}, the weights it resumes with, or one that the run has kept: [0]" in str(caught.value)

    file = version_path(versions_dir(second), 0)
    data = file.read_bytes()
    file.write_bytes(data[:-8] + bytes(8))
    longer = config(tmp_path / "parts", *options, "checkpointing.resume=must", "training.max_steps=50")
    with pytest.raises(CheckpointError, match="is damaged") as damaged:
        train_here(longer)
    assert str(file) in str(damaged.value)


def test_the_trainer_itself_serves_it(played: GRPOConfig, tmp_path: Path) -> None:
    """In placement `shared`, where weights are not published otherwise."""
    options = ("placement=shared", "rollout.staleness=0", "checkpointing.export_hf=true")
    shared = config(tmp_path / "shared", *PENNIES, VERSION_0, *options)
    train_here(shared)
    assert weights_digest(shared) == weights_digest(played)
    assert said(shared) == said(played)


def test_generators_of_its_own_where_an_engine_serves_one_version(played: GRPOConfig, tmp_path: Path) -> None:
    engine = "generator.engine=own_engines:OneVersion"
    chosen = config(tmp_path / "own", *PENNIES, VERSION_0, engine, "training.max_steps=3")
    train_here(chosen)
    seen = said(chosen)
    assert seen == said(played)[: len(seen)]
    assert {each["agents"]["column"]["policy"] for each in episodes(chosen)} == {"version 0"}


def test_a_version_that_is_not_there_yet_is_refused(tmp_path: Path) -> None:
    chosen = config(tmp_path / "refused", *PENNIES, "episode.agents={column: {version: 3}}")
    with pytest.raises(ConfigError, match=r"episode.agents.column.version[\s\S]*0, the initial weights") as caught:
        train_here(chosen)
    assert "checkpoint" in str(caught.value.repair)
