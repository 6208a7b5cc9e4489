"""The tables of TRL's GRPOConfig and RLOOConfig: rollouts, rewards and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forge.migration.reading import mapping_of
from forge.migration.records import Converted, PeerConfig, Rule
from forge.migration.rules import always, as_float, at_least_zero, changed, joint, lacking, lacks, maps
from forge.migration.trl.batches import batches_of, processes_of, rollout_batch
from forge.migration.trl.losses import LOSS_RULES, RLOO_RULES
from forge.migration.trl.model_rules import data_rule, sources_of
from forge.migration.trl.rewards import REWARD_RULE

_ROOM_FOR_A_PROMPT: Final = 1024
_SAMPLING_KEYS: Final = {
    "stop": "stop",
    "stop_strings": "stop",
    "stop_token_ids": "stop_token_ids",
    "min_tokens": "min_tokens",
    "min_new_tokens": "min_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
}
"""Keys of generation_kwargs, and their names in generator.sampling."""


def _sampling(config: PeerConfig) -> Converted | None:
    """Convert what is passed on to the engine as it is."""
    given = mapping_of(config["generation_kwargs"])
    if not given:
        return None
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in _SAMPLING_KEYS:
            many = _SAMPLING_KEYS[key] in ("stop", "stop_token_ids") and not isinstance(value, list)
            values[f"generator.sampling.{_SAMPLING_KEYS[key]}"] = [value] if many else value
    lost = sorted(set(given) - set(_SAMPLING_KEYS))
    if lost:
        return lacking(f"generator.sampling has no {', '.join(lost)}; with vLLM, generator.engine_args", values)
    return Converted(values)


def _lengths(config: PeerConfig) -> Converted:
    """Convert what bounds prompts and completions: TRL bounds the completion, the trainer here the whole."""
    most, whole, prompt = config["max_completion_length"], config["vllm_max_model_length"], config["max_prompt_length"]
    values: dict[str, Any] = {"generator.sampling.max_tokens": most}
    if isinstance(whole, int):
        return Converted({**values, "training.max_seq_len": whole})
    room = prompt if isinstance(prompt, int) else _ROOM_FOR_A_PROMPT
    if not isinstance(most, int):
        return Converted(values, todo={"training.max_seq_len": "the longest prompt and completion together"})
    values["training.max_seq_len"] = most + room
    if isinstance(prompt, int):
        note = (
            "bounded together: a longer prompt leaves less room for its completion, and one that leaves none is dropped"
        )
        return changed(values, note)
    note = f"TRL bounds completions only; prompt and completion together are bounded here, with {room} tokens for the "
    return changed(values, note + "prompt: set training.max_seq_len to your longest prompt plus max_completion_length")


def _placement(config: PeerConfig) -> Converted:
    """Convert who generates, and where."""
    if not config["use_vllm"]:
        return _own_engine(config)
    if config["vllm_mode"] == "server":
        note = (
            "a run starts its generators itself, on GPUs of their own: there is no server to start. "
            "generator.tensor_parallel and num_replicas say how many GPUs they take"
        )
        return changed({"generator.engine": "vllm", "placement": "apart"}, note)
    split, count = config["vllm_tensor_parallel_size"] or 1, processes_of(config)
    values: dict[str, Any] = {
        "generator.engine": "vllm",
        "placement": "turns" if config["vllm_enable_sleep_mode"] else "beside",
        "generator.gpu_memory_share": config["vllm_gpu_memory_utilization"],
        "generator.tensor_parallel": split,
    }
    batches = batches_of(config)
    if batches is not None:
        values["generator.max_batch"] = max(1, batches.generated)
    if count <= split:
        return Converted(values)
    note = (
        f"TRL's {count} processes hold {count // split} engines; a generator that shares the trainer's GPUs uses the "
        "first ones here. To use all of them, set placement: apart with some GPUs for generators"
    )
    return changed(values, note)


def _own_engine(config: PeerConfig) -> Converted:
    """Generation without vLLM: by the trainer's process, with the trainer's weights."""
    values: dict[str, Any] = {"generator.engine": "native", "placement": "shared"}
    if processes_of(config) == 1:
        return changed(values, "the native engine decodes in continuous batches with a KV cache of pages")
    values["placement"] = "turns"
    note = "the native engine runs on the trainer's first GPU, while the trainer sleeps; vLLM can be split over more"
    return changed(values, note)


def _evaluation(config: PeerConfig) -> Converted | None:
    """Convert evaluation: TRL's loop on the test split, sampled as in training."""
    if config["eval_strategy"] == "no" and not config["test_split_size"]:
        return None
    values: dict[str, Any] = {
        "evaluation.at_start": bool(config["eval_on_start"]),
        "evaluation.at_end": False,
        "evaluation.num_samples": config["num_generations_eval"] or config["num_generations"],
        "evaluation.temperature": float(config["temperature"]),
    }
    steps = config["eval_steps"] or config["logging_steps"]
    if config["eval_strategy"] == "steps" and isinstance(steps, int | float) and steps >= 1:
        values["evaluation.interval"] = int(steps)
    todo = {}
    sources, _ = sources_of(config, split=config["dataset_test_split"] or "test")
    if config["test_split_size"]:
        values["evaluation.fraction"] = config["test_split_size"]
    elif sources and not config["datasets"]:
        values["evaluation.sources"] = sources
    else:
        todo["evaluation.sources"] = "the held-out prompts"
    note = "evaluated by the same rewards: a completion counts as solved from evaluation.solved_at on"
    return Converted(values, verdict="differs", note=note, todo=todo)


def _model_head(config: PeerConfig) -> Converted | None:
    return Converted({"model.head_precision": "float32"}) if config["cast_lm_head_to_fp32"] else None


def _structured(config: PeerConfig) -> Converted | None:
    pattern = config["vllm_structured_outputs_regex"]
    return Converted({"generator.sampling.structured": {"regex": pattern}}) if pattern else None


def _records(config: PeerConfig) -> Converted | None:
    if not config["log_completions"]:
        return None
    note = "every completion is written to rollouts/ (record.rollouts) and shown in report.html"
    return changed({"record.rollouts": "all"}, note)


def _turns(config: PeerConfig) -> Converted | None:
    most = config["max_tool_calling_iterations"]
    if most is None:
        return None
    return lacking(f"tools belong to an episode (episode.kind): agent.run_tools(…, max_turns={most})")


_REFERENCE_NOTE = "the reference does not change during a run; reference.path names another one for the next"
_ROLLOUT = [
    joint(
        "per_device_train_batch_size gradient_accumulation_steps num_generations generation_batch_size "
        "steps_per_generation num_iterations",
        "rollout.batch_groups rollout.group_size rollout.iterations",
        rollout_batch,
    ),
    always({"rollout.no_signal": "keep"}, "TRL keeps groups whose rewards are equal; their tokens count in averages"),
    maps("temperature", "generator.sampling.temperature", as_float),
    maps("top_p", "generator.sampling.top_p", as_float),
    maps("top_k", "generator.sampling.top_k", at_least_zero),
    maps("min_p", "generator.sampling.min_p", lambda value: 0.0 if value is None else float(value)),
    maps("repetition_penalty", "generator.sampling.repetition_penalty", as_float),
    joint("generation_kwargs", "generator.sampling", _sampling),
    lacks(
        "chat_template_kwargs", "write the switch into prompts.template (`/no_think`), or set generator.chat_template"
    ),
    joint(
        "max_completion_length vllm_max_model_length max_prompt_length",
        "generator.sampling.max_tokens training.max_seq_len",
        _lengths,
    ),
    maps("shuffle_dataset", "prompts.shuffle", lambda value: value is not False),
    maps("mask_truncated_completions", "rollout.mask_truncated"),
    joint("log_completions", "record.rollouts", _records),
    lacks("log_multimodal log_unique_prompts num_completions_to_print", "report.html shows samples of every step"),
]
_GENERATION = [
    joint(
        "use_vllm vllm_mode vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size",
        "generator.engine placement generator.gpu_memory_share generator.tensor_parallel generator.max_batch",
        _placement,
    ),
    joint("vllm_structured_outputs_regex", "generator.sampling.structured", _structured),
    lacks("vllm_model_impl", "vLLM runs its own definition of the model: generator.engine_args takes model_impl"),
    lacks(
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port",
        "there is no server to reach: a run starts its generators, and finds them",
    ),
    lacks(
        "cache_implementation use_transformers_continuous_batching transformers_continuous_batching_config "
        "use_transformers_paged",
        "the native engine always has a paged cache and continuous batches: generator.kv_cache_gb, max_batch",
    ),
    lacks("ds3_gather_for_generation", "weights reach generators as versions of the store, in any layout"),
    lacks("pad_to_multiple_of", "rows are packed, not padded"),
]
_DATA = [
    data_rule(
        "prompts.sources",
        example="[{path: data/train.jsonl}] with `prompt` and `answer`",
        plain="a prompt that is text becomes a user message here; TRL continues it as it is: prompts.chat: false",
    ),
    REWARD_RULE,
    always({"rewards.on_error": "stop"}, "an exception in a reward ends a run of TRL; `zero` would count it and go on"),
    joint(
        "eval_strategy eval_steps eval_on_start num_generations_eval dataset_test_split test_split_size",
        "evaluation.interval evaluation.at_start evaluation.at_end evaluation.sources evaluation.num_samples "
        "evaluation.temperature evaluation.fraction",
        _evaluation,
    ),
    lacks("eval_delay", "evaluation starts with the run: evaluation.interval, at_start"),
    lacks("dataset_streaming streaming", "prompts are indexed, so that any of them can be read at once"),
    lacks("remove_unused_columns train_sampling_strategy", "all columns of a record are in task.metadata for rewards"),
    lacks("sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", _REFERENCE_NOTE),
    joint("max_tool_calling_iterations", "", _turns),
]
_GRPO_ONLY = [
    joint("cast_lm_head_to_fp32", "model.head_precision", _model_head),
    lacks("log_completions_hub_repo", "upload the folder rollouts/ of the run"),
]

RL_RULES: Mapping[str, list[Rule]] = {
    "grpo": [*_ROLLOUT, *_GENERATION, *_DATA, *_GRPO_ONLY, *LOSS_RULES],
    "rloo": [
        *_ROLLOUT,
        *_GENERATION,
        *[rule for rule in _DATA if "max_tool_calling_iterations" not in rule.theirs],
        *RLOO_RULES,
    ],
}
