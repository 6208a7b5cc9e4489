"""What keys of verl become here, in kind and in number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge.config import AlgorithmConfig, GRPOConfig
from forge.errors import ConfigError
from forge.migration import Computed
from forge.migration.verl.reading import resolved as with_interpolations
from migrations import converted, ours, part_of, resolved, row_of, todo_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BASE = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.model.path": "models/mine", f"{ROLLOUT}.n": 4}


def script(keys: dict[str, Any]) -> str:
    words = [f"'{key}={value}'" for key, value in (BASE | keys).items()]
    return "#!/bin/bash\npython3 -m verl.trainer.main_ppo \\\n  " + " \\\n  ".join(words) + ' "$@"\n'


def config_of(keys: dict[str, Any], folder: Path) -> GRPOConfig:
    config = resolved(converted("verl", script(keys), folder))
    assert isinstance(config, GRPOConfig)
    return config


# ---- Batches and lengths ---------------------------------------------------------------------------------------------


def test_one_optimizer_step_of_verl_is_a_step(tmp_path: Path) -> None:
    keys = {"data.train_batch_size": 256, f"{ACTOR}.ppo_mini_batch_size": 256, f"{ACTOR}.ppo_epochs": 2}
    found = converted("verl", script(keys), tmp_path)
    assert part_of(found, "data.train_batch_size") == "maps"
    rollout = config_of(keys, tmp_path).rollout
    assert (rollout.batch_groups, rollout.group_size, rollout.iterations, rollout.staleness) == (256, 4, 2, 0)


def test_mini_batches_become_steps_of_their_own_and_everything_is_counted_in_them(tmp_path: Path) -> None:
    keys = {
        "data.train_batch_size": 1024,
        f"{ACTOR}.ppo_mini_batch_size": 256,
        "trainer.total_training_steps": 100,
        "trainer.save_freq": 20,
        "trainer.test_freq": 5,
        f"{ACTOR}.optim.lr_warmup_steps": 10,
        "data.val_files": "data/test.parquet",
    }
    found = converted("verl", script(keys), tmp_path)
    assert "takes 4 optimizer steps of 256 prompts" in row_of(found, "data.train_batch_size").note
    config = config_of(keys, tmp_path)
    assert config.rollout.batch_groups == 256
    assert config.training.max_steps == 400
    assert config.training.warmup_steps == 40
    assert (config.checkpointing.save_interval, config.evaluation.interval) == (80, 20)


def test_lengths_add_up(tmp_path: Path) -> None:
    config = config_of({"data.max_prompt_length": 1000, "data.max_response_length": 3000}, tmp_path)
    assert (config.training.max_seq_len, config.generator.sampling.max_tokens) == (4000, 3000)


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4}, 4096),
        ({f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 24000}, 24000),
        ({f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 100}, 1024),
        ({}, None),
    ],
)
def test_micro_batches_are_counted_in_tokens(keys: dict[str, Any], tokens: int | None, tmp_path: Path) -> None:
    assert config_of(keys, tmp_path).training.microbatch_tokens == tokens


# ---- The algorithm ---------------------------------------------------------------------------------------------------
# `test_losses_conventions` and `test_advantage_conventions` hold the numbers that verl's functions gave for these.

VANILLA: dict[str, Any] = {"convention": "verl"}


@pytest.mark.parametrize(
    ("keys", "algorithm"),
    [
        ({}, VANILLA),
        ({f"{ACTOR}.clip_ratio_high": 0.28}, VANILLA | {"loss": {"clip_high": 0.28}}),
        ({f"{ACTOR}.clip_ratio_c": 10.0}, VANILLA | {"loss": {"dual_clip": 10.0}}),
        ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}, VANILLA | {"loss": {"average": "sequence_mean"}}),
        (
            {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 2048},
            VANILLA | {"loss": {"average": "constant", "length": 2048}},
        ),
        ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"}, VANILLA | {"loss": {"average": "constant", "length": 1}}),
        (
            {f"{ACTOR}.use_kl_loss": True},
            VANILLA | {"kl": {"coefficient": 0.001, "estimator": "k3", "place": "loss"}},
        ),
        (
            {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "mse", f"{ACTOR}.kl_loss_coef": 0.1},
            VANILLA | {"kl": {"coefficient": 0.1, "estimator": "k2", "place": "loss"}},
        ),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.05},
            VANILLA | {"kl": {"coefficient": 0.05, "estimator": "k1", "place": "reward", "credit": "completion"}},
        ),
        ({"algorithm.norm_adv_by_std_in_grpo": False}, VANILLA | {"advantage": {"scale": "none"}}),
        (
            {f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
            {"convention": "verl", "loss": {"kind": "gspo", "average": "sequence_mean"}},
        ),
        (
            {f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_low": 10, f"{ACTOR}.clip_ratio_high": 0.2},
            {"convention": "verl", "loss": {"kind": "cispo", "clip_low": 1.0, "clip_high": 0.2}},
        ),
        (
            {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.tau_pos": 2.0, f"{ACTOR}.tau_neg": 3.0},
            {"convention": "verl", "loss": {"kind": "sapo", "tau_positive": 2.0, "tau_negative": 3.0}},
        ),
        ({"algorithm.adv_estimator": "rloo"}, {"convention": "verl", "preset": "rloo"}),
        (
            {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
            {"convention": "verl", "preset": "reinforce_pp_baseline"},
        ),
        (
            {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.gamma": 0.9},
            {"convention": "verl", "preset": "reinforce_pp", "advantage": {"gamma": 0.9}},
        ),
        (
            {"algorithm.rollout_correction.rollout_is": "token"},
            VANILLA | {"loss": {"correction": {"kind": "truncate", "level": "token", "high": 2.0}}},
        ),
        (
            {
                "algorithm.rollout_correction.rollout_is": "token",
                "algorithm.rollout_correction.rollout_is_threshold": "0.5_5.0",
            },
            VANILLA | {"loss": {"correction": {"kind": "mask", "level": "token", "low": 0.5, "high": 5.0}}},
        ),
    ],
)
def test_the_algorithm_is_the_one_of_the_convention(
    keys: dict[str, Any], algorithm: dict[str, Any], tmp_path: Path
) -> None:
    assert config_of(keys, tmp_path).algorithm == AlgorithmConfig.model_validate(algorithm)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"algorithm.adv_estimator": "opo"}, "module:function"),
        ({f"{ACTOR}.policy_loss.loss_mode": "kl_cov"}, "module:attribute"),
        ({f"{ACTOR}.loss_agg_mode": "token-sum"}, "token_mean, sequence_mean or constant"),
        ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "k3+"}, "the gradient of k2"),
        ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "abs"}, "abs"),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}, "does not adapt"),
        ({"algorithm.rollout_correction.rollout_rs": "seq_mean_k1"}, "sequence_mask"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, "Ulysses"),
        ({f"{ACTOR}.fsdp_config.param_offload": True}, "stay on the GPU"),
        ({f"{ROLLOUT}.multi_turn.enable": True}, "episode.kind"),
        ({"data.custom_cls.path": "my/data.py"}, "module:attribute"),
        ({"reward.reward_model.enable": True, "reward.reward_model.model_path": "owner/rm"}, "owner/rm"),
        ({f"{ACTOR}.grad_clip": 0.5}, "optim.clip_grad"),
        ({"distillation.enabled": True}, "teacher"),
    ],
)
def test_what_is_not_built_in_has_no_counterpart(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = converted("verl", script(keys), tmp_path)
    key = list(keys)[-1]
    assert part_of(found, key) == "none"
    assert said in row_of(found, key).note
    resolved(found)


def test_clip_ratio_alone_has_no_effect_in_verl(tmp_path: Path) -> None:
    found = converted("verl", script({f"{ACTOR}.clip_ratio": 0.1}), tmp_path)
    assert part_of(found, f"{ACTOR}.clip_ratio") == "differs"
    assert resolved(found).algorithm.loss.clip_low == 0.2  # type: ignore[attr-defined]


def test_ppo_has_a_critic_with_rates_of_its_own(tmp_path: Path) -> None:
    keys = {
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": 0.99,
        "algorithm.lam": 0.95,
        "critic.optim.lr": 2e-5,
        "critic.cliprange_value": 0.4,
        "trainer.critic_warmup": 10,
        "algorithm.use_kl_in_reward": True,
    }
    config = config_of(keys, tmp_path)
    assert config.algorithm.has_critic
    assert dict(config.algorithm.advantage.args) == {"gamma": 0.99, "lam": 0.95}
    assert (config.critic.training.learning_rate, config.critic.value_clip, config.critic.warmup_steps) == (
        2e-5,
        0.4,
        10,
    )
    assert (config.algorithm.kl.place, config.algorithm.kl.credit) == ("reward", "token")
    assert config.training.weight_decay == 0.01


@pytest.mark.parametrize(("keys", "no_signal"), [({}, "keep"), ({"algorithm.filter_groups.enable": True}, "replace")])
def test_groups_without_signal(keys: dict[str, Any], no_signal: str, tmp_path: Path) -> None:
    assert config_of(keys, tmp_path).rollout.no_signal == no_signal


# ---- Where things run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"trainer.n_gpus_per_node": 1}, ("turns", 1, 0)),
        ({"trainer.n_gpus_per_node": 1, f"{ROLLOUT}.free_cache_engine": False}, ("beside", 1, 0)),
        ({"trainer.n_gpus_per_node": 2}, ("turns", 2, 0)),
        ({"trainer.v1.trainer_mode": "colocate_async"}, ("beside", 2, 1)),
        (
            {
                "trainer.v1.trainer_mode": "separate_async",
                "actor_rollout_ref.hybrid_engine": False,
                f"{ROLLOUT}.nnodes": 1,
                f"{ROLLOUT}.n_gpus_per_node": 8,
                "trainer.v1.separate_async.parameter_sync_step": 2,
            },
            ("apart", 2, 2),
        ),
    ],
)
def test_the_trainers_mode_is_the_placement(keys: dict[str, Any], wanted: tuple[str, int, int], tmp_path: Path) -> None:
    config = config_of({f"{ROLLOUT}.name": "vllm"} | keys, tmp_path)
    assert (config.placement, config.generator.tensor_parallel, config.rollout.staleness) == wanted
    assert config.generator.engine == "vllm"


def test_a_pool_of_its_own_has_as_many_generators_as_fit(tmp_path: Path) -> None:
    keys = {
        "actor_rollout_ref.hybrid_engine": False,
        f"{ROLLOUT}.nnodes": 2,
        f"{ROLLOUT}.n_gpus_per_node": 8,
        f"{ROLLOUT}.tensor_model_parallel_size": 4,
    }
    assert config_of(keys, tmp_path).generator.num_replicas == 4


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, (1, 8, None)),
        ({"trainer.nnodes": 2}, (1, 16, 2)),
        ({f"{ACTOR}.fsdp_config.fsdp_size": 4}, (2, 4, None)),
    ],
)
def test_ranks_are_all_gpus(keys: dict[str, Any], wanted: tuple[int, int, int | None], tmp_path: Path) -> None:
    found = converted("verl", script(keys), tmp_path)
    section = resolved(found).distributed  # type: ignore[attr-defined]
    assert (section.replicate, section.shard, section.hosts) == wanted
    assert ("launcher" in todo_of(found)) == (wanted[2] is not None)


def test_the_degrees_of_megatron_stay_and_the_rest_of_the_gpus_shards(tmp_path: Path) -> None:
    megatron = f"{ACTOR}.megatron"
    keys = {
        f"{megatron}.tensor_model_parallel_size": 2,
        f"{megatron}.pipeline_model_parallel_size": 2,
        f"{megatron}.override_transformer_config.recompute_method": "uniform",
        f"{ACTOR}.optim.lr_decay_style": "cosine",
        f"{ACTOR}.optim.min_lr": 1e-7,
    }
    text = script(keys).replace("main_ppo \\", "main_ppo --config-name=ppo_megatron_trainer.yaml \\")
    found = converted("verl", text, tmp_path)
    config = resolved(found)
    assert isinstance(config, GRPOConfig)
    section = config.distributed
    assert (section.tensor, section.pipeline, section.shard) == (2, 2, 2)
    assert config.training.schedule == "cosine"
    assert config.training.min_lr_ratio == pytest.approx(0.1)
    assert part_of(found, f"{megatron}.override_transformer_config.recompute_method") == "none"
    assert found.unknown == ()


def test_engine_arguments_are_passed_on(tmp_path: Path) -> None:
    found = converted("verl", script({f"+{ROLLOUT}.engine_kwargs.vllm.max_logprobs": 20}), tmp_path)
    assert ours(found, "generator.engine_args") == {"max_logprobs": 20}
    assert found.unknown == ()
    other = converted("verl", script({f"+{ROLLOUT}.engine_kwargs.sglang.mem": 1}), tmp_path)
    assert part_of(other, f"{ROLLOUT}.engine_kwargs.sglang.mem") == "none"


def test_an_adapter(tmp_path: Path) -> None:
    model = "actor_rollout_ref.model"
    keys = {f"{model}.lora_rank": 32, f"{model}.lora_alpha": 64, f"{model}.target_modules": "all-linear"}
    found = converted("verl", script(keys), tmp_path)
    assert ours(found, "adapter") == {"rank": 32, "alpha": 64.0, "targets": "all"}


# ---- Data, rewards, files --------------------------------------------------------------------------------------------


def test_files_are_sources_and_their_answers_are_in_the_metadata(tmp_path: Path) -> None:
    keys = {
        "data.train_files": '["a.parquet", "b.parquet"]',
        "data.prompt_key": "question",
        "data.train_max_samples": 100,
    }
    found = converted("verl", script(keys), tmp_path)
    source = {"columns": {"prompt": "question"}, "num_prompts": 100}
    assert ours(found, "prompts.sources") == [{"path": "a.parquet", **source}, {"path": "b.parquet", **source}]
    assert "reward_model" in row_of(found, "data.train_files").note


@pytest.mark.parametrize("path", ["~/data/train.parquet", "hdfs://data/train.parquet"])
def test_a_path_that_has_to_be_expanded_is_left_to_the_user(path: str, tmp_path: Path) -> None:
    found = converted("verl", script({"data.train_files": path}), tmp_path)
    assert path in todo_of(found)["prompts.sources"]


def test_a_reward_function_is_named_and_asked_for(tmp_path: Path) -> None:
    keys = {"custom_reward_function.path": "my/score.py", "custom_reward_function.name": "score"}
    found = converted("verl", script(keys), tmp_path)
    assert ours(found, "rewards.functions") == [{"kind": "my_rewards:score"}]
    assert "score of my/score.py" in todo_of(found)["rewards.functions"]


def test_the_files_that_hydra_writes_are_read(tmp_path: Path) -> None:
    whole = """
algorithm: {adv_estimator: grpo}
data: {max_prompt_length: 100, max_response_length: 200}
actor_rollout_ref:
  actor: {_target_: verl.workers.config.FSDPActorConfig, optim: {lr: 1e-5}}
  rollout: {n: 2, response_length: "${oc.select:data.max_response_length,512}"}
trainer: {project_name: one, experiment_name: "two-${trainer.project_name}", n_gpus_per_node: 1}
"""
    found = converted("verl", whole, tmp_path)
    assert ours(found, "run.name") == "two-one"
    assert ours(found, "training.max_seq_len") == 300
    assert row_of(found, f"{ROLLOUT}.response_length").theirs == {f"{ROLLOUT}.response_length": 200}
    assert found.unknown == ()
    overrides = "- algorithm.adv_estimator=rloo\n- actor_rollout_ref.rollout.n=2\n"
    assert ours(converted("verl", overrides, tmp_path), "algorithm.preset") == "rloo"


def test_interpolations() -> None:
    values = {
        "a.x": 4,
        "a.y": "${a.x}",
        "a.z": "${.y}",
        "b": "v${a.z}",
        "c": "${oc.select:gone,${a.x}}",
        "d": "${oc.env:HOME}",
        "e": "???",
        "f": "${oc.select:gone}",
        "g": "${g}",
    }
    found = with_interpolations(values)
    assert {key: found[key] for key in "bcef"} == {"b": "v4", "c": 4, "e": None, "f": None}
    assert found["a.z"] == 4
    assert found["d"] == Computed("${oc.env:HOME}")
    assert isinstance(found["g"], Computed)


def test_unknown_keys_are_reported(tmp_path: Path) -> None:
    keys = {"trainer.val_generations_to_log_to_wandb": 4, f"{ACTOR}.ppo_minibatch_size": 4, "+my.own": 1}
    hints = {each.key: each.hint for each in converted("verl", script(keys), tmp_path).unknown}
    assert hints["trainer.val_generations_to_log_to_wandb"] == "now trainer.log_val_generations"
    assert "ppo_mini_batch_size" in hints[f"{ACTOR}.ppo_minibatch_size"]
    assert set(hints) == {"trainer.val_generations_to_log_to_wandb", f"{ACTOR}.ppo_minibatch_size", "my.own"}


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/bash\npython3 -m verl.trainer.sft_trainer model.partial_pretrain=x\n",
        "#!/bin/bash\nray start --head\n",
    ],
)
def test_a_script_that_starts_no_ppo_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"verl\.trainer\.main_ppo"):
        converted("verl", text, tmp_path)


def test_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.hydra/config\.yaml"):
        converted("verl", "#!/usr/bin/env python\nx = 1\n", tmp_path)
