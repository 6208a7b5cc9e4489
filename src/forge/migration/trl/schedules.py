"""Learning rate, precision and parallelism of `transformers.TrainingArguments`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.migration.models import dtype_name
from forge.migration.reading import mapping_of, truth
from forge.migration.records import Converted, PeerConfig
from forge.migration.rules import changed, lacking
from forge.migration.trl.batches import processes_of


def schedule(config: PeerConfig) -> Converted:
    """Convert the shape of the learning rate after the warm-up."""
    name, kwargs = config["lr_scheduler_type"], mapping_of(config["lr_scheduler_kwargs"])
    if name in ("linear", "cosine", "constant", "constant_with_warmup"):
        return Converted({"training.schedule": str(name).removesuffix("_with_warmup")})
    if name == "cosine_with_min_lr":
        ratio = kwargs.get("min_lr_rate")
        if ratio is None and isinstance(kwargs.get("min_lr"), int | float):
            ratio = kwargs["min_lr"] / config["learning_rate"]
        return Converted({"training.schedule": "cosine", "training.min_lr_ratio": ratio or 0.0})
    if name == "warmup_stable_decay":
        values: dict[str, Any] = {"training.schedule": "wsd"}
        decay, total = kwargs.get("num_decay_steps"), config["max_steps"]
        if isinstance(decay, int) and isinstance(total, int) and 0 < decay <= total:
            values["training.decay_ratio"] = decay / total
        if "min_lr_ratio" in kwargs:
            values["training.min_lr_ratio"] = kwargs["min_lr_ratio"]
        return changed(values, "the decay is a straight line here, a cosine in transformers unless decay_type says so")
    if name == "cosine_with_restarts" and kwargs.get("num_cycles", 1) == 1:
        return Converted({"training.schedule": "cosine"})
    if name == "polynomial" and kwargs.get("power", 1.0) == 1.0:
        return changed({"training.schedule": "linear"}, "transformers ends at lr_end, 1e-7 by default; here at 0")
    note = f"the shapes here are constant, linear, cosine and wsd; {name} becomes constant: choose one of them"
    return lacking(note, {"training.schedule": "constant"})


def warmup(config: PeerConfig) -> Converted:
    """Convert the warm-up: steps, or below 1 a fraction of all steps."""
    steps, ratio = config["warmup_steps"], config["warmup_ratio"]
    if config["lr_scheduler_type"] == "constant":
        note = "lr_scheduler_type constant ignores it" if steps or ratio else None
        return Converted({"training.warmup_steps": 0}, note=note)
    part = steps if isinstance(steps, float) and 0 < steps < 1 else None if steps else ratio
    note = "with W steps of warm-up, step s uses (s + 1) / W of the rate here, s / W in transformers: never 0"
    if part:
        return changed({"training.warmup_ratio": part}, note)
    if isinstance(steps, int | float) and steps >= 1:
        return changed({"training.warmup_steps": int(steps)}, note)
    return Converted({"training.warmup_steps": 0})


def precision(config: PeerConfig) -> Converted:
    """Convert what is computed in, and what weights are kept in."""
    half, brain = config["fp16"] is True, truth(config["bf16"])
    brain = not half if brain is None else brain
    inits = mapping_of(config["model_init_kwargs"])
    others = sorted(set(inits) - {"dtype", "torch_dtype"})
    found = _precision(config, inits, half=half, brain=bool(brain))
    if not others:
        return found
    note = f"of model_init_kwargs, {', '.join(others)} cannot be set here"
    return changed(found.values, "; ".join(filter(None, [found.note, note])))


def _precision(config: PeerConfig, inits: Mapping[str, Any], *, half: bool, brain: bool) -> Converted:
    kept = dtype_name(inits.get("dtype", inits.get("torch_dtype", config["dtype"]))) or "float32"
    if half:
        return Converted({"distributed.precision": "float16"})
    if kept in ("bfloat16", "auto") and not config["use_peft"]:
        note = "weights in bfloat16, as `dtype` says: every weight, gradient and optimizer state is bfloat16 too"
        if kept == "auto":
            note = (
                "dtype auto takes the dtype of the model's files, which is usually bfloat16; `bfloat16` keeps float32"
            )
        return changed({"distributed.precision": "bfloat16_pure"}, note)
    is_half = brain or kept in ("bfloat16", "auto")
    return Converted({"distributed.precision": "bfloat16" if is_half else "float32"})


def optimizer(config: PeerConfig) -> Converted | None:
    """Convert the optimizer's name: AdamW in any implementation is ours."""
    name = config["optim"]
    if name in ("default_optim", "adamw_apex_fused", "adamw_hf") or str(name).startswith("adamw_torch"):
        return None
    if "adamw" in str(name) and ("8bit" in str(name) or "4bit" in str(name) or "paged" in str(name)):
        note = "no 8-bit or paged states: bfloat16 halves AdamW's memory instead; training.beta2 is then at most 0.99"
        return lacking(note, {"training.optimizer": "adamw"})
    note = "training.optimizer takes adamw, muon, or module:attribute of a torch.optim.Optimizer; it becomes adamw"
    return lacking(note, {"training.optimizer": "adamw"})


def layout(config: PeerConfig) -> Converted:
    """Convert how processes share a model: copies (DDP), or shards (FSDP, DeepSpeed ZeRO)."""
    count = processes_of(config)
    if count == 1:
        return Converted({"distributed.shard": 1})
    stage = _zero_stage(config["deepspeed"], config["accelerate_config"])
    is_fsdp = bool(config["fsdp"] or config["fsdp_config"] or "fsdp" in str(config["accelerate_config"]).lower())
    if is_fsdp or stage:
        what = "FSDP" if is_fsdp else f"ZeRO stage {stage}"
        note = f"{what} becomes FSDP2 over {count} ranks: weights, gradients and states are sharded"
        return changed({"distributed.shard": count}, note)
    note = (
        f"DDP: {count} whole copies. distributed.shard: {count} with replicate: 1 shards them, with the same gradient"
    )
    return changed({"distributed.replicate": count, "distributed.shard": 1}, note)


def _zero_stage(deepspeed: Any, accelerate: Any) -> int:
    """The ZeRO stage of a DeepSpeed configuration; 3 for a file that is not read, 0 without DeepSpeed."""
    if isinstance(deepspeed, Mapping):
        section = deepspeed.get("zero_optimization")
        return int(section.get("stage", 0)) if isinstance(section, Mapping) else 0
    for name in filter(None, (deepspeed, accelerate)):
        digits = [letter for letter in str(name) if letter in "123"]
        if "zero" in str(name).lower() and digits:
            return int(digits[0])
    return 3 if deepspeed else 0
