"""The table of verl's trainer, data, rewards, optimizer and model."""

from __future__ import annotations

from typing import Any, Final

from forge.migration.models import (
    adapter_targets,
    is_unreadable_path,
    model_values,
    names_of,
    own_reward,
    run_name,
    sink_values,
)
from forge.migration.records import Converted, PeerConfig
from forge.migration.rules import (
    always,
    as_float,
    changed,
    differs,
    full_or_none,
    joint,
    lacking,
    lacks,
    maps,
    positive,
)
from forge.migration.verl import schedules
from forge.migration.verl.schedules import ACTOR, OPTIM

MODEL: Final = "actor_rollout_ref.model"


# ---- Data and rewards


def _prompts(config: PeerConfig) -> Converted:
    files = names_of(config["data.train_files"])
    sources, odd = _file_sources(config, files)
    if not config.is_given("data.train_files") or odd or not sources:
        what = f"{', '.join(odd)}: paths are not expanded" if odd else "data.train_files is not given"
        return Converted(todo={"prompts.sources": f"{what}: such as [{{path: data/train.parquet}}]"})
    note = (
        "a record keeps `data_source`, `reward_model` and `extra_info` in task.metadata; its answer is "
        "task.metadata['reward_model']['ground_truth']"
    )
    return changed({"prompts.sources": sources}, note)


def _file_sources(config: PeerConfig, files: list[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Sources for files, and those files whose paths cannot be taken as they are."""
    key, most = config["data.prompt_key"], config["data.train_max_samples"]
    extra: dict[str, Any] = {"columns": {"prompt": key}} if key not in (None, "prompt") else {}
    extra |= {"num_prompts": most} if isinstance(most, int) and most > 0 else {}
    odd = [str(each) for each in files if is_unreadable_path(str(each))]
    return [{"path": str(each), **extra} for each in files if str(each) not in odd], odd


def _held_out(config: PeerConfig) -> Converted | None:
    interval = schedules.intervals(config, "trainer.test_freq")
    before = bool(config["trainer.val_before_train"])
    if interval is None and not config.is_given("data.val_files"):
        return None
    kwargs = "actor_rollout_ref.rollout.val_kwargs"
    values: dict[str, Any] = {
        "evaluation.interval": interval,
        "evaluation.at_start": before,
        "evaluation.at_end": interval is not None,
        "evaluation.num_samples": config[f"{kwargs}.n"],
        "evaluation.temperature": float(config[f"{kwargs}.temperature"] or 0.0)
        if config[f"{kwargs}.do_sample"]
        else 0.0,
    }
    if isinstance(config["data.val_max_samples"], int) and config["data.val_max_samples"] > 0:
        values["evaluation.max_prompts"] = config["data.val_max_samples"]
    files = names_of(config["data.val_files"])
    odd = [str(each) for each in files if is_unreadable_path(str(each))]
    if odd or not config.is_given("data.val_files"):
        return Converted(
            values, todo={"evaluation.sources": "the held-out prompts, such as [{path: data/test.parquet}]"}
        )
    key = config["data.prompt_key"]
    columns: dict[str, Any] = {"columns": {"prompt": key}} if key not in (None, "prompt") else {}
    values["evaluation.sources"] = [{"path": str(each), **columns} for each in files]
    note = "evaluation.solved_at says from which reward on a prompt is solved; verl reports the mean of the score"
    return changed(values, note)


_REWARD_HOW: Final = (
    "write it as `def reward(prompt: Task, completion: Completion) -> float` in the module that is named; solution_str "
    "is completion.text, ground_truth is prompt.metadata['reward_model']['ground_truth']"
)


def _rewards(config: PeerConfig) -> Converted:
    path = config["reward.custom_reward_function.path"] or config["custom_reward_function.path"]
    name = config["custom_reward_function.name"] or config["reward.custom_reward_function.name"]
    if path:
        values = {"rewards.functions": [{"kind": own_reward(str(name))}]}
        return Converted(values, todo={"rewards.functions": f"{name} of {path}: {_REWARD_HOW}"})
    text = (
        "verl scores by `data_source`; the same here: [{kind: number}] for openai/gsm8k, [{kind: math}] for MATH, DAPO "
        "and AIME, [{kind: code}] for programs, with the answer in the column `answer`, or a reward of your own"
    )
    return Converted(todo={"rewards.functions": text})


def _reward_model(config: PeerConfig) -> Converted | None:
    if not (config["reward.reward_model.enable"] or config["reward_model.enable"]):
        return None
    path = config["reward.reward_model.model_path"] or config["reward_model.model.path"]
    note = "a classifier with one label: rewards.functions: [{kind: reward_model}] and the section rewards.reward_model"
    return lacking(f"{note}; path: the folder of {path}" if path else note)


# ---- Trainer


def _folder(config: PeerConfig) -> Converted:
    values: dict[str, Any] = {"run.name": run_name(str(config["trainer.experiment_name"] or "run"))}
    note = "a run writes to run.output_dir/run.name, its checkpoints to checkpoints/ there"
    if config.is_given("trainer.default_local_dir"):
        note += "; default_local_dir is not used: set checkpointing.output_dir for a folder of their own"
    return changed(values, note)


def _sinks(config: PeerConfig) -> Converted:
    values, others = sink_values(names_of(config["trainer.logger"]))
    if values["metrics.wandb"] or "metrics.sinks" in values:
        values["metrics.project"] = str(config["trainer.project_name"])
    if not others:
        return Converted(values)
    note = f"no sink for {', '.join(others)}: metrics.sinks takes module:attribute of your own; metrics.jsonl is on"
    return lacking(note, values)


def _saving(config: PeerConfig) -> Converted:
    values: dict[str, Any] = {
        "checkpointing.save_interval": schedules.intervals(config, "trainer.save_freq"),
        "checkpointing.save_interval_s": None,
    }
    most = config["trainer.max_actor_ckpt_to_keep"]
    if isinstance(most, int) and most > 0:
        return Converted({**values, "checkpointing.keep": most})
    note = "max_actor_ckpt_to_keep null keeps every checkpoint; here the newest checkpointing.keep, 2, stay"
    return changed(values, note)


def _resume(config: PeerConfig) -> Converted:
    mode = config["trainer.resume_mode"]
    if mode == "resume_path":
        return lacking("checkpoints of verl cannot be resumed from", {"checkpointing.resume": "never"})
    note = "auto resumes from the newest checkpoint of a run of ours; those of verl cannot be read"
    return changed({"checkpointing.resume": "auto" if mode == "auto" else "never"}, note)


def _validation_only(config: PeerConfig) -> Converted | None:
    return lacking("`forge eval` evaluates a model without training") if config["trainer.val_only"] else None


# ---- Model and optimizer


def _model(config: PeerConfig) -> Converted:
    key = f"{MODEL}.path"
    return model_values(config[key] if config.is_given(key) else None, key=key)


def _adapter(config: PeerConfig) -> Converted | None:
    rank = config[f"{MODEL}.lora_rank"] or config[f"{MODEL}.lora.rank"]
    if not isinstance(rank, int) or rank < 1:
        return None
    is_plain = bool(config[f"{MODEL}.lora_rank"])
    alpha = config[f"{MODEL}.lora_alpha"] if is_plain else config[f"{MODEL}.lora.alpha"]
    targets, note = adapter_targets(config[f"{MODEL}.target_modules"] if is_plain else "all-linear")
    values: dict[str, Any] = {"adapter.rank": rank, "adapter.alpha": float(alpha), "adapter.targets": targets or "all"}
    if config[f"{MODEL}.lora_adapter_path"]:
        values["adapter.path"] = config[f"{MODEL}.lora_adapter_path"]
    return changed(values, note) if note else Converted(values)


def _optimizer(config: PeerConfig) -> Converted | None:
    name = config[f"{OPTIM}.optimizer"]
    if name in ("AdamW", "_AdamW") or schedules.is_megatron(config):
        return None
    return lacking("training.optimizer takes adamw, muon, or module:attribute of your own; it becomes adamw")


def _beta(index: int) -> Any:
    def convert(value: Any) -> Any:
        return float(value[index]) if isinstance(value, list | tuple) and len(value) == 2 else (0.9, 0.999)[index]

    return convert


def _betas(config: PeerConfig) -> Converted:
    value = config[f"{OPTIM}.betas"]
    return Converted({"training.beta1": _beta(0)(value), "training.beta2": _beta(1)(value)})


def _no_clipping(config: PeerConfig) -> Converted | None:
    value = config[f"{ACTOR}.grad_clip"]
    if value == config[f"{OPTIM}.clip_grad"]:
        return None
    note = "verl 0.9.1 clips by actor.optim.clip_grad and reads grad_clip nowhere; training.max_grad_norm is that one"
    return lacking(note)


TRAINER_RULES = [
    joint(
        "trainer.total_epochs trainer.total_training_steps", "training.num_epochs training.max_steps", schedules.length
    ),
    joint("trainer.experiment_name trainer.default_local_dir", "run.name", _folder),
    joint(
        "trainer.logger trainer.project_name", "metrics.wandb metrics.tensorboard metrics.sinks metrics.project", _sinks
    ),
    always({"metrics.log_interval": 1}, "verl prints every iteration"),
    joint(
        "trainer.save_freq trainer.max_actor_ckpt_to_keep",
        "checkpointing.save_interval checkpointing.save_interval_s checkpointing.keep",
        _saving,
    ),
    lacks("trainer.max_critic_ckpt_to_keep", "a checkpoint holds the policy and its critic"),
    joint("trainer.resume_mode trainer.resume_from_path", "checkpointing.resume", _resume),
    joint("trainer.val_only", "", _validation_only),
    lacks(
        "trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir",
        "every completion is written to rollouts/ of the run: record.rollouts",
    ),
    lacks(
        "trainer.esi_redundant_time",
        "SIGTERM saves: checkpointing.grace_s; `forge job` prints a job that is queued again",
    ),
    lacks("trainer.default_hdfs_dir trainer.del_local_ckpt_after_load", "checkpoints are folders that all hosts see"),
    lacks("trainer.checkpoint_callback_class", "a run's folder can be watched: checkpoints appear whole"),
    lacks("trainer.balance_batch", "rows are always balanced over ranks, by tokens"),
    lacks("trainer.ray_wait_register_center_timeout ray_kwargs.*", "there is no Ray: processes run on Monarch"),
    lacks("trainer.v1.sampler.*", "rollout.staleness bounds how old a sample may be; older ones are rolled out again"),
    lacks(
        "trainer.v1.sync trainer.v1.colocate_async.* trainer.v1.separate_async.*", "rollout.staleness is the one bound"
    ),
]

DATA_RULES = [
    joint("data.train_files data.train_max_samples data.prompt_key", "prompts.sources", _prompts),
    joint(
        "data.val_files data.val_max_samples trainer.test_freq trainer.val_before_train "
        "actor_rollout_ref.rollout.val_kwargs.n actor_rollout_ref.rollout.val_kwargs.temperature "
        "actor_rollout_ref.rollout.val_kwargs.do_sample",
        "evaluation.interval evaluation.at_start evaluation.at_end evaluation.sources evaluation.num_samples "
        "evaluation.temperature evaluation.max_prompts",
        _held_out,
    ),
    lacks(
        "actor_rollout_ref.rollout.val_kwargs.top_p actor_rollout_ref.rollout.val_kwargs.top_k",
        "an evaluation samples from the whole distribution",
    ),
    maps("data.shuffle", "prompts.shuffle"),
    differs(
        "data.seed",
        "run.seed",
        "one seed for the order of the data and for sampling",
        lambda value: value if isinstance(value, int) else 0,
    ),
    joint(
        "data.max_prompt_length data.max_response_length actor_rollout_ref.rollout.max_model_len",
        "generator.sampling.max_tokens training.max_seq_len",
        schedules.lengths,
    ),
    lacks(
        "data.filter_overlong_prompts data.filter_overlong_prompts_workers",
        "a prompt that leaves no room for its completion is dropped with a warning; a shorter one is kept",
    ),
    lacks("data.truncation", "prompts are never cut: one that leaves no room for its completion is dropped"),
    lacks("data.gen_batch_size data.val_batch_size", "generation goes on group by group, not in batches"),
    lacks("data.reward_fn_key", "a reward reads task.metadata"),
    lacks(
        "data.apply_chat_template_kwargs",
        "write the switch into prompts.template (`/no_think`), or set generator.chat_template",
    ),
    lacks(
        "data.tool_config_path data.function_tool_path",
        "tools belong to an episode: episode.kind, and the guide on agents",
    ),
    lacks("data.custom_cls.*", "prompts come from files, datasets and tasks: a task of your own is module:attribute"),
    lacks("data.tokenizer", "the tokenizer is that of the model's folder"),
    lacks(
        "data.image_patch_size data.image_key data.video_key data.audio_key data.return_multi_modal_inputs "
        "data.mm_processor_kwargs",
        "models are for text",
    ),
    lacks(
        "data.use_shm data.dataloader_num_workers data.validation_shuffle data.return_raw_input_ids "
        "data.return_raw_chat data.return_full_prompt data.trust_remote_code",
        "there is nothing to choose",
    ),
    joint(
        "custom_reward_function.path custom_reward_function.name reward.custom_reward_function.path "
        "reward.custom_reward_function.name",
        "rewards.functions",
        _rewards,
    ),
    joint(
        "reward.reward_model.enable reward.reward_model.model_path reward_model.enable reward_model.model.path",
        "",
        _reward_model,
    ),
    lacks("reward.reward_model.* reward_model.*", "the section rewards.reward_model says how a reward model runs"),
    differs("reward.num_workers", "rewards.num_workers", "processes that score, each one completion at a time"),
    lacks("reward.reward_manager.*", "a reward is a function of one completion; rewards.overlong is DAPO's punishment"),
    lacks("reward.sandbox_fusion.* sandbox_fusion.*", "the reward `code` runs programs in a sandbox of its own"),
    always(
        {"rewards.on_error": "stop"}, "an exception in a reward ends a run of verl; `zero` would count it and go on"
    ),
]

OPTIMIZER_RULES = [
    maps(f"{OPTIM}.lr", "training.learning_rate", as_float),
    joint(
        f"{OPTIM}.lr_warmup_steps {OPTIM}.lr_warmup_steps_ratio",
        "training.warmup_steps training.warmup_ratio",
        schedules.warmup,
    ),
    joint(
        f"{OPTIM}.lr_scheduler_type {OPTIM}.warmup_style {OPTIM}.min_lr_ratio {OPTIM}.num_cycles "
        f"{OPTIM}.lr_decay_style {OPTIM}.min_lr",
        "training.schedule training.min_lr_ratio",
        schedules.schedule,
    ),
    differs(
        f"{OPTIM}.weight_decay",
        "training.weight_decay",
        "norms and biases are left out here; verl's optimizer decays every weight",
        as_float,
    ),
    joint(f"{OPTIM}.betas", "training.beta1 training.beta2", _betas),
    maps(f"{OPTIM}.clip_grad", "training.max_grad_norm", positive),
    joint(f"{ACTOR}.grad_clip", "", _no_clipping),
    joint(f"{OPTIM}.optimizer", "", _optimizer),
    lacks(
        f"{OPTIM}.optimizer_impl {OPTIM}.override_optimizer_config",
        "training.optimizer_args are those of muon or of an optimizer of your own",
    ),
    lacks(f"{OPTIM}.total_training_steps {OPTIM}.zero_indexed_step", "the schedule covers all steps of the run"),
    lacks(f"{OPTIM}.*", "training.optimizer takes adamw, muon, or module:attribute of your own"),
    joint(
        f"data.train_batch_size {ACTOR}.ppo_mini_batch_size {ACTOR}.ppo_epochs actor_rollout_ref.rollout.n",
        "rollout.batch_groups rollout.group_size rollout.iterations",
        schedules.batch,
    ),
    joint(
        f"{ACTOR}.use_dynamic_bsz {ACTOR}.ppo_max_token_len_per_gpu {ACTOR}.ppo_micro_batch_size_per_gpu",
        "training.microbatch_tokens",
        schedules.micro_batches,
    ),
    lacks(f"{ACTOR}.ppo_micro_batch_size", "training.microbatch_tokens bounds what a GPU takes at once"),
    lacks(f"{ACTOR}.shuffle {ACTOR}.data_loader_seed", "a batch is one optimizer step, so its order changes nothing"),
    lacks(f"{ACTOR}.rollout_n", "rollout.group_size says it"),
]

MODEL_RULES = [
    joint(f"{MODEL}.path", "model.path model.hf_repo", _model),
    joint(
        f"{MODEL}.lora_rank {MODEL}.lora_alpha {MODEL}.target_modules {MODEL}.lora_adapter_path {MODEL}.lora.rank "
        f"{MODEL}.lora.alpha",
        "adapter.rank adapter.alpha adapter.targets adapter.path",
        _adapter,
    ),
    lacks(f"{MODEL}.lora.* {MODEL}.exclude_modules", "adapter.targets lists the layers with an adapter"),
    maps(f"{MODEL}.enable_gradient_checkpointing", "training.activation_checkpointing", full_or_none),
    maps(f"{MODEL}.enable_activation_offload", "training.activation_offload"),
    lacks(f"{MODEL}.hf_config_path {MODEL}.tokenizer_path", "config.json and tokenizer are in the model's folder"),
    lacks(f"{MODEL}.custom_chat_template", "generator.chat_template names a Jinja file"),
    lacks(f"{MODEL}.override_config", "keys of `model` win over the model's config.json"),
    lacks(
        f"{MODEL}.external_lib {MODEL}.trust_remote_code", "model.family: module:attribute defines a family of your own"
    ),
    lacks(f"{MODEL}.use_remove_padding {ACTOR}.use_remove_padding", "nothing is ever padded"),
    lacks(
        f"{MODEL}.use_liger {MODEL}.use_fused_kernels {MODEL}.fused_kernel_options.* {ACTOR}.use_fused_kernels",
        "the output layer never holds all logits, with kernels of ours",
    ),
    lacks(f"{MODEL}.tiled_mlp.*", "training.microbatch_tokens and activation_checkpointing bound the memory"),
    lacks(f"{MODEL}.mtp.*", "there is no multi-token prediction"),
    lacks(f"{MODEL}.use_shm", "there is nothing to choose"),
]
