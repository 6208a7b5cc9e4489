"""What TitanRL's loop, rollouts and loss become here."""

from __future__ import annotations

import re
from typing import Any, Final

from forge.migration.models import own_reward
from forge.migration.python_source import Call
from forge.migration.records import Converted, PeerConfig
from forge.migration.rules import changed, lacking

LOOP: Final = "async_loop"
TRAINER: Final = "trainer"


def class_of(value: Any) -> str:
    """Return the class that a section is made from: `DAPOLoss` for `losses.DAPOLoss.Config`."""
    return str(value).removesuffix(".Config").rpartition(".")[2]


def run_length(config: PeerConfig) -> Converted:
    return Converted({"training.max_steps": config[f"{LOOP}.num_training_steps"]})


def batch(config: PeerConfig) -> Converted:
    return Converted(
        {
            "rollout.batch_groups": config[f"{LOOP}.num_prompts_per_train_step"],
            "rollout.group_size": config[f"{LOOP}.num_samples_per_prompt"],
        }
    )


def staleness(config: PeerConfig) -> Converted:
    """Convert how old samples may be: TitanRL aims at a number of steps, ours bounds it."""
    target, window = config[f"{LOOP}.target_offpolicy_steps"], config[f"{LOOP}.window_fraction"]
    values = {"rollout.staleness": target}
    if not isinstance(target, int) or not target or window is None:
        return Converted(values)
    prompts = config[f"{LOOP}.num_prompts_per_train_step"]
    active = (target + 1) * prompts
    most = (active + max(1, int(window * active)) - 2) // prompts
    note = (
        f"a bound, not a target: with its window, TitanRL trains on samples that are up to {most} steps old; here "
        "none is older than rollout.staleness"
    )
    return changed(values, note)


def signal(config: PeerConfig) -> Converted:
    if config[f"{LOOP}.training_sample_builder.drop_zero_std_reward_groups"]:
        note = "a dropped group is replaced: a step always has num_prompts_per_train_step groups to learn from"
        return Converted({"rollout.no_signal": "replace"}, note=note)
    return Converted({"rollout.no_signal": "keep"})


def rows(config: PeerConfig) -> Converted:
    """Convert the shape of a micro-batch: rows of packed samples."""
    rows, length = config[f"{LOOP}.batcher.batch.local_batch_size"], config[f"{LOOP}.batcher.batch.seq_len"]
    values: dict[str, Any] = {"training.max_seq_len": length}
    if not isinstance(rows, int) or not isinstance(length, int):
        return Converted(values)
    values["training.microbatch_tokens"] = rows * length
    note = "a rank takes so many tokens at once; no completion grows longer than a trainer takes, so none is dropped"
    return changed(values, note)


def validation(config: PeerConfig) -> Converted | None:
    count = config[f"{LOOP}.validation.num_samples"]
    if not count:
        return None
    values = {"evaluation.max_prompts": count, "evaluation.at_start": True, "evaluation.at_end": True}
    return Converted(values, todo={"evaluation.sources": f"the held-out prompts; {count} of them are asked"})


# ---- Algorithm


def loss(config: PeerConfig) -> Converted:
    """Convert the clipped surrogate: one ratio to the sampler's logprobs, averaged over tokens."""
    outer = class_of(config[f"{TRAINER}.loss"])
    name, prefix = outer, f"{TRAINER}.loss"
    if outer == "ChunkedLossWrapper":
        name, prefix = class_of(config[f"{prefix}.loss_fn"]), f"{prefix}.loss_fn"
    values: dict[str, Any] = {
        "algorithm.preset": "grpo",
        "algorithm.loss.kind": "clip",
        "algorithm.loss.average": "token_mean",
        "algorithm.loss.proximal": "sampler",
    }
    if name == "GRPOLoss":
        low = high = _number(config[f"{prefix}.clip_eps"], 0.2)
    elif name == "DAPOLoss":
        low = _number(config[f"{prefix}.ratio_clip_low"], 0.2)
        high = _number(config[f"{prefix}.ratio_clip_high"], 0.2)
        values["algorithm.preset"] = "dapo" if high > low else "grpo"
    else:
        note = f"the loss {name} is not built in: algorithm.loss.function takes module:attribute of your own"
        return lacking(note, values)
    values |= {"algorithm.loss.clip_low": low, "algorithm.loss.clip_high": high}
    return Converted(values)


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def advantage(config: PeerConfig) -> Converted:
    """Convert the advantage: reward minus the group's mean, over the population's deviation or over nothing."""
    if class_of(config["rollouter.advantage"]) not in ("AdvantageEstimator", ""):
        note = "algorithm.advantage.function takes module:function of your own"
        return lacking(note)
    if not config["rollouter.advantage.should_std_normalize"]:
        note = "TitanRL's default: the reward minus the mean of its group, as in Dr.GRPO, with a mean over tokens"
        return Converted({"algorithm.advantage.scale": "none"}, note=note)
    return Converted(
        {
            "algorithm.advantage.scale": "group_std",
            "algorithm.advantage.std_ddof": 0,
            "algorithm.advantage.epsilon": 1e-6,
        }
    )


def rewards(config: PeerConfig) -> Converted:
    """Convert the rubric: weights of TitanRL are divided by their sum, and its functions are classes."""
    given = config["rollouter.rubric.reward_fns"]
    made = [each for each in (given if isinstance(given, list) else []) if isinstance(each, Call)]
    weights = [_number(each.kwargs.get("weight"), 1.0) for each in made]
    values: dict[str, Any] = {"rewards.on_error": "skip"}
    functions: list[dict[str, Any]] = []
    for each, weight in zip(made, weights, strict=True):
        share = round(weight / sum(weights), 6) if sum(weights) > 0 else weight
        kind = own_reward(_snake_case(class_of(each.name)))
        functions.append({"kind": kind, **({} if share == 1.0 else {"weight": share})})
    if functions:
        values["rewards.functions"] = functions
    whose = ", ".join(class_of(each.name) for each in made)
    whose = whose or f"the rewards of {class_of(config['rollouter'] or 'the rollouter')}"
    how = "write it as `def reward(prompt: Task, completion: Completion) -> float` in the module that is named"
    note = "a group whose rewards fail is left out"
    return Converted(values, note=note, todo={"rewards.functions": f"{whose}: {how}"})


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def data(config: PeerConfig) -> Converted:
    dataset = config["rollouter.train_dataset"]
    name = class_of(dataset) if dataset else ""
    repo = config["rollouter.train_dataset.repo_id"]
    if isinstance(repo, str):
        split = config["rollouter.train_dataset.split"]
        source = {"hf_dataset": repo, **({"split": split} if isinstance(split, str) and split != "train" else {})}
        note = f"{name} chooses columns in Python: columns of the source names them here"
        return changed({"prompts.sources": [source]}, note)
    what = f"the data of {name}" if name not in ("", "Configurable") else "the data"
    text = f"{what}, as a file or a task of your own: [{{path: data/train.jsonl}}] with `prompt` and `answer`"
    return Converted(todo={"prompts.sources": text})


def environment(config: PeerConfig) -> Converted | None:
    most = config["rollouter.token_env.max_num_turns"]
    env = class_of(config["rollouter.message_env"]) if config.is_given("rollouter.message_env") else ""
    if most == 1 or (most is None and not env):
        return None
    what = f"{env} over several turns" if env else f"up to {most} turns"
    return lacking(f"{what}: an episode (episode.kind) talks to the policy; see the guide on agents")
