"""The sections of a trainer and of fine-tuning: their rules, the files of the application, and `--resume`."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.config import (
    DistributedConfig,
    GRPOConfig,
    InvalidConfig,
    PolicyConfig,
    SFTConfig,
    dump,
    from_command_line,
    load,
)
from forge.errors import ConfigError
from forge.memory import resolve_run
from forge.models.architecture import complete
from forge.trainer.layout import check_layout

APP = Path(__file__).parents[3] / "apps" / "sft"


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(SFTConfig, overrides=overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["training.microbatch_tokens=100"], ["training.microbatch_tokens", "max_seq_len, which is 2048", "raise it"]),
        (
            ["training.optimizer_dtype=bfloat16", "training.beta2=0.999"],
            ["training.beta2", "at most 0.99", "float32"],
        ),
        (["training.schedule=sawtooth"], ["training.schedule", "'sawtooth'", "constant, linear, cosine, wsd"]),
        (["training.learning_rate=0"], ["training.learning_rate"]),
        (["training.max_steps=0"], ["training.max_steps"]),
        (["distributed.shard=0"], ["distributed.shard", "-1 or at least 1", "write -1"]),
        (["distributed.strategy=none", "distributed.shard=2"], ["distributed.strategy", "shard is 2", "`auto`"]),
        (["distributed.strategy=replicate", "distributed.shard=2"], ["distributed.strategy", "shard 1 or -1"]),
        (["distributed.strategy=fsdp", "distributed.replicate=2"], ["distributed.strategy", "replicate 1"]),
        (["distributed.strategy=hsdp"], ["distributed.strategy", "replicate of at least 2"]),
        (["distributed.shard=3", "distributed.expert=2"], ["distributed.expert", "which is 3", "lower it"]),
        (["distributed.shard=3", "distributed.hosts=2"], ["distributed.hosts", "which is 3"]),
        (["checkpointing.keep=0"], ["checkpointing.keep"]),
        (["data.sources=[{}]"], ["data.sources.0.path", "exactly one of path and hf_dataset"]),
        (["data.sources=[{path: a.jsonl, hf_dataset: a/b}]"], ["data.sources.0.path", "remove one"]),
        (["data.sources=[{path: a.jsonl, weight: 0}]"], ["data.sources.0.weight"]),
        (["data.streaming=true", "validation.fraction=0.1"], ["validation.fraction", "give validation.sources"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" in value[0] else "",
)
def test_a_broken_rule_is_named_with_its_repair(overrides: list[str], parts: list[str]) -> None:
    said = refusal(*overrides)
    assert [part for part in parts if part not in said] == [], said


@pytest.mark.parametrize(
    ("degrees", "num_ranks"),
    [
        ({}, 1),
        ({"shard": 4}, 4),
        ({"replicate": 2, "shard": 4, "tensor": 2, "pipeline": 3}, 48),
        ({"tensor": 2}, 2),
        ({"shard": 4, "expert": 4}, 4),
    ],
)
def test_the_degrees_say_how_many_ranks_there_are(degrees: dict[str, int], num_ranks: int) -> None:
    assert DistributedConfig(**degrees).num_ranks == num_ranks


def test_validation_is_on_where_there_is_something_to_validate_with() -> None:
    assert not load(SFTConfig).validation.enabled
    assert load(SFTConfig, overrides=["validation.fraction=0.1"]).validation.enabled
    assert load(SFTConfig, overrides=["validation.sources=[{path: a.jsonl}]"]).validation.enabled


# ---- The command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        ([], "never"),
        (["--resume"], "must"),
        (["--resume", "runs/a/step-00000004"], "runs/a/step-00000004"),
        (["--resume=runs/a/step-00000004"], "runs/a/step-00000004"),
        (["checkpointing.resume=auto"], "auto"),
        (["checkpointing.resume=auto", "--resume"], "must"),
    ],
)
def test_resume_on_the_command_line(words: list[str], resume: str) -> None:
    assert from_command_line(SFTConfig, words).checkpointing.resume == resume


def test_an_override_behind_resume_is_not_taken_for_a_checkpoint() -> None:
    config = from_command_line(SFTConfig, ["--resume", "training.max_steps=7", "run.seed=3"])
    assert (config.checkpointing.resume, config.training.max_steps, config.run.seed) == ("must", 7, 3)


# ---- The files of the application ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "qwen3_1_7b", "qwen3_8b", "llama3_8b"])
def test_a_file_of_the_application_is_valid_and_its_layout_fits_its_model(name: str) -> None:
    config = load(SFTConfig, files=[APP / f"{name}.yaml"])
    model = complete(config.model.model_copy(update={"path": None}))
    for num_ranks in (1, 2, 8):
        layout = check_layout(config.distributed, model, config.training, num_ranks=num_ranks)
        assert (layout.num_ranks, layout.shard) == (num_ranks, num_ranks)
    assert [(APP.parents[1] / str(source.path)).is_file() for source in config.data.sources] == [True]
    assert config.validation.enabled
    if name != "tiny":
        command = (APP / f"{name}.yaml").read_text(encoding="utf-8")
        assert f"--output-dir {config.model.path}" in command, "where the download puts it"
        assert config.distributed.precision == "bfloat16"
        assert config.distributed.with_gpus is True


@pytest.mark.parametrize(
    ("short", "whole"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32"), ("fp64", "float64")],
)
def test_short_names_of_dtypes_stand_for_the_whole_ones(short: str, whole: str) -> None:
    config = load(SFTConfig, overrides=[f"distributed.precision={short}"])
    assert config.distributed.precision == whole
    assert f"precision: {whole}" in dump(config)
    if whole not in ("float64", "float16"):
        assert load(SFTConfig, overrides=[f"training.optimizer_dtype={short}"]).training.optimizer_dtype == whole
    if whole != "float64":
        assert load(PolicyConfig, overrides=[f"generator.precision={short}"]).generator.precision == whole
    assert load(PolicyConfig, overrides=["model.head_precision=fp32"]).model.head_precision == "float32"


@pytest.mark.parametrize("key", ["training.optimizer_dtype", "model.head_precision"])
def test_float16_is_refused_where_nothing_computes_in_it(key: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(GRPOConfig, overrides=[f"{key}=fp16"])
    (problem,) = caught.value.problems
    assert (problem.path, problem.value) == (key, "fp16")
    assert "float32" in problem.rule


def test_generators_compute_in_float16_where_the_trainer_does() -> None:
    """Unless the configuration says otherwise. What is published is what both compute with, in half of the bytes."""
    tiny = ["model.preset=qwen3_0_6b"]
    config = load(GRPOConfig, overrides=[*tiny, "distributed.precision=fp16"])
    assert config.generator.precision == "float16"
    assert "precision: float16" in dump(config)
    run = resolve_run(config)
    assert (run.published_dtype, run.published_item) == ("float16", 2)
    asked = load(GRPOConfig, overrides=[*tiny, "distributed.precision=fp16", "generator.precision=fp32"])
    assert asked.generator.precision == "float32"
    assert resolve_run(asked).published_dtype is None
    assert load(GRPOConfig, overrides=["distributed.precision=bf16"]).generator.precision is None


@pytest.mark.parametrize(
    ("override", "key", "rule"),
    [
        ("initial_scale=1000", "initial_scale", "a power of two"),
        ("growth_factor=3", "growth_factor", "a power of two"),
        ("growth_factor=1", "growth_factor", "greater than 1"),
        ("backoff_factor=0.3", "backoff_factor", "a power of two"),
        ("backoff_factor=1", "backoff_factor", "less than 1"),
        ("min_scale=131072", "initial_scale", "from min_scale to max_scale, which is from 131072"),
        ("max_scale=2", "initial_scale", "from 1 to 2"),
        ("growth_interval=0", "growth_interval", "greater than or equal to 1"),
        ("max_retries=-1", "max_retries", "greater than or equal to 0"),
    ],
)
def test_loss_scales_that_are_refused(override: str, key: str, rule: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(SFTConfig, overrides=[f"training.loss_scaling.{override}"])
    (problem,) = caught.value.problems
    assert problem.path == f"training.loss_scaling.{key}"
    assert rule in problem.rule
    assert problem.repair


def test_a_dtype_in_the_wrong_section_leads_to_the_right_one() -> None:
    with pytest.raises(InvalidConfig, match=r"did you mean `distributed\.precision`"):
        load(SFTConfig, overrides=["training.precision=bf16"])
