"""What a run works out, and what it refuses, before anything is started."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from forge.config import SFTConfig, load
from forge.errors import ConfigError, ForgeError, ModelError
from forge.loops import planning
from forge.loops.planning import plan_run
from forge.loops.sft import run_sft
from forge.memory import Card, resolve_run
from grpo_runs import config

REFUSED = {
    "rollouts of another adapter": ("generator.sampling.adapter=base", "generator.sampling.adapter"),
    "rollouts without chance": ("generator.sampling.temperature=0", "generator.sampling.temperature"),
    "no reward": ("rewards.functions=[]", "rewards.functions"),
    "no prompts": ("prompts.sources=[]", "prompts.sources"),
    "no tokenizer": ("model.preset=qwen3_0_6b", "model.path"),
    "longer than the trainer takes": ("generator.max_seq_len=65", "generator.max_seq_len"),
    "no room for a prompt": ("generator.sampling.max_tokens=64", "generator.sampling.max_tokens"),
    "a group beyond the queue": ("rollout.group_size=2000", "rollout.group_size"),
    "judged by what is not there": ("evaluation.reward=odd", "evaluation.reward"),
    "the native engine split": ("generator.tensor_parallel=2", "generator.tensor_parallel"),
    "no judge": ("rewards.functions=[{kind: judge}]", "rewards.judge"),
    "no reward model": ("rewards.functions=[{kind: reward_model}]", "rewards.reward_model"),
}

MISSING = {
    "reference": (("algorithm.kl.coefficient=0.1", "reference.path=/nowhere"), "reference.path"),
    "judge": (("rewards.functions=[{kind: judge}]", "rewards.judge={path: /nowhere}"), "rewards.judge.path"),
    "reward model": (
        ("rewards.functions=[{kind: reward_model}]", "rewards.reward_model={path: /nowhere}"),
        "rewards.reward_model.path",
    ),
}

BROKEN = {
    "completions that cannot finish first": (
        ("placement=shared", "rollout.staleness=1", "generator.update.mode=drain"),
        "generator.update.mode",
    ),
    "asynchronous in turns": (("placement=turns", "rollout.staleness=1"), "rollout.staleness"),
    "more than all of a GPU": (("generator.gpu_memory_share=1.5",), "generator.gpu_memory_share"),
    "a head that is not known": (("model.head_precision=float16",), "model.head_precision"),
    "shared with vllm": (("placement=shared", "generator.engine=vllm"), "generator.engine"),
    "shared by two": (("placement=shared", "generator.num_replicas=2"), "generator.num_replicas"),
    "rows instead of groups": (("training.batch_size=4",), "training.batch_size"),
    "accumulation": (("training.gradient_accumulation_steps=2",), "training.gradient_accumulation_steps"),
    "two rewards of one name": (
        ("rewards.functions=[{kind: number}, {kind: number}]",),
        "rewards.functions",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_would_fail_later_is_refused_now(case: str, tmp_path: Path) -> None:
    override, path = REFUSED[case]
    with pytest.raises(ForgeError) as caught:
        plan_run(config(tmp_path / "run", override))
    error = caught.value
    assert isinstance(error, ConfigError)
    assert error.path == path
    assert error.rule
    assert error.repair
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", MISSING)
def test_a_model_that_is_not_there_is_refused_before_anything_starts(case: str, tmp_path: Path) -> None:
    overrides, path = MISSING[case]
    with pytest.raises(ModelError) as caught:
        plan_run(config(tmp_path / "run", *overrides))
    assert (caught.value.path, caught.value.value) == (path, "/nowhere")
    assert caught.value.rule
    assert caught.value.repair


@pytest.mark.parametrize("case", BROKEN)
def test_keys_that_contradict_each_other_are_refused_when_they_are_read(case: str, tmp_path: Path) -> None:
    overrides, path = BROKEN[case]
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        config(tmp_path / "run", *overrides)


@pytest.mark.parametrize("key", ["run.output_dir", "checkpointing.output_dir"])
def test_a_folder_that_cannot_be_is_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match="cannot write to its folder") as caught:
        plan_run(config(tmp_path / "run", f"{key}={tmp_path / 'file' / 'below'}"))
    assert caught.value.path == key
    assert caught.value.rule == (
        f"a folder that can be written; no file can be created in {tmp_path / 'file'}: {os.strerror(errno.ENOTDIR)}"
    )


def test_a_folder_that_root_only_seems_to_be_able_to_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write to its folder") as caught:
        plan_run(config(tmp_path / "run", "run.output_dir=/proc/nowhere"))
    assert caught.value.path == "run.output_dir"
    assert "no file can be created in /proc: " in str(caught.value.rule)


def test_ranks_of_their_own_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config(tmp_path / "run")
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match="one controller"):
        plan_run(chosen)


def test_what_is_left_open_is_filled_in(tmp_path: Path) -> None:
    plan = plan_run(config(tmp_path / "run", "~generator.sampling.max_tokens", "rollout.group_size=100"))
    assert (plan.config.generator.max_seq_len, plan.sampling.max_tokens, plan.sampling.n) == (64, 32, 100)
    assert plan.rollout.max_in_flight == (64 + 1024) // 100
    assert (plan.num_groups, plan.num_steps) == (None, 6)


def test_every_step_on_a_batch_counts_for_the_schedule(tmp_path: Path) -> None:
    plan = plan_run(config(tmp_path / "run", "rollout.iterations=3"))
    assert (plan.num_steps, plan.trainer.total_steps) == (6, 18)


def test_no_more_groups_are_in_flight_than_generators_have_room_for(tmp_path: Path) -> None:
    room = ("generator.max_batch=8", "generator.max_queue=10", "generator.num_replicas=2")
    assert plan_run(config(tmp_path / "run", *room, "rollout.max_in_flight=5000")).rollout.max_in_flight == 12


def test_without_a_number_of_steps_epochs_decide(tmp_path: Path) -> None:
    plan = plan_run(config(tmp_path / "run", "~training.max_steps", "training.num_epochs=2", "rollout.batch_groups=3"))
    assert (plan.num_groups, plan.num_steps, plan.trainer.total_steps) == (80, 27, 27)


def test_gpus_whose_memory_the_driver_does_not_report_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with /dev/nvidia0 and without nvidia-smi."""
    monkeypatch.setattr(planning, "num_usable_gpus", lambda: 2)
    monkeypatch.setattr(planning, "find_card", lambda: None)
    card = planning._card()
    assert card is not None
    assert card.num_gpus == 2
    run = resolve_run(config(tmp_path / "run"), card=card)
    assert (run.trainer_on_gpu, run.generator_on_gpu) == (True, True)
    monkeypatch.setattr(planning, "num_usable_gpus", lambda: 0)
    assert planning._card() is None


def test_what_cannot_fit_into_the_gpu_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with one very small GPU."""
    monkeypatch.setattr("forge.memory.checking.find_card", lambda: Card(256 << 20, num_gpus=1, name="a small one"))
    on_gpu = ("distributed.with_gpus=true", "generator.with_gpus=true", "distributed.shard=1", "placement=shared")
    with pytest.raises(ConfigError, match="does not fit into a GPU") as caught:
        plan_run(config(tmp_path / "run", *on_gpu))
    assert "0.25 GiB" in str(caught.value.rule)
    assert plan_run(config(tmp_path / "run", "distributed.with_gpus=false", "generator.with_gpus=false"))


def test_fine_tuning_that_cannot_fit_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge.memory.checking.find_card", lambda: Card(256 << 20, num_gpus=1, name="a small one"))
    overrides = ["model.preset=tiny", "distributed.with_gpus=true", "distributed.shard=1", f"run.output_dir={tmp_path}"]
    with pytest.raises(ConfigError, match="does not fit into a GPU"):
        asyncio.run(run_sft(load(SFTConfig, overrides=overrides)))
