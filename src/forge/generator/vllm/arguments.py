"""The arguments of vLLM's engine from a generator's configuration: our defaults, overridden by the user's own.

A wrong argument is reported before anything starts, with its path in the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forge.config import GenerationConfig, GeneratorConfig, ModelConfig
from forge.errors import ConfigError, did_you_mean
from forge.generator.engine import context_limit
from forge.generator.vllm.environment import Build
from forge.generator.vllm.lora_arguments import check_given, check_spec, lora_arguments
from forge.models.peft_files import resolve_adapter
from forge.runtime.machine import memory

PATH: Final = "generator.engine_args"
EXTENSION: Final = "forge.generator.vllm.transfer.ForgeWorker"
BACKEND: Final = "forge_store"

_ONE_PROCESS: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_BLOCK: Final = 128
_SIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}

OWNED: Final[Mapping[str, tuple[str, str]]] = {
    "model": ("is model.path", "set model.path"),
    "tokenizer": ("is the one in model.path", "put it into the model's folder"),
    "skip_tokenizer_init": ("would leave completions without text", "remove it"),
    "max_model_len": ("is generator.max_seq_len", "set generator.max_seq_len"),
    "max_num_seqs": ("is generator.max_batch", "set generator.max_batch"),
    "tensor_parallel_size": (
        "is the number of the actor's processes",
        "set generator.tensor_parallel, or options(procs=…)",
    ),
    "pipeline_parallel_size": ("is not supported: weights are sent to whole models", "set generator.tensor_parallel"),
    "data_parallel_size": ("is the number of replicas of the service", "set generator.num_replicas"),
    "distributed_executor_backend": ("is chosen by the number of processes", "remove it"),
    "device_ids": ("are those that the actor was given", "remove it"),
    "nnodes": ("is 1: an engine is on one host", "remove it"),
    "worker_cls": ("is vLLM's own", "remove it"),
    "worker_extension_cls": ("brings weights from our store", "remove it"),
    "weight_transfer_config": ("is how weights come from our store", "remove it; see generator.update"),
    "logprobs_mode": ("is processed_logprobs: a trainer needs those of the distribution sampled from", "remove it"),
    "disable_log_stats": ("is needed for the engine's stats", "remove it; call stats() instead"),
}
"""Arguments that the library sets itself: why, and what to do instead."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments that an engine is started with.

    Attributes:
        arguments: the arguments of `AsyncEngineArgs`, ours and the user's.
        max_seq_len: the longest prompt and completion together.
        precision: what the model computes in.
    """

    arguments: Mapping[str, Any]
    max_seq_len: int
    precision: str


def chosen_precision(config: GenerationConfig, device: Build) -> str:
    """Return what an engine computes in: `engine_args.dtype`, generator.precision, or the device's default."""
    given = to_plain(config.engine_args)
    return str(given.get("dtype") or config.precision or ("float32" if device == "cpu" else "bfloat16"))


def make_plan(
    config: GeneratorConfig, facts: ModelConfig, folder: Path, *, device: Build, tensor_parallel: int = 1
) -> Plan:
    """Return the arguments of an engine for the model in `folder`, whose architecture is `facts`."""
    check_owned(config.engine_args)
    given = to_plain(config.engine_args)
    max_seq_len = context_limit(config, facts)
    precision = chosen_precision(config, device)
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": precision,
        "max_model_len": max_seq_len,
        "max_num_seqs": config.max_batch,
        "enable_prefix_caching": config.prefix_sharing,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "seed": 0,
        "tensor_parallel_size": tensor_parallel,
        "distributed_executor_backend": "mp" if tensor_parallel > 1 else _ONE_PROCESS,
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    chunk = config.prefill_chunk_tokens or (512 if device == "cpu" else 8192)
    arguments["max_num_batched_tokens"] = max(chunk, config.max_batch)
    if device == "cpu":
        arguments["enforce_eager"] = True
        # vLLM crashes when it splits the prompt of a seeded request: it rewinds a generator that cannot be rewound.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(chunk, config.max_batch, max_seq_len)
    else:
        arguments["enforce_eager"] = not config.cuda_graphs
        arguments["enable_sleep_mode"] = True
        arguments["gpu_memory_utilization"] = config.gpu_memory_share or 0.8
    if config.adapter is not None:
        spec = resolve_adapter(config.adapter, facts)
        check_spec(spec, facts)
        check_given(given, spec)
        given |= lora_arguments(given, spec)
    if config.kv_cache_dtype != "auto":
        arguments["kv_cache_dtype"] = config.kv_cache_dtype
    if config.model.head_precision == "float32" and precision != "float32":
        given["hf_overrides"] = _with_wide_head(given.get("hf_overrides") or {})
    size = _cache_bytes(config, facts, max_seq_len, precision=precision, device=device)
    if size is not None:
        arguments["kv_cache_memory_bytes"] = size // tensor_parallel
    return Plan(arguments | given, max_seq_len, precision)


def _with_wide_head(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's `hf_overrides` with float32 logits, as the trainer computes them."""
    if overrides.get("head_dtype", "float32") != "float32":
        raise ConfigError(
            "The output layer of trainer and vLLM would be of different precisions.",
            path=f"{PATH}.hf_overrides.head_dtype",
            value=overrides["head_dtype"],
            rule="is model.head_precision, which is float32",
            repair="remove it, or remove model.head_precision",
        )
    return {**overrides, "head_dtype": "float32"}


def to_plain(value: Any) -> Any:
    """Return a value of a configuration with plain, mutable lists and dicts."""
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return [to_plain(item) for item in value]
    return value


def check_owned(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if an argument is one that this library sets itself."""
    for name, value in given.items():
        owned = OWNED.get(name) or (OWNED["data_parallel_size"] if name.startswith("data_parallel") else None)
        if owned is not None:
            why, repair = owned
            raise ConfigError(
                "This argument of vLLM is set by the library.",
                path=f"{PATH}.{name}",
                value=value,
                rule=f"{name} {why}",
                repair=repair,
            )


def check_known(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an argument that vLLM does not have, or whose value is not of the type it says.

    `known` has the type of every argument, or None where it is not known.
    """
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                "vLLM has no such argument.",
                path=f"{PATH}.{name}",
                value=value,
                rule="an argument of vLLM's AsyncEngineArgs",
                repair=did_you_mean(name, [word for word in known if not word.startswith("_")], prefix=f"{PATH}.")
                or "remove it",
            )
        _check_type(name, value, known[name])


def _check_type(name: str, value: Any, hint: Any) -> None:
    from pydantic import ConfigDict, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

    if hint is None:
        return
    try:
        adapter = TypeAdapter[Any](hint, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError):
        return  # it refers to something that only vLLM can make; vLLM checks it with the rest
    try:
        adapter.validate_python(value, strict=isinstance(value, str | bool | int | float))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        if isinstance(value, dict) and not any(details["type"] == "dict_type" for details in problems):
            return
        reasons = dict.fromkeys(details["msg"].removeprefix("Input should ") for details in problems)
        raise ConfigError(
            "This value does not fit vLLM's argument.",
            path=f"{PATH}.{name}",
            value=value,
            rule=f"must {', or '.join(reasons)}",
            repair="correct the value",
        ) from None


def as_config_error(error: Exception, given: Mapping[str, Any]) -> ConfigError:
    """Return vLLM's error about arguments as a `ConfigError` with a path."""
    text = str(error)
    names = list(given) if len(given) == 1 else [name for name in given if name in text]
    name = names[0] if len(names) == 1 else None
    return ConfigError(
        "vLLM refuses this configuration.",
        path=PATH if name is None else f"{PATH}.{name}",
        value=dict(given) if name is None else given[name],
        rule=_first_reason(text),
        repair="change or remove what the rule names; the arguments are those of vLLM's AsyncEngineArgs",
    )


def _first_reason(text: str) -> str:
    """Return the sentence in vLLM's message that says what is wrong, without pydantic's heading and link."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if "validation error" not in line and not line.startswith("For further information")]
    return " ".join(kept)[:600].split(" [type=")[0] or type(text).__name__


def _cache_bytes(
    config: GeneratorConfig, facts: ModelConfig, max_seq_len: int, *, precision: str, device: Build
) -> int | None:
    """Return the memory for keys and values, over all workers; None lets vLLM measure what a GPU has left."""
    if config.kv_cache_gb is not None:
        return int(config.kv_cache_gb * 2**30)
    if device == "gpu":
        return None
    width = facts.head_dim or (facts.hidden_size or 0) // (facts.num_heads or 1)
    per_token = 2 * (facts.num_layers or 0) * (facts.num_kv_heads or 0) * width * _SIZES.get(precision, 4)
    one = per_token * -(-max_seq_len // _BLOCK) * _BLOCK
    return max(min(one * config.max_batch, memory()["available"] // 4), one) + per_token * _BLOCK
