"""Changes that save memory, from those that cost nothing to those that change the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forge.config import DistributedConfig, ForgeConfig, GRPOConfig, PolicyConfig, SFTConfig, TrainingConfig
from forge.memory.card import Card
from forge.memory.constants import GIB, HEAD_CHUNK_GPU, VLLM_SHARE
from forge.memory.devices import generator_job
from forge.memory.generator import cache_need
from forge.memory.resolved import ResolvedRun

Words = tuple[str, ...]
_SHARES = (0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)
_SHARDS = (2, 4, 8, 16, 32, 64)


def ladders(config: ForgeConfig, run: ResolvedRun, card: Card | None) -> tuple[Sequence[Words], ...]:
    """Kinds of changes in the order of what they cost, each with its steps from mild to strong.

    A smaller cache makes generation slower only when it is full; shorter rows and smaller chunks of logits cost little;
    computing again costs a third of the step at most; taking turns makes generation wait; narrower states and weights
    change the last digits of what is learned; offloading waits for the host; more GPUs cost money.
    """
    found: list[Sequence[Words]] = []
    if isinstance(config, GRPOConfig | PolicyConfig):
        found.append(tuple(_cache(run, card)))
    if isinstance(config, GRPOConfig | SFTConfig):
        found += _training(config.training, on_gpu=run.trainer_on_gpu)
    if isinstance(config, GRPOConfig):
        found.append(tuple(_placement(config, run)))
    if isinstance(config, GRPOConfig | SFTConfig):
        found += _states(config.training, config.distributed, on_gpu=run.trainer_on_gpu)
        found.append(tuple(_shards(config.distributed, card)) if run.trainer_on_gpu else ())
    if isinstance(config, GRPOConfig | PolicyConfig):
        found.append(tuple(_fewer_sequences(config)))
        found.append(tuple(_more_gpus(config, run)))
    if isinstance(config, GRPOConfig):
        found.append(tuple(_elsewhere(config)))
    return tuple(ladder for ladder in found if ladder)


def _cache(run: ResolvedRun, card: Card | None) -> Iterator[Words]:
    job = generator_job(run, card)
    if job is None:
        return
    if job.config.capabilities.reserves_gpu_share and job.on_gpu and job.config.kv_cache_gb is None:
        given = job.config.engine_args.get("gpu_memory_utilization")
        now = given if given is not None else (job.share or VLLM_SHARE)
        key = "engine_args.gpu_memory_utilization" if given is not None else "gpu_memory_share"
        yield from ((f"generator.{key}={share:g}",) for share in _SHARES if share < float(now))
        return
    need = cache_need(job)
    wanted, least = need.wanted * need.page_bytes / GIB, need.least * need.page_bytes / GIB
    sizes = [wanted, wanted / 2, wanted / 4, wanted / 8, least]
    for size in sizes:
        rounded = _up(max(size, least))
        if job.config.kv_cache_gb is None or rounded < job.config.kv_cache_gb:
            yield (f"generator.kv_cache_gb={rounded:g}",)


def _up(gib: float) -> float:
    """A number to write down, not smaller."""
    step = 1.0 if gib >= 8 else 0.1 if gib >= 0.5 else 0.001
    return round((int(gib / step) + 1) * step, 3)


def _training(training: TrainingConfig, *, on_gpu: bool) -> list[Sequence[Words]]:
    tokens, rows = training.microbatch_tokens or training.max_seq_len, []
    while tokens > training.max_seq_len:
        tokens = max(training.max_seq_len, tokens // 2)
        rows.append((f"training.microbatch_tokens={tokens}",))
    chunk = training.head_chunk_tokens or HEAD_CHUNK_GPU
    chunks = [(f"training.head_chunk_tokens={size}",) for size in (512, 256, 128) if size < chunk and on_gpu]
    modes = ("none", "selective", "full")
    stronger = modes[modes.index(training.activation_checkpointing) + 1 :]
    return [rows, chunks, [(f"training.activation_checkpointing={mode}",) for mode in stronger]]


def _placement(config: GRPOConfig, run: ResolvedRun) -> Iterator[Words]:
    fresh = ("rollout.staleness=0",) if config.rollout.staleness else ()
    if config.placement in ("apart", "beside"):
        yield ("placement=turns", *fresh)
    is_alone = run.layout is not None and run.layout.num_ranks == 1 and config.generator.num_replicas == 1
    if config.placement != "shared" and is_alone and config.generator.capabilities.shared_weights:
        yield ("placement=shared", *fresh)


def _states(training: TrainingConfig, distributed: DistributedConfig, *, on_gpu: bool) -> list[Sequence[Words]]:
    found: list[Sequence[Words]] = []
    if training.optimizer_dtype == "float32" and distributed.precision != "bfloat16_pure":
        found.append([("training.optimizer_dtype=bfloat16",)])
    if distributed.precision in ("float32", "float64") and on_gpu:
        found.append([("distributed.precision=bfloat16",)])
    if not training.activation_offload and on_gpu:
        found.append([("training.activation_offload=true",)])
    if distributed.precision != "bfloat16_pure" and on_gpu:
        found.append([("distributed.precision=bfloat16_pure",)])
    return found


def _shards(distributed: DistributedConfig, card: Card | None) -> Iterator[Words]:
    now = max(1, distributed.shard)
    strategy = ("distributed.strategy=auto",) if distributed.strategy in ("none", "replicate") else ()
    for shard in _SHARDS:
        if shard > now and shard % now == 0 and (card is None or card.num_gpus is None or shard <= card.num_gpus):
            yield (f"distributed.shard={shard}", *strategy)


def _fewer_sequences(config: GRPOConfig | PolicyConfig) -> Iterator[Words]:
    batch = config.generator.max_batch
    while batch > 8:
        batch //= 2
        yield (f"generator.max_batch={batch}",)


def _more_gpus(config: GRPOConfig | PolicyConfig, run: ResolvedRun) -> Iterator[Words]:
    """Split the engine over GPUs, as far as its heads can be."""
    can_split = config.generator.capabilities.tensor_parallel
    if not can_split or not run.generator_on_gpu or run.placement != "apart":
        return
    for tensor in (2, 4, 8):
        if tensor > run.tensor_parallel and run.sizes.num_kv_heads % tensor == 0:
            yield (f"generator.tensor_parallel={tensor}",)


def _elsewhere(config: GRPOConfig) -> Iterator[Words]:
    if config.placement != "apart":
        yield ("placement=apart",)
    if config.generator.num_replicas > 1:
        yield ("generator.num_replicas=1",)


def shorter_contexts(config: ForgeConfig) -> Iterator[Words]:
    """What changes the task and not only its cost: the last resort."""
    if isinstance(config, PolicyConfig):
        length = config.generator.max_seq_len or 4096
        while length > 512:
            length //= 2
            yield (f"generator.max_seq_len={length}",)
        return
    if not isinstance(config, GRPOConfig | SFTConfig):
        return
    length = config.training.max_seq_len
    while length > 256:
        length //= 2
        words = [f"training.max_seq_len={length}", f"training.microbatch_tokens={length}"]
        if isinstance(config, GRPOConfig):
            tokens = config.generator.sampling.max_tokens
            words.append(f"generator.max_seq_len={length}")
            if tokens is not None and tokens >= length:
                words.append(f"generator.sampling.max_tokens={length // 2}")
        yield tuple(words)
