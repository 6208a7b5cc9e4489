"""What one process of a generator holds on its device, awake and asleep."""

from __future__ import annotations

from dataclasses import dataclass

from forge.config import GenerationConfig, ModelConfig
from forge.generator.native.cache_size import (
    CacheNeed,
    StepWork,
    adapter_bytes,
    graph_sizes,
    pages_in_turns,
    pages_on_cpu,
    pages_on_gpu,
    resolved_draft,
    step_work,
)
from forge.generator.vllm.lora_arguments import num_slot_weights
from forge.memory.constants import CUDA_CONTEXT, GIB, PAGE_TOKENS, VLLM_ASLEEP, VLLM_OVERHEAD, VLLM_SHARE
from forge.memory.records import ITEM_BYTES, Part
from forge.models.adapter_names import AdapterSpec
from forge.models.quantized_names import QuantizedSizes
from forge.models.sizes import Sizes


@dataclass(frozen=True, slots=True)
class GeneratorJob:
    """What a generator is asked to do.

    Attributes:
        facts, sizes: the model's.
        max_seq_len: the longest sequence, decided.
        tensor: GPUs over which it is split.
        share: the part of a GPU that it may take; None where it has one to itself.
        capacity: the GPU's memory as the driver tells it, or what a host has free.
        occupied: what others hold on that device when the cache is made.
        is_guest: whether it is in a trainer's process. It computes with the trainer's own weights then, if these are
            kept in its precision, `kept_item` bytes each, and else with a copy.
        takes_turns: whether it gives its cache back while a trainer works on the same GPU.
        num_alike: generators that divide the device.
        num_resident: pinned versions that are loaded beside the live weights; `published_weights` the numbers in each:
            all of the model's, or the adapter's; `published_item` the bytes of one in the store.
        adapter: the adapter that versions hold; None where they hold all weights.
        quantized: what each layer keeps in few bits.
    """

    facts: ModelConfig
    sizes: Sizes
    config: GenerationConfig
    max_seq_len: int
    on_gpu: bool
    capacity: int
    tensor: int = 1
    share: float | None = None
    occupied: int = 0
    is_guest: bool = False
    kept_item: int | None = None
    takes_turns: bool = False
    num_alike: int = 1
    num_resident: int = 0
    published_weights: int = 0
    published_item: int = 0
    adapter: AdapterSpec | None = None
    quantized: QuantizedSizes | None = None

    @property
    def work(self) -> StepWork:
        base_dtype = None if self.quantized is None else self.quantized.base_dtype
        return step_work(self.facts, self.config, item=self.item, on_gpu=self.on_gpu, base_dtype=base_dtype)

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.config.precision_on(gpu=self.on_gpu)]

    @property
    def weights(self) -> int:
        is_shared = self.is_guest and self.kept_item == self.item
        if is_shared:
            return 0
        if self.quantized is None:
            return self.item * self.sizes.total // self.tensor
        layers = self.sizes.num_layers
        return self.item * (self.sizes.total - layers * self.quantized.numbers) + layers * self.quantized.num_bytes


def awake_parts(job: GeneratorJob) -> tuple[Part, ...]:
    """What it holds while it generates."""
    return _vllm_parts(job) if job.config.capabilities.reserves_gpu_share else _native_parts(job)


def asleep_parts(job: GeneratorJob) -> tuple[Part, ...]:
    """What it still holds on the GPU while the trainer works.

    The native engine keeps its recorded steps. In a trainer's process it also keeps its copy of the weights; in one
    of its own these go to the host.
    """
    if job.config.capabilities.reserves_gpu_share:
        return (Part("vLLM asleep", VLLM_ASLEEP, "context and recorded steps"),)
    guest = {"weights", "rotary tables", "CUDA graphs", "pinned versions", "adapters", "draft model"}
    kept = guest if job.is_guest else {"CUDA context", "CUDA graphs"}
    return tuple(part for part in _native_parts(job) if part.name in kept)


def asleep_host_bytes(job: GeneratorJob) -> int:
    """Weights that wait in the host's memory meanwhile."""
    return job.weights * job.tensor


def page_bytes(sizes: Sizes, item: int) -> int:
    """The memory of one page of keys and values, over all layers."""
    return 2 * PAGE_TOKENS * sizes.keys * item * sizes.num_layers


def cache_need(job: GeneratorJob) -> CacheNeed:
    """What the cache is for, as `forge.generator.native.runner` counts it."""
    pages = -(-job.max_seq_len // PAGE_TOKENS)
    item = 1 if job.config.kv_cache_dtype == "fp8" else job.item if job.on_gpu else 4
    draft = _draft_facts(job)
    each = page_bytes(job.sizes, item) + (0 if draft is None else page_bytes(Sizes.of(draft), item))
    return CacheNeed(each, pages + 1, pages + 1 + pages * job.config.max_batch)


def _draft_facts(job: GeneratorJob) -> ModelConfig | None:
    found = resolved_draft(job.config)
    return None if found is None else found.architecture


def _native_parts(job: GeneratorJob) -> tuple[Part, ...]:
    kept = "" if job.quantized is None else f", linear layers in {job.quantized.base_dtype}"
    others = [Part("weights", job.weights, f"{job.sizes.total / 1e6:,.0f} M parameters x {job.item} bytes{kept}")]
    if job.on_gpu and not job.is_guest:
        others.append(Part("CUDA context", CUDA_CONTEXT, "of the process"))
    table = job.max_seq_len * 2 * job.sizes.head_dim * 4
    others.append(Part("rotary tables", table, "one for all layers"))
    if job.num_resident:
        others.append(_pinned_versions(job))
    if adapters := adapter_bytes(job.config, job.facts, item=job.item):
        why = "generator.max_adapter_gb" if job.config.max_adapter_gb else f"{len(job.config.adapters)} loaded"
        others.append(Part("adapters", adapters, why))
    if draft := _draft_facts(job):
        work = step_work(draft, job.config, item=job.item, on_gpu=job.on_gpu)
        others.append(Part("draft model", Sizes.of(draft).total * job.item + work.graphs, "generator.speculation"))
    cache = _native_cache(job, sum(part.num_bytes for part in others))
    return (*others, cache, *_working_parts(job))


def _pinned_versions(job: GeneratorJob) -> Part:
    """The weights of pinned versions: on a GPU with recorded steps of their own, on a CPU those of the store."""
    weights = job.item * job.published_weights
    if job.on_gpu:
        return Part("pinned versions", job.num_resident * (weights + job.work.graphs), f"{job.num_resident} loaded")
    is_shared = job.published_item == job.item
    why = "read in the store's memory" if is_shared else f"{job.num_resident} converted to {job.item} bytes"
    return Part("pinned versions", 0 if is_shared else job.num_resident * weights, why)


def _native_cache(job: GeneratorJob, held: int) -> Part:
    need = cache_need(job)
    if job.config.kv_cache_gb is not None:
        num_pages, why = int(job.config.kv_cache_gb * GIB) // need.page_bytes, "generator.kv_cache_gb"
    else:
        free = max(0, job.capacity - job.occupied - held)
        if job.on_gpu and job.takes_turns and job.share is None:
            own = max(0, job.capacity - job.occupied) // job.num_alike - held
            num_pages = pages_in_turns(need, free_bytes=own, work=job.work)
        elif job.on_gpu:
            num_pages = pages_on_gpu(need, free_bytes=free, total_bytes=job.capacity, share=job.share)
        else:
            num_pages = pages_on_cpu(need, free_bytes=free)
        why = f"wanted: {job.config.max_batch} sequences of {job.max_seq_len:,}"
    num_pages = max(num_pages, need.least)
    return Part("KV cache", num_pages * need.page_bytes, f"{num_pages * PAGE_TOKENS:,} tokens; {why}")


def _working_parts(job: GeneratorJob) -> tuple[Part, ...]:
    """What a step needs besides weights and cache."""
    work, batch = job.work, job.config.max_batch
    return (
        Part("dequantised weight", work.weight, "for the moment of a product", is_passing=True),
        Part("prefill", work.prefill, "the longest row of a prefill, one layer", is_passing=True),
        Part("sampler", work.sampler, f"{batch} rows of {job.sizes.vocab:,} logits", is_passing=True),
        Part("CUDA graphs", work.graphs, f"{len(graph_sizes(batch))} recorded steps with their logits"),
    )


def _adapter_parts(job: GeneratorJob) -> tuple[Part, ...]:
    """vLLM's slots for adapters, where one is trained: all of the largest rank, on every GPU."""
    if job.adapter is None:
        return ()
    num = num_slot_weights(job.config.engine_args, job.adapter, job.facts)
    return (Part("adapter slots", job.item * num, f"{num / 1e6:,.1f} M parameters x {job.item} bytes"),)


def _vllm_parts(job: GeneratorJob) -> tuple[Part, ...]:
    adapters = _adapter_parts(job)
    if not job.on_gpu:
        need = cache_need(job)
        cache = pages_on_cpu(need, free_bytes=job.capacity) * need.page_bytes
        if job.config.kv_cache_gb is not None:
            cache = int(job.config.kv_cache_gb * GIB)
        return (
            Part("weights", job.weights, f"{job.item} bytes each"),
            *adapters,
            Part("KV cache", cache, "of vLLM"),
            Part("vLLM", VLLM_OVERHEAD, "its processes"),
        )
    if job.config.kv_cache_gb is not None:
        cache = int(job.config.kv_cache_gb * GIB) // job.tensor
        overhead = VLLM_OVERHEAD + CUDA_CONTEXT
        return (
            Part("weights", job.weights, f"{job.item} bytes each, over {job.tensor} GPU(s)"),
            *adapters,
            Part("KV cache", cache, "generator.kv_cache_gb"),
            Part("vLLM", overhead, "context, recorded steps, activations"),
        )
    share, why = vllm_share(job)
    rest = int(share * job.capacity) - job.weights - sum(part.num_bytes for part in adapters)
    least = cache_need(job).least * cache_need(job).page_bytes // job.tensor + VLLM_OVERHEAD
    return (
        Part("weights", job.weights, f"{job.item} bytes each, over {job.tensor} GPU(s)"),
        *adapters,
        Part("KV cache and vLLM", max(rest, least), f"{share:.0%} of the GPU less weights; {why}"),
        Part("CUDA context", CUDA_CONTEXT, "of the process"),
    )


def vllm_share(job: GeneratorJob) -> tuple[float, str]:
    """vLLM's part of the GPU, and the key that says so."""
    given = job.config.engine_args.get("gpu_memory_utilization")
    if given is not None:
        return float(given), "gpu_memory_utilization"
    return (VLLM_SHARE, "its default") if job.share is None else (job.share, "generator.gpu_memory_share")
