"""What keys of TRL become here, in kind and in number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge.config import GRPOConfig, PreferenceConfig
from forge.errors import MISSING, ConfigError
from forge.losses import make_loss
from migrations import converted, ours, part_of, resolved, row_of, todo_of
from peer_losses import TRL_LOSSES, like_trl

BASE = {"model_name_or_path": "models/mine", "num_generations": 8}
SFT = {"model_name_or_path": "models/mine", "max_length": 512, "packing_strategy": "bfd"}
PAIRS = {"model_name_or_path": "models/mine", "dataset_name": "pairs.jsonl"}


# ---- Batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "num_processes", "groups", "iterations", "part"),
    [
        # per_device x processes x accumulation / num_generations
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}, 2, 8, 1, "maps"),
        ({"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}, 4, 8, 1, "maps"),
        ({"per_device_train_batch_size": 8, "num_iterations": 2}, 1, 1, 2, "maps"),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_processes": 4}, None, 8, 1, "maps"),
        # generated at once for two optimizer steps: each has half of the prompts
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
            1,
            2,
            1,
            "differs",
        ),
        ({"per_device_train_batch_size": 8, "generation_batch_size": 64}, 1, 1, 1, "differs"),
        # half a group in an optimizer step
        ({"per_device_train_batch_size": 4, "generation_batch_size": 8}, 1, 1, 1, "differs"),
        # a batch that is repeated within one optimizer step changes no gradient
        (
            {
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 4,
                "steps_per_generation": 1,
                "num_iterations": 2,
            },
            1,
            4,
            1,
            "differs",
        ),
    ],
)
def test_batches_are_groups_of_one_optimizer_step(
    keys: dict[str, Any], num_processes: int | None, groups: int, iterations: int, part: str, tmp_path: Path
) -> None:
    found = converted("trl", BASE | keys, tmp_path, num_processes=num_processes)
    assert ours(found, "rollout") | {"no_signal": "keep"} == {
        "batch_groups": groups,
        "group_size": 8,
        "iterations": iterations,
        "no_signal": "keep",
    }
    assert part_of(found, "num_generations") == part


def test_the_number_of_processes_is_asked_for_where_it_is_not_known(tmp_path: Path) -> None:
    assert "--num-processes" in row_of(converted("trl", BASE, tmp_path), "num_generations").note
    assert row_of(converted("trl", BASE, tmp_path, num_processes=1), "num_generations").note == ""


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, {"num_epochs": 3}),  # the default of transformers
        ({"num_train_epochs": 2}, {"num_epochs": 2}),
        ({"max_steps": 100, "num_train_epochs": 2}, {"max_steps": 100}),
        ({"max_steps": 100, "num_iterations": 2}, {"max_steps": 50}),
    ],
)
def test_the_length_of_a_run_counts_steps_of_ours(keys: dict[str, Any], wanted: dict[str, int], tmp_path: Path) -> None:
    training = ours(converted("trl", BASE | keys, tmp_path), "training")
    assert {key: training[key] for key in ("num_epochs", "max_steps") if key in training} == wanted


def test_half_an_epoch_is_left_to_the_user(tmp_path: Path) -> None:
    found = converted("trl", BASE | {"num_train_epochs": 0.5}, tmp_path)
    assert "epochs are whole" in todo_of(found)["training.max_steps"]


def test_rows_of_a_supervised_step_are_those_of_all_processes(tmp_path: Path) -> None:
    keys = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    training = ours(converted("trl", SFT | keys, tmp_path, num_processes=4), "training")
    assert (training["batch_size"], training["gradient_accumulation_steps"]) == (8, 8)


# ---- The loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theirs", "wanted"), [(theirs, wanted) for theirs, _, wanted in TRL_LOSSES])
def test_the_loss_is_the_one_that_trl_computes(theirs: dict[str, Any], wanted: list[float], tmp_path: Path) -> None:
    config = resolved(converted("trl", BASE | {"max_completion_length": 4} | theirs, tmp_path))
    assert isinstance(config, GRPOConfig)
    loss = make_loss(config.algorithm, max_tokens=config.generator.sampling.max_tokens, iterations=2)
    assert like_trl(loss) == pytest.approx(wanted, abs=2e-10)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, "module:attribute"),
        ({"loss_type": "vespo"}, "module:attribute"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "module:attribute"),
        ({"loss_type": "cispo"}, "epsilon_high is the largest weight"),
        ({"use_adaptive_entropy": True}, "does not adapt"),
        ({"top_entropy_quantile": 0.2}, "loss of your own"),
        ({"off_policy_mask_threshold": 0.5}, "sequence_mask"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "before they are normalised"),
        ({"sync_ref_model": True}, "does not change during a run"),
        ({"max_tool_calling_iterations": 3}, "max_turns=3"),
    ],
)
def test_what_is_not_built_in_has_no_counterpart(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = converted("trl", BASE | keys, tmp_path)
    first = next(iter(keys))
    assert part_of(found, first) == "none"
    assert said in row_of(found, first).note
    resolved(found)


def test_bnpo_differs_by_what_it_averages_over(tmp_path: Path) -> None:
    found = converted("trl", BASE | {"loss_type": "bnpo"}, tmp_path)
    assert part_of(found, "loss_type") == "differs"
    assert resolved(found).algorithm.loss.average == "token_mean"  # type: ignore[attr-defined]


def test_rloo_adds_up_tokens_and_takes_the_divergence_from_the_reward(tmp_path: Path) -> None:
    found = converted("trl", BASE | {"reward_clip_range": [-1.0, 1.0]}, tmp_path)
    config = resolved(found)
    assert isinstance(config, GRPOConfig)
    assert config.algorithm.advantage.baseline == "leave_one_out"
    assert (config.algorithm.loss.kind, config.algorithm.loss.average, config.algorithm.loss.length) == (
        "reinforce",
        "constant",
        1,
    )
    kl = config.algorithm.kl
    assert (kl.coefficient, kl.estimator, kl.place, kl.credit) == (0.05, "k1", "reward", "completion")


@pytest.mark.parametrize(
    ("value", "scale"),
    [("group", "group_std"), (True, "group_std"), ("batch", "batch_std"), (False, "none"), ("none", "none")],
)
def test_rewards_are_scaled_alike(value: Any, scale: str, tmp_path: Path) -> None:
    config = resolved(converted("trl", BASE | {"scale_rewards": value}, tmp_path))
    assert isinstance(config, GRPOConfig)
    advantage = config.algorithm.advantage
    assert (advantage.scale, advantage.std_ddof, advantage.epsilon) == (scale, 1, 1e-4)


# ---- Where things run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "num_processes", "wanted"),
    [
        ({}, 1, ("native", "shared")),
        ({}, 2, ("native", "turns")),
        ({"use_vllm": True}, 1, ("vllm", "beside")),
        ({"use_vllm": True, "vllm_enable_sleep_mode": True}, 1, ("vllm", "turns")),
        ({"use_vllm": True, "vllm_mode": "server"}, 1, ("vllm", "apart")),
    ],
)
def test_who_generates_decides_the_placement(
    keys: dict[str, Any], num_processes: int, wanted: tuple[str, str], tmp_path: Path
) -> None:
    config = resolved(converted("trl", BASE | keys, tmp_path, num_processes=num_processes))
    assert isinstance(config, GRPOConfig)
    assert (config.generator.engine, config.placement) == wanted


def test_vllm_beside_the_trainer_keeps_its_share_and_its_split(tmp_path: Path) -> None:
    keys = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.4, "vllm_tensor_parallel_size": 2}
    found = converted("trl", BASE | keys, tmp_path, num_processes=4)
    generator = ours(found, "generator")
    assert (generator["gpu_memory_share"], generator["tensor_parallel"]) == (0.4, 2)
    assert "4 processes hold 2 engines" in row_of(found, "use_vllm").note


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, {"replicate": 4, "shard": 1}),
        ({"fsdp": "full_shard auto_wrap"}, {"shard": 4}),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, {"shard": 4}),
        ({"deepspeed": {"zero_optimization": {"stage": 0}}}, {"replicate": 4, "shard": 1}),
        ({"deepspeed": "configs/ds_zero2.json"}, {"shard": 4}),
        ({"accelerate_config": "zero3"}, {"shard": 4}),
        ({"accelerate_config": "fsdp2"}, {"shard": 4}),
    ],
)
def test_processes_become_copies_or_shards(keys: dict[str, Any], wanted: dict[str, int], tmp_path: Path) -> None:
    distributed = ours(converted("trl", SFT | keys, tmp_path, num_processes=4), "distributed")
    assert {key: distributed[key] for key in distributed if key != "precision"} == wanted


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({}, "bfloat16"),  # TRL computes in bfloat16 unless fp16 is set
        ({"bf16": False}, "float32"),
        ({"bf16": "no"}, "float32"),
        ({"fp16": True}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16_pure"),
        ({"dtype": "auto"}, "bfloat16_pure"),
        ({"model_init_kwargs": {"torch_dtype": "bfloat16"}}, "bfloat16_pure"),
        ({"model_init_kwargs": "{dtype: bfloat16}"}, "bfloat16_pure"),
        ({"dtype": "bfloat16", "use_peft": True}, "bfloat16"),  # PEFT keeps an adapter in float32
    ],
)
def test_precision_is_what_is_computed_in_and_kept_in(keys: dict[str, Any], precision: str, tmp_path: Path) -> None:
    assert ours(converted("trl", BASE | keys, tmp_path), "distributed.precision") == precision


def test_other_arguments_of_a_models_loading_are_reported(tmp_path: Path) -> None:
    found = converted(
        "trl", BASE | {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"}}, tmp_path
    )
    assert "attn_implementation cannot be set" in row_of(found, "model_init_kwargs").note


# ---- The optimizer's steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, {"schedule": "linear", "warmup_steps": 0}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, {"schedule": "constant", "warmup_steps": 0}),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10},
            {"schedule": "constant", "warmup_steps": 10},
        ),
        ({"lr_scheduler_type": "cosine", "warmup_ratio": 0.1}, {"schedule": "cosine", "warmup_ratio": 0.1}),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 0.1}, {"schedule": "cosine", "warmup_ratio": 0.1}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            {"schedule": "cosine", "min_lr_ratio": 0.1, "warmup_steps": 0},
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": "{min_lr: 1e-7}", "learning_rate": 1e-6},
            {"schedule": "cosine", "min_lr_ratio": 0.1, "warmup_steps": 0},
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 20},
                "max_steps": 100,
            },
            {"schedule": "wsd", "warmup_steps": 0},  # decay_ratio 0.2 is the default of ours
        ),
        ({"lr_scheduler_type": "polynomial"}, {"schedule": "linear", "warmup_steps": 0}),
        ({"lr_scheduler_type": "inverse_sqrt"}, {"schedule": "constant", "warmup_steps": 0}),
    ],
)
def test_the_learning_rate_has_the_same_shape(keys: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    training = ours(converted("trl", BASE | keys, tmp_path), "training")
    names = ("schedule", "warmup_steps", "warmup_ratio", "min_lr_ratio")
    assert {name: training[name] for name in names if name in training} == pytest.approx(wanted)


def test_defaults_of_theirs_that_differ_are_written_out_and_others_are_not(tmp_path: Path) -> None:
    training = ours(converted("trl", BASE, tmp_path), "training")
    assert training["beta2"] == 0.999
    assert training["activation_checkpointing"] == "full"
    assert training["learning_rate"] == 1e-6
    assert "beta1" not in training
    assert "adam_eps" not in training
    given = ours(converted("trl", BASE | {"adam_beta1": 0.9}, tmp_path), "training")
    assert given["beta1"] == 0.9, "what the user set is written, also where it is our default"


@pytest.mark.parametrize(("value", "wanted"), [(0.2, 0.2), (0.0, None), (1.0, 1.0)])
def test_a_norm_of_0_is_no_clipping(value: float, wanted: float | None, tmp_path: Path) -> None:
    assert ours(converted("trl", BASE | {"max_grad_norm": value}, tmp_path), "training.max_grad_norm") == wanted


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused"])
def test_adamw_is_adamw(name: str, tmp_path: Path) -> None:
    found = converted("trl", BASE | {"optim": name}, tmp_path)
    assert found.unchanged == ("optim",)


@pytest.mark.parametrize("name", ["adafactor", "paged_adamw_8bit", "adamw_bnb_8bit", "lion_32bit"])
def test_other_optimizers_become_adamw_and_say_so(name: str, tmp_path: Path) -> None:
    found = converted("trl", BASE | {"optim": name}, tmp_path)
    assert part_of(found, "optim") == "none"
    assert ours(found, "training.optimizer") == "adamw"


# ---- Rollouts, rewards, data -----------------------------------------------------------------------------------------


def test_sampling_is_the_same(tmp_path: Path) -> None:
    keys = {"temperature": 0.9, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    more = {"generation_kwargs": {"stop": "</answer>", "min_tokens": 4, "num_beams": 2}}
    found = converted("trl", BASE | keys | more, tmp_path)
    assert ours(found, "generator.sampling") == {
        **keys,
        "max_tokens": 512,
        "min_tokens": 4,
        "stop": ["</answer>"],
    }
    assert "num_beams" in row_of(found, "generation_kwargs").note


@pytest.mark.parametrize(
    ("keys", "longest"),
    [
        ({"max_completion_length": 1000}, 2024),
        ({"max_completion_length": 1000, "max_prompt_length": 500}, 1500),
        ({"max_completion_length": 1000, "vllm_max_model_length": 4096}, 4096),
    ],
)
def test_prompt_and_completion_are_bounded_together(keys: dict[str, Any], longest: int, tmp_path: Path) -> None:
    assert ours(converted("trl", BASE | keys, tmp_path), "training.max_seq_len") == longest


def test_groups_without_signal_are_kept_and_a_reward_that_fails_ends_the_run(tmp_path: Path) -> None:
    found = converted("trl", BASE, tmp_path)
    assert ours(found, "rollout.no_signal") == "keep"
    assert ours(found, "rewards.on_error") == "stop"


def test_rewards_keep_their_order_and_weights(tmp_path: Path) -> None:
    keys = {
        "reward_funcs": [
            "accuracy_reward",
            "think_format_reward",
            "my_lib.rewards.brief",
            "get_soft_overlong_punishment",
        ],
        "reward_weights": [1.0, 0.5, 0.2, 1.0],
        "dataset_name": "owner/math",
    }
    found = converted("trl", BASE | keys, tmp_path)
    first, second, third = ours(found, "rewards.functions")
    assert first == {"kind": "math"}
    assert (second["kind"], second["weight"]) == ("regex", 0.5)
    assert third == {"kind": "my_lib.rewards:brief", "weight": 0.2}
    assert ours(found, "rewards.overlong") == {"max_tokens": 1280, "buffer": 256, "penalty": 1.0}
    assert "my_lib.rewards.brief" in todo_of(found)["rewards.functions"]
    assert ours(found, "prompts.sources") == [{"hf_dataset": "owner/math", "columns": {"answer": "solution"}}]


@pytest.mark.parametrize(
    ("text", "score"), [("<think>so</think>4", 1.0), ("so</think>4", 0.0), ("<think>a<think></think>", 0.0)]
)
def test_the_format_reward_scores_as_theirs(text: str, score: float, tmp_path: Path) -> None:
    from forge.rewards import find
    from forge.types import Completion, Task

    (reward,) = ours(converted("trl", BASE | {"reward_funcs": "think_format_reward"}, tmp_path), "rewards.functions")
    completion = Completion.__new__(Completion)
    object.__setattr__(completion, "text", text)
    assert find(reward["kind"])(Task("1", text="x"), completion, **reward["args"]) == score


def test_a_reward_model_is_one_of_the_section(tmp_path: Path) -> None:
    found = converted("trl", BASE | {"reward_model_name_or_path": "owner/judge"}, tmp_path)
    assert ours(found, "rewards.functions") == [{"kind": "reward_model"}]
    assert ours(found, "rewards.reward_model") == {"path": "models/judge"}


def test_a_mixture_of_datasets_becomes_sources(tmp_path: Path) -> None:
    datasets = [
        {"path": "owner/one", "name": "main", "split": "train[:100]", "fraction": 0.5},
        {"path": "json", "data_files": "data/two.jsonl"},
    ]
    found = converted("trl", SFT | {"datasets": datasets, "test_split_size": 0.1}, tmp_path)
    assert ours(found, "data.sources") == [
        {"hf_dataset": "owner/one", "hf_config": "main", "split": "train[:100]"},
        {"path": "data/two.jsonl"},
    ]
    assert "fraction of owner/one" in row_of(found, "datasets").note
    assert ours(found, "validation.fraction") == 0.1


def test_evaluation_samples_as_training_does(tmp_path: Path) -> None:
    keys = {"eval_strategy": "steps", "eval_steps": 50, "dataset_name": "owner/math", "temperature": 0.7}
    assert ours(converted("trl", BASE | keys, tmp_path), "evaluation") == {
        "interval": 50,
        "at_start": False,
        "at_end": False,
        "sources": [{"hf_dataset": "owner/math", "split": "test"}],
        "num_samples": 8,
        "temperature": 0.7,
    }


# ---- Adapters --------------------------------------------------------------------------------------------------------


def test_an_adapter_has_peft_s_rank_alpha_and_targets(tmp_path: Path) -> None:
    keys = {
        "use_peft": True,
        "lora_r": 32,
        "lora_alpha": 16,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_dropout": 0,
    }
    found = converted("trl", SFT | keys | {"load_in_4bit": True, "use_rslora": True}, tmp_path)
    wanted = {"rank": 32, "alpha": 16.0, "targets": ["q_proj", "v_proj"], "rslora": True, "base_dtype": "nf4"}
    assert ours(found, "adapter") == wanted
    assert part_of(found, "lora_r") == "maps"


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        ("all-linear", "all"),
        (None, ["q_proj", "v_proj"]),  # what PEFT adapts by itself
        (["q_proj", "lm_head"], ["q_proj"]),
        (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "all"),
        (["Wqkv"], "all"),
    ],
)
def test_target_modules_are_layers(targets: Any, wanted: Any, tmp_path: Path) -> None:
    found = converted("trl", SFT | {"use_peft": True, "lora_target_modules": targets}, tmp_path)
    assert ours(found, "adapter.targets") == wanted


def test_without_peft_there_is_no_adapter(tmp_path: Path) -> None:
    found = converted("trl", SFT | {"lora_r": 32}, tmp_path)
    assert ours(found, "adapter") is MISSING
    assert "lora_r" in found.unchanged


# ---- Supervised runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "loss_on"),
    [
        ({}, "all"),
        ({"assistant_only_loss": True}, "answers"),
        ({"completion_only_loss": True}, "answers"),
        ({"completion_only_loss": "false"}, "all"),
    ],
)
def test_which_tokens_count(keys: dict[str, Any], loss_on: str, tmp_path: Path) -> None:
    assert ours(converted("trl", SFT | keys, tmp_path, kind="sft"), "data.loss_on") == loss_on


def test_fine_tuning_packs_and_cuts_as_theirs(tmp_path: Path) -> None:
    plain = ours(converted("trl", SFT, tmp_path, kind="sft"), "data")
    assert (plain["packing"], plain["oversize"]) == (False, "truncate")
    packed = converted("trl", SFT | {"packing": True, "packing_strategy": "wrapped"}, tmp_path)
    assert ours(packed, "data.packing") is True
    assert part_of(packed, "packing") == "none"


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, {"kind": "dpo", "beta": 0.1}),
        ({"beta": 0.5, "loss_type": "ipo"}, {"kind": "ipo", "beta": 0.5}),
        ({"loss_type": "hinge"}, {"kind": "dpo", "variant": "hinge"}),
        ({"loss_type": "robust", "label_smoothing": 0.1}, {"variant": "robust", "label_smoothing": 0.1}),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]}, {"variant": "sigmoid", "nll_coefficient": 0.2}),
    ],
)
def test_preference_losses(keys: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    config = resolved(converted("trl", PAIRS | keys, tmp_path, kind="dpo"))
    assert isinstance(config, PreferenceConfig)
    chosen = {"beta": config.preference.chosen_beta}
    assert {key: chosen.get(key, getattr(config.preference, key)) for key in wanted} == wanted
    assert config.reference_mode == "online"


@pytest.mark.parametrize("name", ["aot", "exo_pair", "discopop"])
def test_forms_of_dpo_that_are_not_built_in(name: str, tmp_path: Path) -> None:
    assert part_of(converted("trl", PAIRS | {"loss_type": name}, tmp_path, kind="dpo"), "loss_type") == "none"


def test_kto_and_reward_models(tmp_path: Path) -> None:
    kto = resolved(converted("trl", PAIRS | {"desirable_weight": 2.0}, tmp_path))
    assert isinstance(kto, PreferenceConfig)
    assert (kto.preference.kind, kto.preference.desirable_weight, kto.data.shuffle) == ("kto", 2.0, False)
    found = converted("trl", PAIRS | {"center_rewards_coefficient": 0.01}, tmp_path)
    assert ours(found, "reward_model.centering_coefficient") == 0.01
    assert resolved(found).training.learning_rate == 1e-4  # type: ignore[attr-defined]


# ---- Which run it is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (BASE, "GRPOConfig"),
        ({"packing": True}, "SFTConfig"),
        ({"precompute_ref_log_probs": True, "ld_alpha": 0.5}, "PreferenceConfig"),
        ({"center_rewards_coefficient": 0.01}, "RewardTrainingConfig"),
    ],
)
def test_the_keys_tell_which_trainer_it_is_for(keys: dict[str, Any], kind: str, tmp_path: Path) -> None:
    assert converted("trl", keys, tmp_path).schema.__name__ == kind


def test_keys_that_all_trainers_have_tell_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        converted("trl", {"learning_rate": 1e-5, "output_dir": "out"}, tmp_path)
    assert "--kind" in str(refused.value.repair)
    assert refused.value.path == str(tmp_path / "theirs.yaml")


def test_a_key_of_another_version_is_reported_with_what_became_of_it(tmp_path: Path) -> None:
    found = converted(
        "trl", BASE | {"evaluation_strategy": "steps", "num_generation": 4, "disable_dropuot": True}, tmp_path
    )
    hints = {each.key: each.hint for each in found.unknown}
    assert hints == {
        "evaluation_strategy": "now eval_strategy",
        "num_generation": "did you mean `num_generations`?",
        "disable_dropuot": "did you mean `disable_dropout`?",
    }
    assert found.unknown[0].place.endswith("theirs.yaml:1")


def test_a_value_that_trl_does_not_take_is_asked_for(tmp_path: Path) -> None:
    found = converted("trl", BASE | {"epsilon": "wide", "learning_rate": 0.0}, tmp_path)
    assert "epsilon is 'wide'" in todo_of(found)["algorithm.preset"]
    assert "greater than 0" in todo_of(found)["training.learning_rate"]
