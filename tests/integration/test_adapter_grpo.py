"""Reinforcement learning of a LoRA adapter: the loop, the generators and the store see the adapter alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapter_folders import make_adapter
from forge.config import AdapterConfig, GRPOConfig, ModelConfig, TrainerConfig
from forge.config.problems import InvalidConfig
from forge.errors import CheckpointError, ConfigError
from forge.loops.planning import plan_run
from forge.loops.run_paths import run_dir
from forge.loops.workers import Workers
from forge.models.adapter_names import AdapterSpec, adapter_map, num_adapter_parameters
from forge.models.locate import resolve
from forge.models.peft_files import read_spec
from forge.models.sizes import num_parameters
from forge.models.tiny import make_tiny
from forge.store import Weights
from forge.trainer.checkpoint_folder import list_checkpoints
from forge.trainer.checkpointer import Checkpointer
from forge.trainer.engine import Engine
from grpo_runs import config, episodes, metrics, train_here, train_watched, weights_digest
from local_services import services_here

STEPS = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_tiny(folder)
    return folder


def adapted(folder: Path, base: Path, *overrides: str) -> GRPOConfig:
    rates = ("training.learning_rate=1e-2", f"training.max_steps={STEPS}")
    adapter = ("adapter.rank=4", "adapter.alpha=8", f"model.path={base}")
    return config(folder, "model.preset=null", *adapter, *rates, *overrides)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, base: Path) -> tuple[GRPOConfig, list[Any], list[Any]]:
    """A run in which trainer and generators have weights of their own; what was published; the reference services."""
    chosen = adapted(tmp_path_factory.mktemp("runs") / "apart", base, "algorithm.kl.coefficient=0.1", "store.keep=4")
    versions: list[Any] = []
    references: list[Any] = []

    async def watch(workers: Workers, version: int) -> None:
        versions[:] = await Weights("policy").versions()
        references.append(workers.reference)

    with services_here():
        train_watched(chosen, watch)
    return chosen, versions, references


def test_sampler_and_trainer_agree_to_the_last_bit(apart: tuple[GRPOConfig, list[Any], list[Any]]) -> None:
    chosen, _, _ = apart
    seen = list(episodes(chosen))
    assert len(seen) == STEPS * 2 * 3
    for episode in seen:
        assert episode["logprobs"] == episode["trainer_logprobs"], episode["group"]
        assert episode["versions"] == [[episode["step"] - 1, 0, len(episode["token_ids"])]]
    assert set(metrics(chosen, "sync/canary")) == {0.0}


def test_the_trainer_without_its_adapter_is_the_reference(apart: tuple[GRPOConfig, list[Any], list[Any]]) -> None:
    chosen, _, references = apart
    assert set(references) == {None}, "no process of a reference model"
    divergence = metrics(chosen, "train/kl")
    assert divergence[0] == pytest.approx(0.0, abs=1e-7)
    assert divergence[-1] > 0


def test_versions_hold_the_adapter_alone(apart: tuple[GRPOConfig, list[Any], list[Any]]) -> None:
    chosen, versions, _ = apart
    newest = list_checkpoints(run_dir(chosen) / "checkpoints")[-1]
    said = newest.extra["adapter"]
    spec = AdapterSpec(said["rank"], said["alpha"], tuple(said["targets"]))
    facts = plan_facts(chosen)
    size = 4 * num_adapter_parameters(adapter_map(facts, spec))
    assert all(size <= version.num_bytes < size + 8192 for version in versions), "and what aligns them in memory"
    assert size < num_parameters(facts) * 4 / 5
    assert len({version.digest for version in versions}) == len(versions) > 1


def test_a_run_leaves_the_adapter_and_the_merged_model(apart: tuple[GRPOConfig, list[Any], list[Any]]) -> None:
    places = run_dir(apart[0]) / "checkpoints"
    assert read_spec(places / "adapter").rank == 4
    assert (places / "hf" / "config.json").is_file()


def test_a_checkpoint_of_an_adapter_is_exported_whole(
    apart: tuple[GRPOConfig, list[Any], list[Any]], tmp_path: Path
) -> None:
    """As evaluations and agents of an older policy do: base and adapter, merged to the bits that the run exported."""
    info = list_checkpoints(run_dir(apart[0]) / "checkpoints")[-1]
    settings = TrainerConfig(
        model=apart[0].model,
        adapter=AdapterConfig.of_checkpoint(info.extra),
        checkpoint_dir=tmp_path / "unused",
        frozen=True,
    )
    engine = Engine(settings)
    try:
        checkpointer = Checkpointer(engine)
        checkpointer.load(str(info.path))
        checkpointer.export(tmp_path / "merged")
        checkpointer.close()
    finally:
        engine.close()
    found = (tmp_path / "merged" / "model.safetensors").read_bytes()
    assert found == (run_dir(apart[0]) / "checkpoints" / "hf" / "model.safetensors").read_bytes()


def plan_facts(chosen: GRPOConfig) -> Any:
    from forge.models.locate import resolve

    return resolve(chosen.model).architecture


@pytest.mark.parametrize(
    "options",
    [
        ("placement=shared",),
        ("placement=turns",),
        ("generator.num_replicas=2",),
    ],
    ids=["shared", "turns", "two generators"],
)
def test_every_placement_learns_the_same(
    options: tuple[str, ...], apart: tuple[GRPOConfig, list[Any], list[Any]], base: Path, tmp_path: Path
) -> None:
    chosen = adapted(tmp_path / "other", base, "algorithm.kl.coefficient=0.1", *options)
    train_here(chosen)
    assert weights_digest(chosen) == weights_digest(apart[0])


def test_one_process_shares_the_base_and_copies_the_adapter(base: Path, tmp_path: Path) -> None:
    chosen = adapted(
        tmp_path / "mixed",
        base,
        *("placement=shared", "distributed.precision=bfloat16", "generator.precision=bfloat16"),
        "model.head_precision=float32",
    )
    train_here(chosen)
    assert max(metrics(chosen, "train/mismatch_max")) < 0.05


def test_a_stopped_run_resumes_with_the_adapter_it_had(
    apart: tuple[GRPOConfig, list[Any], list[Any]], base: Path, tmp_path: Path
) -> None:
    options = ("algorithm.kl.coefficient=0.1", "checkpointing.save_interval=1")
    train_here(adapted(tmp_path / "run", base, *options, "training.max_steps=2"))
    again = adapted(tmp_path / "run", base, *options, "checkpointing.resume=must")
    train_here(again)
    assert weights_digest(again) == weights_digest(apart[0])


@pytest.mark.parametrize(
    ("changes", "says"), [(("adapter=null",), "this run trains full weights"), (("adapter.rank=2",), "another rank")]
)
def test_a_checkpoint_of_another_adapter_is_refused_before_anything_starts(
    changes: tuple[str, ...], says: str, apart: tuple[GRPOConfig, list[Any], list[Any]], base: Path
) -> None:
    again = adapted(run_dir(apart[0]), base, "checkpointing.resume=must", *changes)
    with pytest.raises(CheckpointError, match=says):
        plan_run(again)


def test_the_divergence_in_the_reward_needs_no_reference_process_either(base: Path, tmp_path: Path) -> None:
    kl = ("algorithm.kl.coefficient=0.1", "algorithm.kl.place=reward")
    chosen = adapted(tmp_path / "reward", base, *kl, "training.max_steps=2")
    train_here(chosen)
    for episode in episodes(chosen):
        assert len(episode["ref_logprobs"]) == len(episode["token_ids"])
        if episode["step"] == 1:
            assert episode["ref_logprobs"] == pytest.approx(episode["logprobs"], abs=1e-6)


PENNIES = ("rewards.functions=[]", "episode.kind=own_games:pennies", "episode.args={num_rounds: 1}")


def test_agents_of_an_episode_are_other_adapters_of_the_same_generators(base: Path, tmp_path: Path) -> None:
    """`base` says what the folder of the base says, by generators of its own; an adapter says something else."""
    other = make_adapter(tmp_path / "other", resolve(ModelConfig(path=str(base))).architecture, seed=5, alpha=64.0)
    named = f"generator.adapters={{other: {other}}}"
    said = {}
    for label, agent in (("base", "adapter: base"), ("other", "adapter: other"), ("model", f"model: '{base}'")):
        options = (*PENNIES, named, f"episode.agents={{column: {{{agent}}}}}", "training.max_steps=2")
        chosen = adapted(tmp_path / label, base, *options)
        train_here(chosen)
        seen = list(episodes(chosen))
        assert {each["agents"]["column"]["policy"] for each in seen} == {agent.replace(":", "").replace("'", "")}
        assert all(each["logprobs"] == each["trainer_logprobs"] for each in seen)
        turns = [turn for each in seen for turn in each["turns"] if turn["agent"] == "column"]
        assert not any(turn["is_trained"] for turn in turns)
        said[label] = [turn["text"] for turn in turns]
    assert said["base"] == said["model"]
    assert said["base"] != said["other"]


def test_an_agent_needs_an_adapter_that_is_there_and_stays(base: Path, tmp_path: Path) -> None:
    agents = (*PENNIES, "episode.agents={column: {adapter: mine}}")
    with pytest.raises(ConfigError) as caught:
        train_here(adapted(tmp_path / "refused", base, *agents))
    assert (caught.value.path, caught.value.value) == ("episode.agents.column.adapter", "mine")
    assert "one of base" in str(caught.value.rule)
    named = f"generator.adapters={{mine: {tmp_path}}}"
    with pytest.raises(ConfigError, match="trains the weights below the adapter") as caught:
        train_here(config(tmp_path / "refused", *agents, named))
    assert (caught.value.path, caught.value.value) == ("episode.agents.column.adapter", "mine")


@pytest.mark.parametrize(
    ("options", "path"),
    [
        (("model.path=null", "model.preset=tiny"), "model.path"),
        (("generator.engine=own_engines:WholeVersions",), "generator.engine"),
        (("placement=turns", "algorithm.kl.coefficient=0.1", "algorithm.kl.place=reward"), "algorithm.kl.place"),
        (("adapter.targets=[q_proj,q_proj]",), "adapter.targets"),
        (("adapter.rank=0",), "adapter.rank"),
    ],
)
def test_what_an_adapter_does_not_admit_is_refused(
    options: tuple[str, ...], path: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        adapted(tmp_path / "refused", base, *options)
    assert any(problem.path == path for problem in caught.value.problems), caught.value
