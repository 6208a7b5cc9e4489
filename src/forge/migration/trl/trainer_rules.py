"""The table of `transformers.TrainingArguments`, which every configuration of TRL derives from."""

from __future__ import annotations

from typing import Any

from forge.migration.models import names_of, run_folder, run_name, sink_values
from forge.migration.records import Converted, PeerConfig, Rule
from forge.migration.rules import (
    always,
    as_float,
    changed,
    differs,
    full_or_none,
    inverted,
    joint,
    lacking,
    lacks,
    maps,
    positive,
)
from forge.migration.trl import schedules
from forge.migration.trl.batches import run_length

_ONE_LOOP = "there is one loop for all of them, without such a switch"


def _folder(config: PeerConfig) -> Converted | None:
    given = config["output_dir"]
    if given is None:
        return Converted({"run.name": run_name(str(config["run_name"]))}) if config["run_name"] else None
    if not isinstance(given, str) or given.startswith("~") or "$" in given:
        return Converted(todo={"run.output_dir": f"output_dir is {given}: write the folder out"})
    return Converted(run_folder(given, config["run_name"]))


def _logging(config: PeerConfig) -> Converted | None:
    steps, strategy = config["logging_steps"], config["logging_strategy"]
    if strategy == "steps" and isinstance(steps, int | float) and steps >= 1:
        return Converted({"metrics.log_interval": int(steps)})
    if strategy == "no":
        return lacking("metrics are always recorded; metrics.log_interval spaces lines on the console")
    note = "an interval is a number of steps: set metrics.log_interval"
    return lacking(note)


def _sinks(config: PeerConfig) -> Converted:
    values, others = sink_values(names_of(config["report_to"]))
    if not others:
        return Converted(values)
    note = f"no sink for {', '.join(others)}: metrics.sinks takes module:attribute of your own; metrics.jsonl is on"
    return lacking(note, values)


def _saving(config: PeerConfig) -> Converted:
    strategy, steps, limit = config["save_strategy"], config["save_steps"], config["save_total_limit"]
    values: dict[str, Any] = {"checkpointing.save_interval_s": None}
    if strategy in ("no", "best"):
        values["checkpointing.save_interval"] = None
        note = "the last step is always saved; checkpointing.save_interval is null"
        return changed(values, note)
    if strategy == "steps" and isinstance(steps, int | float) and steps >= 1:
        values["checkpointing.save_interval"] = int(steps)
    else:
        note = "an interval is a number of steps: set checkpointing.save_interval"
        return lacking(note, values)
    if isinstance(limit, int) and limit > 0:
        return Converted({**values, "checkpointing.keep": limit})
    return changed(values, "save_total_limit null keeps every checkpoint; here the newest checkpointing.keep, 2, stay")


def _best(config: PeerConfig) -> Converted:
    if config["load_best_model_at_end"]:
        note = "the checkpoint with the best validation loss is kept (keep_best); load it by its path"
        return changed({"checkpointing.keep_best": True}, note)
    return Converted({"checkpointing.keep_best": False})


def _resume(config: PeerConfig) -> Converted | None:
    value = config["resume_from_checkpoint"]
    if not value:
        return None
    return lacking("checkpoints of transformers cannot be resumed from; a run of ours continues with --resume")


def _device(config: PeerConfig) -> Converted | None:
    return Converted({"distributed.with_gpus": False}) if config["use_cpu"] else None


def _averaging(config: PeerConfig) -> Converted | None:
    if config["average_tokens_across_devices"] is not False:
        return None
    return lacking("the mean is always over the tokens of all processes and of all accumulated batches")


def common_rules() -> list[Rule]:
    """Return the rules that hold for every kind of run."""
    return [*_OPTIMIZER, *_PRECISION, *_OUTPUT, *_WITHOUT_EFFECT]


_OPTIMIZER = [
    joint("num_train_epochs max_steps", "training.max_steps training.num_epochs", run_length),
    maps("learning_rate", "training.learning_rate", as_float),
    joint(
        "lr_scheduler_type lr_scheduler_kwargs",
        "training.schedule training.min_lr_ratio training.decay_ratio",
        schedules.schedule,
    ),
    joint("warmup_steps warmup_ratio", "training.warmup_steps training.warmup_ratio", schedules.warmup),
    joint("optim", "training.optimizer", schedules.optimizer),
    lacks(
        "optim_args optim_target_modules", "training.optimizer_args are those of muon or of an optimizer of your own"
    ),
    maps("weight_decay", "training.weight_decay", as_float),
    maps("adam_beta1", "training.beta1", as_float),
    maps("adam_beta2", "training.beta2", as_float),
    maps("adam_epsilon", "training.adam_eps", as_float),
    maps("max_grad_norm", "training.max_grad_norm", positive),
    joint("average_tokens_across_devices", "", _averaging),
    lacks("label_smoothing_factor", "training.loss takes module:attribute of a loss of your own: loss.function"),
    lacks("neftune_noise_alpha", "no noise is added to embeddings"),
]

_PRECISION = [
    joint("bf16 fp16 dtype model_init_kwargs", "distributed.precision", schedules.precision),
    joint(
        "deepspeed fsdp fsdp_config num_processes accelerate_config",
        "distributed.replicate distributed.shard",
        schedules.layout,
    ),
    lacks("parallelism_config", "distributed.tensor, pipeline and expert are the degrees besides data parallelism"),
    lacks(
        "accelerator_config num_machines", "launcher and distributed.hosts say where ranks run: see the guide on hosts"
    ),
    maps("gradient_checkpointing", "training.activation_checkpointing", full_or_none),
    lacks("gradient_checkpointing_kwargs", "nothing to set: recomputation is not reentrant"),
    maps("torch_compile", "training.compile"),
    lacks("torch_compile_backend torch_compile_mode", "layers are compiled with torch.compile's defaults"),
    joint("use_cpu", "distributed.with_gpus", _device),
    lacks("tf32", "set it in the environment of the workers: workers.trainer.env with NVIDIA_TF32_OVERRIDE"),
    lacks("bf16_full_eval fp16_full_eval", "evaluation computes in what training computes in"),
    lacks("use_liger_kernel liger_kernel_config", "the output layer never holds all logits, with kernels of ours"),
    lacks("use_cache", "the trainer has no KV cache"),
    lacks("torch_empty_cache_steps", "training.microbatch_tokens bounds the memory"),
    lacks("auto_find_batch_size", "training.microbatch_tokens bounds the memory; `forge plan` says what fits"),
]

_OUTPUT = [
    joint(
        "output_dir run_name",
        "run.output_dir run.name",
        _folder,
        verdict="differs",
        note="a run writes to run.output_dir/run.name; the final weights are in checkpoints/hf there",
    ),
    joint("logging_steps logging_strategy", "metrics.log_interval", _logging),
    lacks(
        "logging_first_step", "the first step is always recorded; the console shows every metrics.log_interval steps"
    ),
    differs(
        "logging_nan_inf_filter",
        "training.on_nonfinite",
        "a step that is not finite ends the run, or is skipped",
        lambda _: "stop",
    ),
    lacks("log_level log_level_replica log_on_each_node", "each process logs to the controller, which prints it"),
    maps("disable_tqdm", "metrics.progress", lambda value: None if value is None else inverted(value)),
    lacks("include_num_input_tokens_seen", "train/num_tokens is always recorded"),
    joint("report_to", "metrics.wandb metrics.tensorboard metrics.sinks", _sinks),
    lacks(
        "project trackio_space_id trackio_bucket_id trackio_static_space_id",
        "there is no sink for Trackio: metrics.sinks takes your own",
    ),
    joint(
        "save_strategy save_steps save_total_limit",
        "checkpointing.save_interval checkpointing.save_interval_s checkpointing.keep",
        _saving,
    ),
    lacks("save_only_model", "a checkpoint holds everything to resume; checkpoints/hf holds the model alone"),
    lacks("save_on_each_node", "checkpoints belong on a folder that all hosts share"),
    lacks("enable_jit_checkpoint", "SIGTERM always saves: checkpointing.grace_s bounds how long a step may still take"),
    joint("load_best_model_at_end metric_for_best_model greater_is_better", "checkpointing.keep_best", _best),
    lacks(
        "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision",
        "upload the folder checkpoints/hf of the run: huggingface-cli upload",
    ),
    joint("resume_from_checkpoint", "", _resume),
    lacks(
        "ignore_data_skip restore_callback_states_from_checkpoint", "a resume continues at the same token, bit for bit"
    ),
    always({"checkpointing.resume": "never"}, "a run starts anew unless --resume is given"),
    differs("seed", "run.seed", "the same number gives other random choices than in transformers"),
    lacks("data_seed", "run.seed decides the order of the data too"),
    lacks("full_determinism", "on a CPU a run is always reproducible bit for bit; on a GPU kernels may differ"),
]

_WITHOUT_EFFECT = [
    lacks(
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
        "data is read ahead in the trainer's process; there is nothing to tune",
    ),
    lacks("label_names length_column_name", "the format of a record says what its columns are: columns renames them"),
    lacks(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend",
        "ranks synchronise with FSDP2, which has no such options",
    ),
    lacks("ddp_timeout", "recovery and the workers' timeouts say how long a process may take"),
    lacks("debug skip_memory_metrics", "`forge report` and trace.json show time; `forge plan` shows memory"),
    lacks("do_train do_eval do_predict", _ONE_LOOP),
    lacks("local_rank", "forge run starts the ranks"),
    lacks(
        "per_device_eval_batch_size eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
        "batch_eval_metrics prediction_loss_only",
        "the size of an evaluation's batches changes nothing that is reported",
    ),
    lacks("include_for_metrics", "metrics of your own: forge.record_metric"),
    lacks("env", "set them in the shell, or in workers.NAME.env"),
]
