"""The table of verl's engines: FSDP, the rollout engine, and where they run."""

from __future__ import annotations

from typing import Any, Final

from forge.migration.models import dtype_name
from forge.migration.records import Converted, PeerConfig, Verdict
from forge.migration.rules import as_float, at_least_zero, changed, inverted, joint, lacking, lacks, maps
from forge.migration.verl.schedules import ACTOR, MEGATRON, is_megatron

ROLLOUT: Final = "actor_rollout_ref.rollout"
REF: Final = "actor_rollout_ref.ref"
FSDP: Final = f"{ACTOR}.fsdp_config"


def num_gpus(config: PeerConfig) -> int:
    """Return how many GPUs train."""
    nodes, each = config["trainer.nnodes"], config["trainer.n_gpus_per_node"]
    return nodes * each if isinstance(nodes, int) and isinstance(each, int) and nodes * each > 0 else 1


def _layout(config: PeerConfig) -> Converted:
    """Convert how the model is spread over GPUs."""
    count, size, strategy = num_gpus(config), config[f"{FSDP}.fsdp_size"], config[f"{ACTOR}.strategy"]
    values: dict[str, Any] = _megatron_layout(config, count) if is_megatron(config) else {"distributed.shard": count}
    if not is_megatron(config) and isinstance(size, int) and 0 < size < count and count % size == 0:
        values = {"distributed.replicate": count // size, "distributed.shard": size}
    nodes = config["trainer.nnodes"]
    todo = {}
    if isinstance(nodes, int) and nodes > 1:
        values["distributed.hosts"] = nodes
        todo["launcher"] = f"{nodes} hosts: `forge worker` on each, or kind: slurm or kubernetes"
    changes, notes = [], []
    if is_megatron(config):
        changes.append("Megatron becomes TorchTitan: FSDP2 with the same degrees of tensor, pipeline and expert")
    elif strategy not in ("fsdp", "fsdp2"):
        changes.append(
            f"strategy {strategy} becomes FSDP2: distributed.tensor, pipeline and expert are further degrees"
        )
    if is_megatron(config) and config[f"{MEGATRON}.context_parallel_size"] not in (None, 1):
        notes.append("sequences are not split over GPUs: training.activation_checkpointing holds long ones")
    split = config[f"{FSDP}.ulysses_sequence_parallel_size"]
    split = split if isinstance(split, int) and split > 1 else config[f"{ACTOR}.ulysses_sequence_parallel_size"]
    if isinstance(split, int) and split > 1:
        notes.append(
            f"sequences are not split over {split} GPUs (Ulysses): distributed.tensor with sequence_parallel, "
            "training.activation_checkpointing and activation_offload hold long ones"
        )
    verdict: Verdict = "none" if notes else "differs" if changes else "maps"
    return Converted(values, verdict=verdict, note="; ".join([*changes, *notes]), todo=todo)


def _megatron_layout(config: PeerConfig, count: int) -> dict[str, Any]:
    """The degrees of Megatron; what is left of the GPUs shards the weights."""
    tensor = int(config[f"{MEGATRON}.tensor_model_parallel_size"] or 1)
    pipeline = int(config[f"{MEGATRON}.pipeline_model_parallel_size"] or 1)
    return {
        "distributed.shard": max(1, count // (tensor * pipeline)),
        "distributed.tensor": tensor,
        "distributed.pipeline": pipeline,
        "distributed.expert": int(config[f"{MEGATRON}.expert_model_parallel_size"] or 1),
        "distributed.sequence_parallel": bool(config[f"{MEGATRON}.sequence_parallel"]),
    }


def _precision(config: PeerConfig) -> Converted:
    kept, computed = dtype_name(config[f"{FSDP}.model_dtype"]), dtype_name(config[f"{FSDP}.dtype"])
    if kept == "bfloat16":
        return Converted({"distributed.precision": "bfloat16_pure"})
    known = computed if computed in ("bfloat16", "float16", "float32") else "bfloat16"
    return Converted({"distributed.precision": known})


def _offload(config: PeerConfig) -> Converted | None:
    asked = [key for key in ("param_offload", "optimizer_offload", "offload_policy") if config[f"{FSDP}.{key}"]]
    if not asked:
        return None
    return lacking("weights and optimizer states stay on the GPU: training.optimizer_dtype, more ranks, `forge plan`")


def _engine(config: PeerConfig) -> Converted:
    """Convert which engine generates, and where."""
    name = config[f"{ROLLOUT}.name"]
    mode, pool = config["trainer.v1.trainer_mode"], config[f"{ROLLOUT}.nnodes"]
    split = config[f"{ROLLOUT}.tensor_model_parallel_size"] or 1
    values: dict[str, Any] = {"generator.engine": "vllm", "generator.tensor_parallel": split}
    notes = (
        [] if name in ("vllm", None) else [f"{name} becomes vllm; `native` is the engine that needs nothing installed"]
    )
    if mode == "separate_async" or config["actor_rollout_ref.hybrid_engine"] is False:
        own = (pool or 0) * (config[f"{ROLLOUT}.n_gpus_per_node"] or 0)
        values |= {"placement": "apart", "generator.num_replicas": max(1, own // split)}
        values["rollout.staleness"] = config["trainer.v1.separate_async.parameter_sync_step"] or 1
        notes.append("rollout.staleness is the parameter_sync_step: the most steps a sample may be old")
        return changed(values, "; ".join(notes))
    if mode == "colocate_async":
        values |= {"placement": "beside", "rollout.staleness": 1}
        notes.append("colocate_async becomes placement: beside with rollout.staleness: 1")
    else:
        values["placement"] = "turns" if config[f"{ROLLOUT}.free_cache_engine"] else "beside"
    values["generator.gpu_memory_share"] = as_float(config[f"{ROLLOUT}.gpu_memory_utilization"])
    count = num_gpus(config)
    if count < split:
        values["generator.tensor_parallel"] = count
        notes.append(f"tensor_parallel {split} is more than the {count} GPUs of the trainer, which it shares")
    elif count > split:
        notes.append(
            f"verl's {count} GPUs hold {count // split} engines; a generator that shares the trainer's GPUs uses the "
            "first ones here. To use all of them, raise generator.tensor_parallel, or set placement: apart with some "
            "GPUs for generators"
        )
    return changed(values, "; ".join(notes)) if notes else Converted(values)


def _greedy(config: PeerConfig) -> Converted:
    if config[f"{ROLLOUT}.do_sample"] is False:
        return lacking("rollouts cannot be greedy: completions of a group must differ")
    return Converted({"generator.sampling.temperature": float(config[f"{ROLLOUT}.temperature"])})


def _engine_args(config: PeerConfig) -> Converted | None:
    """Convert arguments of the engine: those of vLLM are passed on."""
    given: dict[str, Any] = {}
    for key, value in config.below(f"{ROLLOUT}.engine_kwargs").items():
        given |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
    own = {key.removeprefix("vllm."): value for key, value in given.items() if key.startswith("vllm.")}
    others = sorted(key for key in given if not key.startswith("vllm."))
    values = {"generator.engine_args": own} if own else {}
    if others:
        return lacking(f"generator.engine_args are those of vLLM, not {', '.join(others)}", values)
    return Converted(values) if values else None


def _turns(config: PeerConfig) -> Converted | None:
    if not config[f"{ROLLOUT}.multi_turn.enable"]:
        return None
    return lacking("an episode talks to the policy over several turns: episode.kind, and the guide on agents")


def _distillation(config: PeerConfig) -> Converted | None:
    if not config["distillation.enabled"]:
        return None
    return lacking("a teacher: the sections teacher and algorithm.distillation, and the guide on distillation")


ENGINE_RULES = [
    joint(
        f"trainer.n_gpus_per_node trainer.nnodes {ACTOR}.strategy {FSDP}.fsdp_size "
        f"{FSDP}.ulysses_sequence_parallel_size {ACTOR}.ulysses_sequence_parallel_size model_engine --config-name "
        f"{MEGATRON}.tensor_model_parallel_size {MEGATRON}.pipeline_model_parallel_size "
        f"{MEGATRON}.expert_model_parallel_size {MEGATRON}.context_parallel_size {MEGATRON}.sequence_parallel",
        "distributed.shard distributed.replicate distributed.hosts distributed.tensor distributed.pipeline "
        "distributed.expert distributed.sequence_parallel",
        _layout,
    ),
    joint(f"{FSDP}.model_dtype {FSDP}.dtype", "distributed.precision", _precision),
    joint(f"{FSDP}.param_offload {FSDP}.optimizer_offload {FSDP}.offload_policy", "", _offload),
    lacks(f"{FSDP}.qat.* {ACTOR}.qat.*", "there is no quantisation-aware training: adapter.base_dtype is QLoRA"),
    lacks(f"{FSDP}.*", "FSDP2 needs none of it"),
    lacks(
        f"{ACTOR}.entropy_from_logits_with_chunking {ACTOR}.entropy_from_logits_chunk_size "
        f"{ACTOR}.entropy_checkpointing",
        "the output layer always works in chunks: training.head_chunk_tokens",
    ),
    lacks(f"{ACTOR}.use_torch_compile", "training.compile compiles each layer"),
    lacks(f"{ACTOR}.use_prefix_grouper", "rollout.share_prompts is on: a group's prompt is computed once"),
    lacks(f"{ACTOR}.pad_to_length", "rows are packed, not padded"),
    lacks(f"{ACTOR}.freeze_vision_tower", "models are for text"),
    lacks(f"{ACTOR}.checkpoint.*", "a checkpoint holds everything to resume, and is written in the background"),
    lacks(
        f"{ACTOR}.profiler.* {REF}.profiler.* {ROLLOUT}.profiler.* global_profiler.*",
        "trace.json of a run shows what waited for what",
    ),
    lacks(f"{REF}.*", "the reference model has the trainer's layout: the section reference"),
    lacks(f"{MEGATRON}.*", "distributed has the degrees; kernels, recomputation and checkpoints need no switches"),
]

ROLLOUT_RULES = [
    joint(
        f"{ROLLOUT}.name {ROLLOUT}.tensor_model_parallel_size {ROLLOUT}.gpu_memory_utilization "
        f"{ROLLOUT}.free_cache_engine {ROLLOUT}.nnodes {ROLLOUT}.n_gpus_per_node trainer.v1.trainer_mode "
        "actor_rollout_ref.hybrid_engine trainer.v1.separate_async.parameter_sync_step",
        "generator.engine generator.tensor_parallel placement generator.gpu_memory_share generator.num_replicas "
        "rollout.staleness",
        _engine,
    ),
    joint(f"{ROLLOUT}.temperature {ROLLOUT}.do_sample", "generator.sampling.temperature", _greedy),
    maps(f"{ROLLOUT}.top_p", "generator.sampling.top_p", as_float),
    maps(f"{ROLLOUT}.top_k", "generator.sampling.top_k", at_least_zero),
    maps(f"{ROLLOUT}.ignore_eos", "generator.sampling.ignore_eos"),
    maps(f"{ROLLOUT}.max_num_seqs", "generator.max_batch"),
    maps(f"{ROLLOUT}.max_num_batched_tokens", "generator.prefill_chunk_tokens"),
    maps(f"{ROLLOUT}.enforce_eager", "generator.cuda_graphs", inverted),
    maps(f"{ROLLOUT}.enable_prefix_caching", "generator.prefix_sharing"),
    maps(f"{ROLLOUT}.dtype", "generator.precision", dtype_name),
    joint(f"{ROLLOUT}.engine_kwargs.*", "generator.engine_args", _engine_args),
    joint(f"{ROLLOUT}.multi_turn.enable", "", _turns),
    lacks(
        f"{ROLLOUT}.multi_turn.* {ROLLOUT}.agent.*",
        "an episode is an async function: episode.kind, and the guide on agents",
    ),
    lacks(
        f"{ROLLOUT}.response_length {ROLLOUT}.prompt_length", "generator.sampling.max_tokens and training.max_seq_len"
    ),
    lacks(
        f"{ROLLOUT}.calculate_log_probs {ROLLOUT}.logprobs_mode", "the sampler's logprobs always come with its tokens"
    ),
    lacks(
        f"{ROLLOUT}.log_prob_micro_batch_size {ROLLOUT}.log_prob_micro_batch_size_per_gpu "
        f"{ROLLOUT}.log_prob_use_dynamic_bsz {ROLLOUT}.log_prob_max_token_len_per_gpu",
        "training.microbatch_tokens bounds those passes as well",
    ),
    lacks(
        f"{ROLLOUT}.data_parallel_size {ROLLOUT}.expert_parallel_size {ROLLOUT}.pipeline_model_parallel_size",
        "generator.num_replicas and tensor_parallel spread generation; engine_args takes the rest of vLLM's",
    ),
    lacks(f"{ROLLOUT}.seed {ROLLOUT}.full_determinism", "seeds of completions derive from run.seed"),
    lacks(f"{ROLLOUT}.checkpoint_engine.*", "weights reach generators as versions of the store"),
    lacks(
        f"{ROLLOUT}.quantization {ROLLOUT}.quantization_config_file", "generator.engine_args takes vLLM's quantization"
    ),
    lacks(
        f"{ROLLOUT}.trace.* {ROLLOUT}.prometheus.* {ROLLOUT}.disable_log_stats",
        "metrics.jsonl, rollouts/ and report.html hold what happened",
    ),
    lacks(
        f"{ROLLOUT}.enable_rollout_routing_replay {ROLLOUT}.moe_load_balance_metrics_interval",
        "routing is not replayed; train/mismatch shows the difference",
    ),
    lacks(f"{ROLLOUT}.over_sample_rate", "rollout.max_in_flight bounds what is generated at once"),
    lacks(
        f"{ROLLOUT}.mode {ROLLOUT}.load_format {ROLLOUT}.layered_summon {ROLLOUT}.cudagraph_capture_sizes "
        f"{ROLLOUT}.enable_chunked_prefill {ROLLOUT}.scheduling_policy {ROLLOUT}.multi_stage_wake_up "
        f"{ROLLOUT}.router_config_path {ROLLOUT}.skip_tokenizer_init {ROLLOUT}.mtp {ROLLOUT}.qat "
        f"{ROLLOUT}.disaggregation.*",
        "generator.engine_args takes arguments of vLLM's engine by name",
    ),
    joint("distillation.enabled", "", _distillation),
    lacks("distillation.*", "the sections teacher and algorithm.distillation"),
    lacks("trainer.use_v1 trainer.device actor_rollout_ref.nccl_timeout", "there is nothing to choose"),
    lacks("transfer_queue.* skip.*", "groups wait in the buffer, with rollout.staleness as the bound"),
    lacks(
        "--config-path --config-dir",
        "a configuration of your own beside verl's: keys that verl does not have are reported",
    ),
]
