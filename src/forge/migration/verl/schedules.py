"""Learning rates, batches and lengths of verl."""

from __future__ import annotations

from typing import Any, Final

from forge.migration.records import Converted, PeerConfig
from forge.migration.rules import changed, lacking

OPTIM: Final = "actor_rollout_ref.actor.optim"
ACTOR: Final = "actor_rollout_ref.actor"


MEGATRON: Final = f"{ACTOR}.megatron"
_STYLES: Final = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}


def is_megatron(config: PeerConfig) -> bool:
    """Whether the trainer is Megatron's."""
    named = (config["model_engine"], config["--config-name"], config[f"{ACTOR}.strategy"])
    return any("megatron" in str(each) for each in named)


def schedule_of(name: Any) -> str:
    """Return our schedule for verl's name: constant or cosine."""
    return "cosine" if name == "cosine" else "constant"


def updates_of(config: PeerConfig) -> int:
    """Return how many optimizer steps verl takes on the prompts of one iteration, for each of its epochs."""
    whole, mini = config["data.train_batch_size"], config[f"{ACTOR}.ppo_mini_batch_size"]
    if isinstance(whole, int) and isinstance(mini, int) and 0 < mini < whole:
        return -(-whole // mini)
    return 1


def batch(config: PeerConfig) -> Converted:
    """Convert batch sizes: one optimizer step of verl is one step of ours."""
    whole, mini, group = config["data.train_batch_size"], config[f"{ACTOR}.ppo_mini_batch_size"], _group(config)
    if not all(isinstance(each, int) and each > 0 for each in (whole, mini)):
        return Converted(todo={"rollout.batch_groups": "prompts of an optimizer step (ppo_mini_batch_size)"})
    count, epochs = updates_of(config), config[f"{ACTOR}.ppo_epochs"]
    groups = min(whole, mini)
    values: dict[str, Any] = {
        "rollout.batch_groups": groups,
        "rollout.group_size": group,
        "rollout.iterations": epochs,
    }
    if count == 1:
        return Converted(values)
    note = (
        f"verl takes {count} optimizer steps of {groups} prompts on what it samples at once; here every step is "
        f"sampled by the newest weights, and there are {count} times as many. rollout.staleness: {count - 1} (with "
        "placement apart, beside or shared) lets samples be as old as with verl"
    )
    return changed(values, note)


def _group(config: PeerConfig) -> int:
    found = config["actor_rollout_ref.rollout.n"]
    return found if isinstance(found, int) and found > 0 else 1


def length(config: PeerConfig) -> Converted:
    """Convert the number of iterations or epochs."""
    steps, epochs, count = config["trainer.total_training_steps"], config["trainer.total_epochs"], updates_of(config)
    if isinstance(steps, int) and steps > 0:
        values = {"training.max_steps": steps * count}
        note = f"verl counts iterations of {count} optimizer steps"
        return Converted(values) if count == 1 else changed(values, note)
    if isinstance(epochs, int) and epochs > 0:
        return Converted({"training.num_epochs": epochs})
    return Converted(todo={"training.max_steps": "the number of optimizer steps"})


def warmup(config: PeerConfig) -> Converted:
    """Convert the warm-up, which verl counts in iterations."""
    steps, ratio = config[f"{OPTIM}.lr_warmup_steps"], config[f"{OPTIM}.lr_warmup_steps_ratio"]
    note = "verl's rate changes once per iteration; with W steps of warm-up, step s uses (s + 1) / W of it here"
    if isinstance(steps, int) and steps > 0:
        return changed({"training.warmup_steps": steps * updates_of(config)}, note)
    if isinstance(ratio, int | float) and ratio > 0:
        return changed({"training.warmup_ratio": float(ratio)}, note)
    return Converted({"training.warmup_steps": 0})


def schedule(config: PeerConfig) -> Converted:
    """Convert the shape of the learning rate."""
    if is_megatron(config):
        return _megatron_schedule(config)
    name = config[f"{OPTIM}.warmup_style"] or config[f"{OPTIM}.lr_scheduler_type"]
    values: dict[str, Any] = {"training.schedule": schedule_of(name)}
    if values["training.schedule"] == "cosine":
        values["training.min_lr_ratio"] = float(config[f"{OPTIM}.min_lr_ratio"] or 0.0)
        if config[f"{OPTIM}.num_cycles"] != 0.5:
            return lacking("a cosine falls once from the highest rate to the lowest", values)
    return Converted(values)


def _megatron_schedule(config: PeerConfig) -> Converted:
    style, rate = config[f"{OPTIM}.lr_decay_style"], float(config[f"{OPTIM}.lr"])
    if style not in _STYLES:
        return lacking(f"the shapes here are constant, linear, cosine and wsd; {style} becomes constant")
    values: dict[str, Any] = {"training.schedule": _STYLES[style]}
    if style != "constant":
        values["training.min_lr_ratio"] = float(config[f"{OPTIM}.min_lr"] or 0.0) / rate
    return Converted(values)


def intervals(config: PeerConfig, key: str) -> int | None:
    """Return an interval that verl counts in iterations, in our steps; null for none."""
    every = config[key]
    return every * updates_of(config) if isinstance(every, int) and every > 0 else None


def lengths(config: PeerConfig) -> Converted:
    """Convert what bounds prompts and completions."""
    prompt, response, whole = (
        config["data.max_prompt_length"],
        config["data.max_response_length"],
        config["actor_rollout_ref.rollout.max_model_len"],
    )
    if not isinstance(prompt, int) or not isinstance(response, int):
        return Converted(todo={"training.max_seq_len": "the longest prompt and completion together"})
    longest = prompt + response
    values = {"generator.sampling.max_tokens": response, "training.max_seq_len": longest}
    if isinstance(whole, int) and whole < longest:
        values["training.max_seq_len"] = whole
    return Converted(values)


def micro_batches(config: PeerConfig) -> Converted | None:
    """Convert what one GPU takes through the model at once."""
    longest = lengths(config).values.get("training.max_seq_len")
    if longest is None:
        return None
    if config[f"{ACTOR}.use_dynamic_bsz"]:
        tokens = config[f"{ACTOR}.ppo_max_token_len_per_gpu"]
    else:
        rows = config[f"{ACTOR}.ppo_micro_batch_size_per_gpu"]
        tokens = rows * longest if isinstance(rows, int) else None
    if not isinstance(tokens, int):
        return None
    note = "tokens, packed without padding; gradients do not depend on it"
    return changed({"training.microbatch_tokens": max(tokens, longest)}, note)
