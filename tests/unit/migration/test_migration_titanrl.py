"""What keys of TitanRL become here, from its own recipes and from functions that are written like them."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from forge.config import GRPOConfig
from forge.errors import ConfigError
from forge.migration import Options, convert_file
from migrations import converted, ours, part_of, resolved, row_of, todo_of


def installed() -> Path:
    """Return the folder of torchtitan, without importing it."""
    found = importlib.util.find_spec("torchtitan")
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


EXAMPLES = sorted((installed() / "experiments" / "rl" / "examples").glob("*/config_registry.py"))
RECIPES = [
    pytest.param(file, node.name, id=node.name)
    for file in EXAMPLES
    for node in ast.parse(file.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("rl_")
]


def recipe(body: str) -> str:
    return f"#!/usr/bin/env python\nimport dataclasses\n\n\n{body}"


def plain(arguments: str) -> str:
    """A function that returns a configuration with these arguments."""
    return recipe(f"def mine():\n    return Controller.Config(hf_assets_path='models/mine', {arguments})\n")


def config_of(arguments: str, folder: Path) -> GRPOConfig:
    config = resolved(converted("titanrl", plain(arguments), folder))
    assert isinstance(config, GRPOConfig)
    return config


@pytest.mark.parametrize(("file", "name"), RECIPES)
def test_every_recipe_of_the_installed_version_is_converted(file: Path, name: str) -> None:
    found = convert_file("titanrl", file, Options(config=name))
    assert found.unknown == (), "its keys are those of the table"
    config = resolved(found)
    assert isinstance(config, GRPOConfig)
    assert config.placement == "apart"
    assert set(todo_of(found)) <= {"model.path", "prompts.sources", "rewards.functions", "evaluation.sources"}


def test_a_recipe_of_theirs_in_numbers() -> None:
    file = next(each for each in EXAMPLES if each.parent.name == "dapo_math")
    config = resolved(convert_file("titanrl", file, Options(config="rl_dapo_qwen3_4b_math_8k")))
    assert isinstance(config, GRPOConfig)
    training, loss = config.training, config.algorithm.loss
    assert (training.learning_rate, training.beta2, training.weight_decay, training.schedule) == (
        1e-6,
        0.98,
        0.1,
        "constant",
    )
    assert (loss.clip_low, loss.clip_high, loss.average, loss.proximal) == (0.2, 0.28, "token_mean", "sampler")
    assert config.algorithm.advantage.scale == "none", "the reward minus the mean of its group"
    assert (config.rollout.batch_groups, config.rollout.group_size, config.rollout.staleness) == (8, 16, 4)
    assert (config.distributed.tensor, config.generator.num_replicas) == (2, 6)
    assert (config.training.max_seq_len, config.generator.sampling.max_tokens) == (10240, 8192)
    assert config.model.head_precision == "float32", "LMHeadCastConverter"


def test_a_recipe_that_changes_another_one_is_followed(tmp_path: Path) -> None:
    text = recipe(
        """
STEPS = 40


def base(*, steps=10, lr):
    return Controller.Config(
        hf_assets_path="models/mine",
        async_loop=AsyncLoopConfig(num_training_steps=steps),
        trainer=PolicyTrainer.Config(
            optimizer=default_adamw(lr=lr), parallelism=ParallelismConfig(tensor_parallel_degree=2)
        ),
        generator=VLLMGenerator.Config(sampling=SamplingConfig(max_tokens=64)),
    )


def changed():
    config = base(steps=STEPS, lr=3e-6)
    config.num_generators = 3
    config.generator.sampling.temperature = 1.0
    config.trainer = dataclasses.replace(
        config.trainer, parallelism=dataclasses.replace(config.trainer.parallelism, data_parallel_shard_degree=4)
    )
    if config.num_generators > 2:
        config.dump_folder = "elsewhere"
    return config
"""
    )
    found = converted("titanrl", text, tmp_path, config="changed")
    config = resolved(found)
    assert isinstance(config, GRPOConfig)
    assert (config.training.max_steps, config.training.learning_rate) == (40, 3e-6)
    assert (config.distributed.tensor, config.distributed.shard) == (2, 4)
    assert (config.generator.num_replicas, config.generator.sampling.temperature) == (3, 1.0)
    assert config.generator.sampling.max_tokens == 64
    (row,) = [row for row in found.none if "statements" in row.theirs]
    assert row.theirs["statements"][0].startswith("if config.num_generators > 2")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("", ("none", 1, 1e-4)),
        ("rollouter=R.Config(advantage=AdvantageEstimator.Config(should_std_normalize=True))", ("group_std", 0, 1e-6)),
    ],
)
def test_advantages(arguments: str, wanted: tuple[str, int, float], tmp_path: Path) -> None:
    advantage = config_of(arguments, tmp_path).algorithm.advantage
    assert (advantage.scale, advantage.std_ddof, advantage.epsilon) == wanted


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        ("GRPOLoss.Config(clip_eps=0.1)", (0.1, 0.1)),
        ("DAPOLoss.Config(ratio_clip_high=0.28)", (0.2, 0.28)),
        ("ChunkedLossWrapper.Config(num_chunks=4, loss_fn=GRPOLoss.Config())", (0.2, 0.2)),
    ],
)
def test_losses(loss: str, wanted: tuple[float, float], tmp_path: Path) -> None:
    found = config_of(f"trainer=PolicyTrainer.Config(loss={loss})", tmp_path).algorithm.loss
    assert (found.clip_low, found.clip_high) == wanted
    assert found.correction.kind == "none"


def test_a_loss_of_ones_own_has_no_counterpart(tmp_path: Path) -> None:
    found = converted("titanrl", plain("trainer=PolicyTrainer.Config(loss=MyLoss.Config())"), tmp_path)
    assert part_of(found, "trainer.loss") == "none"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("warmup_steps=2", ("linear", 2, 0.0)),
        ("warmup_steps=0, min_lr_factor=1.0", ("constant", 0, 0.0)),
        ("warmup_steps=0, decay_type='cosine', min_lr_factor=0.1", ("cosine", 0, 0.1)),
        ("warmup_steps=0, decay_ratio=0.5", ("wsd", 0, 0.0)),
        ("warmup_steps=200", ("linear", 10, 0.0)),  # shortened to the 10 steps of the run
    ],
)
def test_learning_rates(arguments: str, wanted: tuple[str, int, float], tmp_path: Path) -> None:
    scheduler = f"trainer=PolicyTrainer.Config(lr_scheduler=LRSchedulersContainer.Config({arguments}))"
    training = config_of(scheduler, tmp_path).training
    assert (training.schedule, training.warmup_steps, training.min_lr_ratio) == wanted


def test_the_optimizers_defaults_are_those_of_default_adamw(tmp_path: Path) -> None:
    training = config_of("", tmp_path).training
    assert (training.learning_rate, training.beta1, training.beta2, training.weight_decay) == (8e-4, 0.9, 0.95, 0.1)


def test_a_rubric_names_its_functions_and_shares_their_weights(tmp_path: Path) -> None:
    rubric = "Rubric.Config(reward_fns=[RewardRight.Config(weight=3.0), RewardBrief.Config()])"
    found = converted("titanrl", plain(f"rollouter=R.Config(rubric={rubric})"), tmp_path)
    assert ours(found, "rewards.functions") == [
        {"kind": "my_rewards:reward_right", "weight": 0.75},
        {"kind": "my_rewards:reward_brief", "weight": 0.25},
    ]
    assert todo_of(found)["rewards.functions"].startswith("RewardRight, RewardBrief: ")


@pytest.mark.parametrize(("drop", "no_signal"), [("True", "replace"), ("False", "keep")])
def test_groups_without_signal(drop: str, no_signal: str, tmp_path: Path) -> None:
    builder = f"training_sample_builder=TrainingSampleBuilder.Config(drop_zero_std_reward_groups={drop})"
    assert config_of(f"async_loop=AsyncLoopConfig({builder})", tmp_path).rollout.no_signal == no_signal


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ("", "recompute"),
        ("generator=VLLMGenerator.Config(reset_running_requests_on_weight_sync=False)", "keep"),
        ("generator_router=InterGeneratorRouter.Config(hot_swap=False)", "drain"),
    ],
)
def test_what_new_weights_do_to_completions_in_progress(arguments: str, mode: str, tmp_path: Path) -> None:
    assert config_of(arguments, tmp_path).generator.update.mode == mode


def test_flags_of_a_command_line_are_keys_and_name_the_function_that_is_missing(tmp_path: Path) -> None:
    text = """#!/bin/bash
python3 -m torchtitan.experiments.rl.train --module alphabet_sort --config rl_grpo_qwen3_0_6b_varlen \\
    --hf_assets_path=models/mine --async_loop.num_training_steps 50 --metrics.enable_wandb True
"""
    found = converted("titanrl", text, tmp_path)
    assert ours(found, "training.max_steps") == 50
    assert ours(found, "metrics.wandb") is True
    assert "import that file" in row_of(found, "config").note


@pytest.mark.parametrize(
    ("text", "config", "rule"),
    [
        ("def a():\n    return 1\n", None, "a function that returns Controller.Config"),
        ("def a():\n    return Controller.Config()\n", "b", "one of a"),
        ("def a():\n    return Controller.Config()\ndef b():\n    return Controller.Config()\n", None, "one function"),
    ],
)
def test_a_file_that_does_not_say_which_configuration_is_meant_is_refused(
    text: str, config: str | None, rule: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        converted("titanrl", recipe(text), tmp_path, config=config)
    assert str(refused.value.rule).startswith(rule)
    assert refused.value.repair


def test_a_toml_file_has_the_same_keys(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('hf_assets_path = "models/mine"\n[async_loop]\nnum_training_steps = 7\n')
    found = convert_file("titanrl", tmp_path / "run.toml")
    assert ours(found, "training.max_steps") == 7
    assert ours(found, "model.path") == "models/mine"


def test_unknown_keys_are_reported(tmp_path: Path) -> None:
    found = converted(
        "titanrl", plain("async_loop=AsyncLoopConfig(num_training_step=5, validation=V(num_samples=2))"), tmp_path
    )
    hints = {each.key: each.hint for each in found.unknown}
    assert "num_training_steps" in hints["async_loop.num_training_step"]


def test_functions_that_call_themselves_end(tmp_path: Path) -> None:
    text = recipe("def a():\n    return b()\ndef b():\n    return a()\n")
    with pytest.raises(ConfigError):
        converted("titanrl", text, tmp_path, config="a")


def test_json_of_a_conversion_is_plain(tmp_path: Path) -> None:
    import json

    from forge.migration.text import plain as as_data

    found = converted("titanrl", plain("model_spec=model_registry('4B'), num_generators=count()"), tmp_path)
    data: dict[str, Any] = json.loads(json.dumps(as_data(found)))
    assert data["todo"][0]["path"]
    assert any("computed" in str(row["theirs"]) for row in data["maps"])
