"""What TitanRL's model, optimizer, ranks, generators and files become here."""

from __future__ import annotations

from typing import Any, Final

from forge.migration.models import dtype_name, is_unreadable_path, run_folder
from forge.migration.python_source import Call
from forge.migration.reading import peer_keys
from forge.migration.records import Computed, Converted, PeerConfig
from forge.migration.rules import as_float, changed, lacking
from forge.migration.titanrl.loop_values import LOOP, TRAINER, class_of

PARALLEL: Final = "trainer.parallelism"
RATES: Final = "trainer.lr_scheduler"
SAVING: Final = "trainer.checkpoint"
_PRESETS: Final = {
    ("qwen3", "0.6B"): "qwen3_0_6b",
    ("qwen3", "1.7B"): "qwen3_1_7b",
    ("qwen3", "4B"): "qwen3_4b",
    ("qwen3", "8B"): "qwen3_8b",
    ("qwen3", "32B"): "qwen3_32b",
    ("qwen3", "30B-A3B"): "qwen3_30b_a3b",
    ("llama3", "8B"): "llama3_1_8b",
    ("llama3", "1B"): "llama3_2_1b",
}


# ---- Model and optimizer


def model(config: PeerConfig) -> Converted:
    folder = config["hf_assets_path"]
    spec = config["model_spec"]
    values: dict[str, Any] = {}
    if isinstance(spec, Call) and spec.args:
        size = str(spec.args[0])
        families = [family for family, each in _PRESETS if each == size]
        family = next((each for each in families if each in spec.name), families[0] if len(families) == 1 else None)
        if family is not None:
            values["model.preset"] = _PRESETS[family, size]
        if any("LMHeadCast" in str(each) for each in _converters(spec)):
            values["model.head_precision"] = "float32"
    if not isinstance(folder, str) or not config.is_given("hf_assets_path") or is_unreadable_path(folder):
        return Converted(values, todo={"model.path": "the folder of the model (hf_assets_path)"})
    return Converted({**values, "model.path": folder.removeprefix("./")})


def _converters(spec: Call) -> list[Any]:
    given = spec.kwargs.get("converters")
    return given if isinstance(given, list) else []


def optimizer(config: PeerConfig) -> Converted:
    """Convert AdamW's numbers, of `default_adamw` or of the one group of parameters."""
    made, groups = config["trainer.optimizer"], config["trainer.optimizer.param_groups"]
    given: dict[str, Any] = dict(peer_keys("titanrl")["groups"]["default_adamw"])
    note = ""
    if isinstance(made, Call) and made.last_name == "default_adamw":
        given |= {key: value for key, value in made.kwargs.items() if key in given}
        given |= {"lr": made.args[0]} if made.args else {}
    elif isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], Call):
        kwargs = groups[0].kwargs.get("optimizer_kwargs")
        given |= kwargs if isinstance(kwargs, dict) else {}
        if groups[0].kwargs.get("optimizer_name") not in ("AdamW", None):
            note = "training.optimizer takes adamw, muon, or module:attribute of your own; it becomes adamw"
    elif isinstance(made, Call) or groups:
        note = "several groups of parameters: training.optimizer takes module:attribute of your own"
    computed = {key: value for key, value in given.items() if isinstance(value, Computed)}
    if computed:
        text = "; ".join(f"{key} is `{value}`" for key, value in computed.items())
        return Converted(todo={"training.learning_rate": f"{text} in the file, which is not run: write the numbers"})
    betas = given["betas"]
    values: dict[str, Any] = {
        "training.learning_rate": float(given["lr"]),
        "training.weight_decay": float(given["weight_decay"]),
        "training.beta1": float(betas[0]),
        "training.beta2": float(betas[1]),
        "training.adam_eps": float(given["eps"]),
    }
    if config["trainer.optimizer.implementation"] == "fused_opt_states_bf16":
        values["training.optimizer_dtype"] = "bfloat16"
    if note or not values["training.weight_decay"]:
        return lacking(note, values) if note else Converted(values)
    return changed(values, "weight decay leaves out norms and biases here; TorchTitan's decays every weight")


def schedule(config: PeerConfig) -> Converted:
    """Convert the learning rate: stable after the warm-up, and a decay over the last part of the steps."""
    decay, kind, least = config[f"{RATES}.decay_ratio"], config[f"{RATES}.decay_type"], config[f"{RATES}.min_lr_factor"]
    if least == 1.0:
        return Converted({"training.schedule": "constant"})
    values: dict[str, Any] = {"training.min_lr_ratio": float(least)}
    if decay is None and kind in ("linear", "cosine"):
        return Converted({**values, "training.schedule": kind})
    values |= {"training.schedule": "wsd", "training.decay_ratio": float(decay or 1.0)}
    if kind != "linear":
        return lacking(f"the decay of wsd is a straight line, not {kind}", values)
    return Converted(values)


def warmup(config: PeerConfig) -> Converted:
    steps, most = config[f"{RATES}.warmup_steps"], config[f"{LOOP}.num_training_steps"]
    if isinstance(steps, int) and isinstance(most, int) and steps > most:
        return changed(
            {"training.warmup_steps": most}, f"TitanRL shortens a warm-up of {steps} steps to the run's {most}"
        )
    return Converted({"training.warmup_steps": steps})


def precision(config: PeerConfig) -> Converted:
    kept, computed = config["trainer.training.dtype"], config["trainer.training.mixed_precision_param"]
    if kept == "bfloat16":
        return Converted({"distributed.precision": "bfloat16_pure"})
    return Converted({"distributed.precision": dtype_name(computed) or "bfloat16"})


def layout(config: PeerConfig) -> Converted:
    shard = config[f"{PARALLEL}.data_parallel_shard_degree"]
    values: dict[str, Any] = {
        "distributed.replicate": config[f"{PARALLEL}.data_parallel_replicate_degree"],
        "distributed.shard": max(1, shard) if isinstance(shard, int) else 1,
        "distributed.tensor": config[f"{PARALLEL}.tensor_parallel_degree"],
        "distributed.pipeline": config[f"{PARALLEL}.pipeline_parallel_degree"],
        "distributed.expert": config[f"{PARALLEL}.expert_parallel_degree"],
        "distributed.sequence_parallel": config[f"{PARALLEL}.enable_sequence_parallel"],
    }
    context = config[f"{PARALLEL}.context_parallel_degree"]
    if isinstance(context, int) and context > 1:
        return lacking("sequences are not split over ranks: training.activation_checkpointing holds long ones", values)
    return Converted(values)


def recompute(config: PeerConfig) -> Converted:
    given = config[f"{TRAINER}.ac_config"]
    if given is None:
        return Converted({"training.activation_checkpointing": "none"})
    name = class_of(given)
    known = {"SelectiveAC": "selective", "FullAC": "full", "selective": "selective", "full": "full", "none": "none"}
    if name in known:
        return Converted({"training.activation_checkpointing": known[name]})
    return lacking(
        "activation checkpointing is none, selective or full", {"training.activation_checkpointing": "selective"}
    )


def offload(config: PeerConfig) -> Converted | None:
    if not config["trainer.training.enable_cpu_offload"]:
        return None
    return lacking("weights and optimizer states stay on the GPU: training.optimizer_dtype, more ranks, `forge plan`")


# ---- Generators and output


def generators(config: PeerConfig) -> Converted:
    replicas, copies = config["num_generators"], config["generator.parallelism.data_parallel_degree"]
    values: dict[str, Any] = {
        "generator.engine": "vllm",
        "placement": "apart",
        "generator.num_replicas": replicas * copies,
        "generator.tensor_parallel": config["generator.parallelism.tensor_parallel_degree"],
        "generator.gpu_memory_share": as_float(config["generator.gpu_memory_limit"]),
    }
    if copies > 1:
        return changed(values, f"each of {copies} data-parallel engines is a replica of its own")
    return Converted(values)


def update(config: PeerConfig) -> Converted:
    """Convert what happens to completions in progress when new weights arrive."""
    if not config["generator_router.hot_swap"]:
        return Converted({"generator.update.mode": "drain"})
    mode = "recompute" if config["generator.reset_running_requests_on_weight_sync"] else "keep"
    return Converted({"generator.update.mode": mode})


def folder(config: PeerConfig) -> Converted:
    folder = config["dump_folder"]
    if not isinstance(folder, str) or is_unreadable_path(folder):
        return Converted(todo={"run.output_dir": f"dump_folder is {folder}: write the folder out"})
    return Converted(run_folder(folder, None))


def saving(config: PeerConfig) -> Converted:
    values: dict[str, Any] = {"checkpointing.save_interval_s": None}
    if not config[f"{SAVING}.enable"]:
        note = "the last step is always saved; without checkpoint.enable TitanRL also starts from random weights"
        return changed({**values, "checkpointing.save_interval": None}, note)
    values["checkpointing.save_interval"] = config[f"{SAVING}.interval"]
    keep = config[f"{SAVING}.keep_latest_k"]
    values["checkpointing.keep"] = keep if isinstance(keep, int) and keep > 0 else 1000
    values["checkpointing.asynchronous"] = config[f"{SAVING}.async_mode"] != "disabled"
    values["checkpointing.resume"] = "auto"
    return changed(
        values, "a restart resumes from the newest checkpoint, as there; checkpoints of TitanRL cannot be read"
    )
