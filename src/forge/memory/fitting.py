"""What would fit: changes to a configuration, tried in the order of what they cost, and the longest rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forge.config import (
    DistributedConfig,
    ForgeConfig,
    GRPOConfig,
    ModelConfig,
    PolicyConfig,
    SupervisedConfig,
    TrainingConfig,
    load,
)
from forge.config.loading import to_plain
from forge.errors import ConfigError, ModelError
from forge.memory.card import Card
from forge.memory.constants import GIB, HEAD_CHUNK_GPU, VLLM_SHARE
from forge.memory.devices import generator_job, plan_memory
from forge.memory.generator import cache_need
from forge.memory.records import MemoryPlan
from forge.memory.resolved import ResolvedRun, resolve_run

Words = tuple[str, ...]
_SHARES = (0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)
_SHARDS = (2, 4, 8, 16, 32, 64)


def ladders(config: ForgeConfig, run: ResolvedRun, card: Card | None) -> tuple[Sequence[Words], ...]:
    """Kinds of changes in the order of what they cost, each with its steps from mild to strong.

    A smaller cache makes generation slower only when it is full; logits that are computed twice cost some percent of a
    step; shorter rows and smaller chunks of logits cost little; computing again costs a third of the step at most;
    taking turns makes generation wait; narrower states and weights change the last digits of what is learned;
    offloading waits for the host; more GPUs cost money.
    """
    found: list[Sequence[Words]] = []
    if isinstance(config, GRPOConfig | PolicyConfig):
        found.append(tuple(_cache(run, card)))
    if isinstance(config, GRPOConfig | SupervisedConfig):
        found += _training(config.training, on_gpu=run.trainer_on_gpu)
    if isinstance(config, GRPOConfig):
        found.append(tuple(_placement(config, run)))
    if isinstance(config, GRPOConfig | SupervisedConfig):
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
    cache = [("training.head_cache_gb=0",)] if on_gpu and training.head_cache_gb > 0 else []
    modes = ("none", "selective", "full")
    stronger = modes[modes.index(training.activation_checkpointing) + 1 :]
    return [cache, rows, chunks, [(f"training.activation_checkpointing={mode}",) for mode in stronger]]


def _placement(config: GRPOConfig, run: ResolvedRun) -> Iterator[Words]:
    fresh = ("rollout.staleness=0",) if config.rollout.staleness else ()
    if config.placement in ("apart", "beside"):
        yield ("placement=turns", *fresh)
    is_alone = run.layout is not None and run.layout.num_ranks == 1 and config.generator.num_replicas == 1
    is_alone &= run.critic is None or not run.critic.is_beside
    if config.placement != "shared" and is_alone and config.generator.capabilities.shared_weights:
        yield ("placement=shared", *fresh)


def _states(training: TrainingConfig, distributed: DistributedConfig, *, on_gpu: bool) -> list[Sequence[Words]]:
    found: list[Sequence[Words]] = []
    is_adamw = training.optimizer == "adamw"
    if is_adamw and training.optimizer_dtype == "float32" and distributed.precision != "bfloat16_pure":
        found.append([("training.optimizer_dtype=bfloat16",)])
    if distributed.precision in ("float32", "float64") and on_gpu:
        found.append([("distributed.precision=bfloat16",)])
    if not training.activation_offload and on_gpu:
        found.append([("training.activation_offload=true",)])
    if distributed.precision not in ("bfloat16_pure", "float16") and on_gpu:
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
    if config.algorithm.has_critic and config.critic.placement == "beside":
        yield ("critic.placement=apart",)


def shorter_contexts(config: ForgeConfig) -> Iterator[Words]:
    """What changes the task and not only its cost: the last resort."""
    if isinstance(config, PolicyConfig):
        length = config.generator.max_seq_len or 4096
        while length > 512:
            length //= 2
            yield (f"generator.max_seq_len={length}",)
        return
    if not isinstance(config, GRPOConfig | SupervisedConfig):
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


_STEP = 256
_MOST_TOKENS = 1 << 22
_MOST_PROPOSALS = 4


@dataclass(frozen=True, slots=True)
class Change:
    """Overrides with which a run fits, as they are pasted behind a command, and its plan with them.

    `cost` is the place of the costliest among them in the order of `forge.memory.fitting`.
    """

    words: Words
    plan: MemoryPlan
    cost: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest values that fit with all else as it is; None where even the smallest does not, or none applies.

    `max_seq_len` is for rows of one sequence each, that is with `microbatch_tokens` equal to it.
    """

    microbatch_tokens: int | None
    max_seq_len: int | None


@dataclass(frozen=True)
class _Search:
    """Plans of variants of one configuration, each made once."""

    config: ForgeConfig
    card: Card | None
    facts: ModelConfig | None
    host_bytes: int | None
    _known: dict[Words, MemoryPlan | None] = field(default_factory=dict)

    def with_words(self, words: Words) -> MemoryPlan | None:
        """The plan with overrides; None for a configuration that would be refused."""
        if words not in self._known:
            self._known[words] = self._plan(words)
        return self._known[words]

    def _plan(self, words: Words) -> MemoryPlan | None:
        try:
            changed = changed_config(self.config, words)
            run = resolve_run(changed, card=self.card, facts=self.facts)
        except (ConfigError, ModelError):
            return None  # this combination is refused for another reason than memory
        return plan_memory(run, card=self.card, host_bytes=self.host_bytes)

    def shortage(self, words: Words) -> float:
        """By how much it does not fit with overrides; infinity for a configuration that would be refused."""
        plan = self.with_words(words)
        return math.inf if plan is None else shortage(plan)


def changed_config(config: ForgeConfig, words: Sequence[str]) -> Any:
    """The same configuration with overrides laid over it, checked as any other."""
    plain = to_plain(config)
    plain["model"].pop("preset", None)  # what it said is in the plain values; it must not be laid over them again
    return load(type(config), defaults=plain, overrides=words)


def propose(
    config: ForgeConfig, *, card: Card | None, facts: ModelConfig | None = None, host_bytes: int | None = None
) -> tuple[Change, ...]:
    """Changes with which a run fits, those that cost least first; empty where none was found.

    Every one fits when it is applied. They are changes of one kind that are enough alone; a combination of cheaper
    ones, where there is one; and only where nothing else is enough, a shorter context.
    """
    run = resolve_run(config, card=card, facts=facts)
    present = plan_memory(run, card=card, host_bytes=host_bytes)
    if present.fits:
        return ()
    search, rungs = _Search(config, card, facts, host_bytes), ladders(config, run, card)
    singles = list(_singles(search, rungs))
    combined = list(_combination(search, rungs))
    if combined and (not singles or combined[0].cost < singles[0].cost):
        singles = [*combined, *singles]
    if not singles:
        singles = list(_combination(search, (*rungs, (*shorter_contexts(config), ()))))
    return tuple(singles[:_MOST_PROPOSALS])


def _singles(search: _Search, rungs: Sequence[Sequence[Words]]) -> Iterator[Change]:
    for cost, ladder in enumerate(rungs):
        for words in ladder:
            plan = search.with_words(words)
            if plan is not None and plan.fits:
                yield Change(words, plan, cost)
                break


def _combination(search: _Search, rungs: Sequence[Sequence[Words]]) -> Iterator[Change]:
    """All kinds of changes together, each as far as it helps; then each as little as still fits, costliest first."""
    chosen: list[Words] = [ladder[-1] for ladder in rungs]
    for index in [*range(len(rungs)), *range(len(rungs))]:
        strongest_first = (*reversed(rungs[index]), ())
        chosen[index] = min(strongest_first, key=lambda words: search.shortage(_replaced(chosen, index, words)))
    if search.shortage(_flat(chosen)) > 0:
        return
    for index in reversed(range(len(rungs))):
        options = ((), *rungs[index])
        chosen[index] = next(words for words in options if not search.shortage(_replaced(chosen, index, words)))
    plan = search.with_words(_flat(chosen))
    assert plan is not None
    yield Change(_flat(chosen), plan, max(index for index, words in enumerate(chosen) if words))


def _replaced(chosen: Sequence[Words], index: int, words: Words) -> Words:
    return _flat([*chosen[:index], words, *chosen[index + 1 :]])


def _flat(chosen: Sequence[Words]) -> Words:
    """All words, the last one where a key comes twice."""
    by_key = {word.partition("=")[0]: word for words in chosen for word in words}
    return tuple(by_key.values())


def shortage(plan: MemoryPlan) -> int:
    """By how many bytes a plan does not fit, over all devices."""
    missing = 0
    if plan.card is not None and plan.card.num_gpus is not None:
        missing = max(0, plan.num_gpus - plan.card.num_gpus) * plan.card.num_bytes
    return missing + sum(max(0, -(device.free or 0)) * device.count for device in plan.devices)


# ---- The longest rows ----------------------------------------------------------------------------------------------


def find_limits(run: ResolvedRun, *, card: Card | None, host_bytes: int | None = None) -> Limits:
    """The most tokens of a row, and the longest sequence, that fit with everything else as it is."""
    if run.training is None:
        return Limits(None, None)

    def fits(changed: ResolvedRun) -> bool:
        return plan_memory(changed, card=card, host_bytes=host_bytes).fits

    least = run.training.max_seq_len
    longest = run.facts.max_seq_len or _MOST_TOKENS
    most = _largest(lambda tokens: fits(_with_microbatch(run, tokens)), least=least, most=_MOST_TOKENS)
    return Limits(most, _largest(lambda length: fits(_with_length(run, length)), least=2, most=longest))


def _with_microbatch(run: ResolvedRun, tokens: int) -> ResolvedRun:
    return _with_training(run, {"microbatch_tokens": tokens})


def _with_training(run: ResolvedRun, update: Mapping[str, Any]) -> ResolvedRun:
    """The run with other keys of the trainer, and of the critic, which has the same rows."""
    assert run.training is not None
    critic = run.critic
    if critic is not None:
        critic = replace(critic, training=critic.training.model_copy(update=update))
    return replace(run, training=run.training.model_copy(update=update), critic=critic)


def _with_length(run: ResolvedRun, length: int) -> ResolvedRun:
    assert run.training is not None
    completion = max(1, round(run.completion_tokens * length / run.training.max_seq_len))
    return replace(
        _with_training(run, {"max_seq_len": length, "microbatch_tokens": None}),
        generator_seq_len=length if run.generator is not None else 0,
        completion_tokens=completion,
    )


def _largest(fits: Callable[[int], bool], *, least: int, most: int) -> int | None:
    """The largest number up to `most` that fits, in steps of 256 tokens above `least`."""
    if least > most or not fits(least):
        return None
    if fits(most):
        return most
    low, high = 0, (most - least) // _STEP + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(least + middle * _STEP):
            low = middle
        else:
            high = middle
    found = least + low * _STEP
    return found - found % _STEP if found - found % _STEP >= least else found
