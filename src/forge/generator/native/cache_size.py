"""The default size of the cache for keys and values, computed from plain numbers before anything is allocated.
`forge.generator.native.runner` uses what a device has free, and the memory planner what it would have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import Field

from forge.config import GenerationConfig, GeneratorConfig, ModelConfig
from forge.config.adapter import BaseDtype
from forge.errors import ConfigError, ModelError
from forge.models.adapter_names import adapter_map, num_adapter_parameters
from forge.models.locate import ResolvedModel, resolve
from forge.models.peft_files import read_spec
from forge.models.quantized_names import QuantizedSizes
from forge.models.sizes import GROUP_MULTIPLE


class ColocatedGeneratorConfig(GeneratorConfig):
    """The configuration of a generator on a trainer's GPU whose cache is released while the trainer works.

    Derived from a run's configuration, never written by a user: see `forge.loops.workers.generator_config`.
    """

    expected_bytes: int = Field(
        default=0, ge=0, description="Memory that others on the GPU will take after the generator's start, and keep."
    )
    num_colocated: int = Field(default=1, ge=1, description="Generators on the GPU, this one included.")


def adapter_bytes(config: GenerationConfig, model: ModelConfig, *, item: int) -> int:
    """Return the memory that the cache leaves to adapters: `max_adapter_gb`, or what those of `adapters` take."""
    if config.max_adapter_gb is not None:
        return int(config.max_adapter_gb * (1 << 30))
    specs = (read_spec(Path(path)) for path in config.adapters.values())
    return item * sum(num_adapter_parameters(adapter_map(model, spec)) for spec in specs)


def resolved_draft(config: GenerationConfig) -> ResolvedModel | None:
    """Return the model that guesses tokens; None where none does."""
    section = config.speculation
    if section is None or section.model is None:
        return None
    try:
        return resolve(ModelConfig(path=section.model))
    except ModelError as error:
        raise ConfigError(
            f"the draft model cannot be used: {error.message}",
            path=DRAFT_KEY,
            value=section.model,
            rule=error.rule,
            repair=error.repair,
        ) from error


DRAFT_KEY: Final = "generator.speculation.model"
CPU_SHARE: Final = 0.25
"""The part of a machine's free memory that a cache takes: other processes compute there too."""

FREE_SHARE: Final = 0.8
"""The part of a GPU's free memory: activations, recorded steps and the sampler's buffers need the rest."""

ROOM_TO_KEEP: Final = 4
"""How many times its need an engine takes on a GPU of its own: prefixes stay cached for longer."""

TURNS_SHARE: Final = 0.92
"""The part of what a sleeping trainer leaves: fragmentation and the driver need the rest."""

GRAPH_SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
GRAPH_STEP: Final = 64
GRAPH_BYTES: Final = 12 << 20
"""For how many sequences decode steps are recorded, and what the driver keeps for one besides the memory of its
tensors."""

PREFILL_GPU: Final = 8192
PREFILL_CPU: Final = 512
"""Default number of prompt tokens in a step."""


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """What a cache needs, in pages.

    Attributes:
        page_bytes: the memory of one page, over all layers.
        least: pages of one sequence of full length, without which nothing can be generated.
        wanted: pages with which max_batch sequences of full length never run short.
    """

    page_bytes: int
    least: int
    wanted: int


def pages_on_cpu(need: CacheNeed, *, free_bytes: int) -> int:
    """Return what is wanted, at most a quarter of the free memory, and at least what one sequence needs."""
    return max(need.least, min(need.wanted, int(free_bytes * CPU_SHARE) // need.page_bytes))


def pages_on_gpu(need: CacheNeed, *, free_bytes: int, total_bytes: int, share: float | None = None) -> int:
    """Return the pages of a cache on a GPU; fewer than `need.least` if there is no room.

    Without `share` the engine has the GPU to itself, and takes up to four times what is wanted. With it a trainer uses
    the same GPU, and will need far more than it holds now: its optimizer's states and activations come with its first
    step. The cache then has what is wanted and no more, and at most that part of *all* the GPU's memory, so that the
    choice does not depend on how far the trainer has come.
    """
    room = int(free_bytes * FREE_SHARE)
    if share is None:
        return min(need.wanted * ROOM_TO_KEEP, room // need.page_bytes)
    return min(need.wanted, min(room, int(total_bytes * share)) // need.page_bytes)


def pages_in_turns(need: CacheNeed, *, free_bytes: int, expected_bytes: int = 0, work: StepWork) -> int:
    """Return the pages of a cache on a GPU whose trainer works only while the cache is released; fewer than
    `need.least` if there is no room.

    What is wanted, at most what is left beside all that stays: the trainer's weights and optimizer's states, which
    exist from its start, the engine's own weights, `expected_bytes` that others will still take and keep (published
    versions), and what a step of generation takes. Gradients and activations are gone when the cache is there.

    `free_bytes` is what is free when the trainer and the engine's weights are there and the cache is not.
    """
    room = max(0, free_bytes - expected_bytes - work.num_bytes)
    return min(need.wanted, int(room * TURNS_SHARE) // need.page_bytes)


# ---- What a step takes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepWork:
    """The memory of generation steps besides weights and cache, in bytes.

    Attributes:
        prefill: the tensors of one layer that are alive at once, for the longest row of a prefill.
        sampler: logits, scaled logits and probabilities of all sequences.
        graphs: recorded decode steps with their logits; 0 where none are recorded.
        weight: the largest weight of those that are kept in few bits, dequantised.
    """

    prefill: int
    sampler: int
    graphs: int
    weight: int = 0

    @property
    def num_bytes(self) -> int:
        return self.prefill + self.sampler + self.graphs + self.weight


def step_work(
    model: ModelConfig, config: GenerationConfig, *, item: int, on_gpu: bool, base_dtype: BaseDtype | None = None
) -> StepWork:
    """Return the memory of steps of a model with complete facts, which computes with numbers of `item` bytes, and keeps
    its linear weights as `base_dtype` says."""
    batch, vocab = config.max_batch, model.vocab_size or 0
    chunk = config.prefill_chunk_tokens or (PREFILL_GPU if on_gpu else PREFILL_CPU)
    num_drafted = 0 if config.speculation is None else batch  # of all sequences, in one step
    return StepWork(
        prefill=item * _widest(model) * max(chunk, batch + num_drafted),
        sampler=(batch + num_drafted) * vocab * 16,
        graphs=_graph_bytes(batch, vocab, item=item) if records_steps(model, config, on_gpu=on_gpu) else 0,
        weight=0 if base_dtype is None else QuantizedSizes.of(model, base_dtype).dequantized_bytes(item),
    )


def records_steps(model: ModelConfig, config: GenerationConfig, *, on_gpu: bool) -> bool:
    """Return whether decode steps are recorded. Of a mixture, only where one kernel computes all experts: without it,
    the host must know how many tokens each of them has."""
    if not (on_gpu and config.cuda_graphs):
        return False
    if model.num_experts is None:
        return True
    widths = (model.hidden_size or 0, model.expert_intermediate_size or 0)
    return config.precision_on(gpu=True) == "bfloat16" and not any(width % GROUP_MULTIPLE for width in widths)


def graph_sizes(max_batch: int) -> tuple[int, ...]:
    """Return the batch sizes for which decode steps are recorded."""
    small = {size for size in GRAPH_SIZES if size < max_batch}
    return tuple(sorted(small | set(range(GRAPH_SIZES[-1], max_batch, GRAPH_STEP)) | {max_batch}))


def _widest(model: ModelConfig) -> int:
    """Return how many numbers of a token are alive at once in a layer: in its feed-forward part, or in attention."""
    hidden, heads = model.hidden_size or 0, model.num_heads or 1
    head_dim = model.head_dim or hidden // heads
    if model.num_experts is None:
        inner = model.intermediate_size or 0
    else:
        inner = (model.num_experts_per_token or 1) * (model.expert_intermediate_size or 0)
    attention = 2 * heads * head_dim + 4 * (model.num_kv_heads or 1) * head_dim
    return max(3 * inner, attention) + 3 * hidden


def _graph_bytes(batch: int, vocab: int, *, item: int) -> int:
    sizes = graph_sizes(batch)
    return sum(sizes) * vocab * 4 + batch * vocab * item + len(sizes) * GRAPH_BYTES
