"""What one rank of a trainer holds, and at which moments of a step it holds most."""

from __future__ import annotations

from dataclasses import dataclass

from forge.config import DistributedConfig, TrainingConfig
from forge.memory.activations import Row, Setting, backward_bytes, forward_bytes, kept_bytes, recomputed_bytes
from forge.memory.constants import (
    ALLOCATOR_SLACK,
    COMPILED_SLACK,
    CUDA_CONTEXT,
    GIB,
    HEAD_CHUNK_CPU,
    HEAD_CHUNK_GPU,
    NCCL_BUFFERS,
)
from forge.memory.records import MASTER_BYTES, Holding, Moment, Part, Phase
from forge.models.quantized_names import QuantizedSizes
from forge.models.sizes import Sizes
from forge.trainer.layout import Layout


@dataclass(frozen=True, slots=True)
class TrainerJob:
    """What a trainer is asked to do, for one kind of rank.

    Attributes:
        attended_ratio: how many tokens take part in attention for each that is computed; above 1 where beginnings are
            shared.
        wide_logits: whether logits are kept in float32; `entropy` whether their entropy is wanted with its gradient.
        accumulates: whether a step has several rows, so that gradients exist while the next row goes forward.
        caches_logits: whether logits may wait for the backward pass: those of a policy loss, on a GPU.
        num_versions: published versions of the weights that are on this GPU, or on their way from it to a host;
            `published_item` the bytes of a number in them.
        quantized: what each layer keeps in few bits.
    """

    sizes: Sizes
    holding: Holding
    layout: Layout
    training: TrainingConfig
    distributed: DistributedConfig
    on_gpu: bool
    attended_ratio: float = 1.0
    wide_logits: bool = False
    entropy: bool = False
    accumulates: bool = True
    caches_logits: bool = False
    num_versions: int = 0
    published_item: int = 4
    quantized: QuantizedSizes | None = None

    @property
    def master(self) -> int:
        """Bytes of a weight as it is kept."""
        return MASTER_BYTES[self.distributed.precision]

    @property
    def has_adapter(self) -> bool:
        return self.holding.adapted is not None

    @property
    def weight_bytes(self) -> int:
        """All weights: those below an adapter are kept in what is computed with."""
        if self.holding.adapted is None:
            return self.master * self.holding.held
        kept = self.setting.item * self.holding.held + self.holding.quantized_bytes
        return kept + self.master * self.holding.adapted

    @property
    def state_bytes(self) -> int:
        """The optimizer's states. One of its own is counted as two for each weight, as AdamW's are."""
        trained = self.holding.trained
        if self.training.optimizer == "muon":
            return self.master * (2 * trained - self.muon_weights)
        return 2 * (2 if self.training.optimizer_dtype == "bfloat16" else self.master) * trained

    @property
    def muon_weights(self) -> int:
        """The weights of hidden matrices, for which Muon has one state. Experts are left to AdamW."""
        if self.holding.adapted is not None:
            return 0 if self.sizes.num_experts else self.holding.adapted
        return self.holding.num_layers * self.sizes.layer_matrices // (self.layout.tensor * self.layout.shard)

    @property
    def setting(self) -> Setting:
        return Setting.of(
            self.distributed.precision.removesuffix("_pure"),
            on_gpu=self.on_gpu,
            tensor=self.layout.tensor,
            splits_rows=self.distributed.sequence_parallel or self.layout.expert > 1,
            is_compiled=self.training.compile,
        )

    @property
    def uses_fsdp(self) -> bool:
        """As in `forge.trainer.assembly`: one rank that computes in the precision of its weights gathers nothing."""
        converts = self.master != self.setting.item and not self.has_adapter
        return self.layout.data_parallel > 1 or converts or self.layout.expert > 1

    @property
    def row(self) -> Row:
        tokens = self.training.microbatch_tokens or self.training.max_seq_len
        return Row(tokens, round(tokens * self.attended_ratio))

    @property
    def rows_at_once(self) -> int:
        """Rows whose activations wait for their backward pass: those in a pipeline."""
        if self.layout.pipeline == 1:
            return 1
        if self.distributed.pipeline_schedule == "GPipe" or self.holding.has_embedding:
            most = self.layout.num_stages if self.distributed.pipeline_schedule != "GPipe" else 10**9
            return min(self.layout.pipeline_microbatches, most)
        return 1

    @property
    def chunk(self) -> int:
        return self.training.head_chunk_tokens or (HEAD_CHUNK_GPU if self.on_gpu else HEAD_CHUNK_CPU)


def lasting_parts(job: TrainerJob) -> tuple[Part, ...]:
    """What a rank holds between two steps."""
    held, trained, master = job.holding.held, job.holding.trained, job.master
    table = max(job.training.max_seq_len, job.training.microbatch_tokens or 0) * 2 * job.sizes.head_dim * 4
    share = f"{held / 1e6:,.0f} M of {job.sizes.total / 1e6:,.0f} M parameters"
    each = job.setting.item if job.has_adapter else master
    adapter = f", and {trained / 1e6:,.1f} M of the adapter x {master} bytes" if job.has_adapter else ""
    if job.quantized is not None:
        adapter = f", {job.holding.quantized / 1e6:,.0f} M in {job.quantized.base_dtype}{adapter}"
    parts = [
        Part("weights", job.weight_bytes, f"{share} x {each} bytes{adapter}"),
        Part("optimizer states", job.state_bytes, _states_text(job)),
        Part("rotary tables", table * job.holding.num_layers, "one for each layer"),
    ]
    if job.num_versions:
        why = f"{job.num_versions} version(s) for generators to fetch, {job.published_item} bytes for each weight"
        parts.append(Part("published weights", job.num_versions * job.published_item * trained, why))
    if job.on_gpu:
        alone = job.layout.num_ranks == 1
        parts.append(Part("CUDA context", CUDA_CONTEXT + (0 if alone else NCCL_BUFFERS), "of the process"))
    return tuple(parts)


def _states_text(job: TrainerJob) -> str:
    if job.training.optimizer == "muon":
        return f"one of {job.master} bytes for each in a hidden matrix, two for the others"
    state = 2 if job.training.optimizer_dtype == "bfloat16" else job.master
    text = f"two of {state} bytes for each that is trained"
    return text if job.training.optimizer == "adamw" else f"{text}: assumed for {job.training.optimizer}"


def training_moments(job: TrainerJob) -> tuple[Moment, ...]:
    """The moments of a step at which memory may be fullest. Which of them is depends on the model and the settings."""
    lasting = lasting_parts(job)
    accumulated = _gradients(job) if job.accumulates else ()
    waiting = (*accumulated, *_gathered(job), *_activations(job))
    moments = [
        ("output layer", (*waiting, *_head(job))),
        ("sum of the output layer's gradient", (*waiting, *_head_sum(job))),
        ("last layer's backward pass", (*waiting, *_layer(job))),
        ("sum of the embedding's gradients", (*_gradients(job), *_embedding_sum(job))),
        ("optimizer", (*_gradients(job), *_optimizer(job))),
    ]
    share, idle = COMPILED_SLACK if job.training.compile else ALLOCATOR_SLACK, idle_bytes(job)
    return tuple(make_moment("training", name, (*lasting, *parts), share=share, idle=idle) for name, parts in moments)


def scoring_moment(job: TrainerJob) -> Moment:
    """A frozen model that only scores."""
    kept = tuple(part for part in lasting_parts(job) if part.name not in ("optimizer states", "published weights"))
    forward = forward_bytes(job.sizes, job.setting, job.row.tokens)
    logits = _logit_bytes(job, with_gradient=False)
    parts = (
        Part("activations", forward, f"{job.row.tokens:,} tokens of one layer", is_passing=True),
        Part("output layer", logits, f"logits of {job.chunk:,} tokens", is_passing=True),
    )
    return make_moment("scoring", "forward pass", (*kept, *_gathered(job), *parts))


def offloaded_bytes(job: TrainerJob) -> int:
    """Activations that wait in the host's memory."""
    return _kept_bytes(job) if job.training.activation_offload else 0


def make_moment(
    phase: Phase, name: str, parts: tuple[Part, ...], *, share: float = ALLOCATOR_SLACK, idle: int = 0
) -> Moment:
    """A moment, with what an allocator holds besides: gaps around what comes and goes, and `idle` blocks."""
    passing = sum(part.num_bytes for part in parts if part.is_passing)
    why = f"{share:.1%} of what comes and goes" + (", and idle blocks of the embedding's size" if idle else "")
    slack = Part("allocator slack", int(passing * share) + idle, why)
    return Moment(phase, name, tuple(part for part in (*parts, slack) if part.num_bytes > 0))


def idle_bytes(job: TrainerJob) -> int:
    """Blocks as large as the embedding that torch's allocator holds while nothing is in them.

    A block that was freed serves smaller requests, never larger ones, and what activations leave is in pieces. So the
    sum of the embedding's gradient, in float32, and that gradient itself keep blocks for themselves, which are idle
    when activations are at their peak; so do the copies of an optimizer with narrow states, all but one, which finds
    its place in what the sum left. Rows of few tokens have the same blocks as long ones: their gaps are relatively
    larger.
    """
    holding, item = job.holding, job.setting.item
    if not job.on_gpu or job.has_adapter:
        return 0
    weight = holding.largest_end
    sums = 4 * weight if job.uses_fsdp else 0
    copies = sum(part.num_bytes for part in _optimizer(job))
    return sums + item * weight + max(0, copies - 4 * weight // job.layout.shard)


def _gradients(job: TrainerJob) -> tuple[Part, ...]:
    return (Part("gradients", job.master * job.holding.trained, f"{job.master} bytes for each weight trained"),)


def _gathered(job: TrainerJob) -> tuple[Part, ...]:
    """Weights as the model computes with them, where they are kept in another form: wider, or in shards.

    On one data parallel rank all of them stay from the first row of a step to its last.
    """
    if not job.uses_fsdp:
        return ()
    holding, item = job.holding, job.setting.item
    if job.layout.shard == 1 or job.layout.pipeline > 1:
        is_tied = job.sizes.is_tied and holding.has_embedding
        numbers, why = holding.gathered - (holding.gathered_head if is_tied else 0), "all layers"
    else:
        numbers = holding.largest_end + 3 * holding.gathered_layer
        why = "embedding, two layers and a third on its way"
    return (Part("gathered weights", item * numbers, f"{why}, {item} bytes for each weight", is_passing=True),)


def _kept_bytes(job: TrainerJob) -> int:
    row, setting, holding = job.row, job.setting, job.holding
    layers = holding.num_layers * kept_bytes(job.sizes, setting, row, job.training.activation_checkpointing)
    ends = setting.item * job.sizes.hidden * row.tokens * (2 if holding.has_head else 0)
    return layers * job.rows_at_once + ends


def _activations(job: TrainerJob) -> tuple[Part, ...]:
    row, mode = job.row, job.training.activation_checkpointing
    if job.training.activation_offload:
        on_device = kept_bytes(job.sizes, job.setting, row) if mode == "none" else 0
        why = "one layer; the others wait in the host's memory"
        return (Part("activations", on_device, why, is_passing=True),)
    at_once = f" x {job.rows_at_once} rows" if job.rows_at_once > 1 else ""
    shared = f", {row.attended:,} in attention" if row.is_shared else ""
    why = f"{row.tokens:,} tokens{at_once}{shared}, {job.holding.num_layers} layers, checkpointing {mode}"
    return (Part("activations", _kept_bytes(job), why, is_passing=True),)


def _logit_bytes(job: TrainerJob, *, with_gradient: bool) -> int:
    """The buffers of one chunk of the output layer, and what waits for the backward pass."""
    item, cached = job.setting.item, _cached_tokens(job) if with_gradient else 0
    is_wide = job.wide_logits and item < 4
    rows = min(job.chunk, job.row.tokens if is_wide else job.row.tokens - cached)
    return cached * job.holding.vocab * item + _chunk_bytes(job, rows, with_gradient=with_gradient)


def _chunk_bytes(job: TrainerJob, rows: int, *, with_gradient: bool) -> int:
    item = job.setting.item
    one = rows * job.holding.vocab
    wide = max(4, item)
    if not job.on_gpu or job.entropy or job.layout.tensor > 1:  # without the fused kernel: logits and probabilities
        return one * ((wide if job.wide_logits else item) + wide + (wide if job.entropy and item < 4 else 0))
    if job.wide_logits and item < 4:
        return one * (wide + (item if with_gradient else 0))
    return one * item


def _cached_tokens(job: TrainerJob) -> int:
    """Return of how many tokens the logits wait for the backward pass."""
    if not job.caches_logits or not job.on_gpu or job.entropy or job.layout.tensor > 1:
        return 0
    room = int(job.training.head_cache_gb * GIB) // (job.holding.vocab * job.setting.item)
    return min(room, job.row.tokens)


def _head(job: TrainerJob) -> tuple[Part, ...]:
    if not job.holding.has_head:
        return ()
    item, weight = job.setting.item, job.holding.gathered_head
    if job.sizes.num_outputs == 1:
        narrow, wide = 2 * item, 8 if item < 4 else 0
        states = job.row.tokens * job.sizes.hidden * (narrow + wide)
        why = "hidden states, in float32, with their gradients"
        return (Part("output layer", states, why, is_passing=True),)
    is_summed = _cached_tokens(job) < job.row.tokens  # one chunk needs no sum in float32
    gradient = (weight * max(4, item) if is_summed or item >= 4 else 0) + (weight * item if item < 4 else 0)
    gradient = 0 if job.has_adapter else gradient
    hidden = job.row.tokens * job.sizes.hidden * item
    return (
        Part("output layer", _logit_bytes(job, with_gradient=True), _logits_text(job), is_passing=True),
        Part("output layer's gradient", gradient + hidden, "summed in float32", is_passing=True),
    )


def _logits_text(job: TrainerJob) -> str:
    cached = _cached_tokens(job)
    return (
        f"logits of {cached:,} tokens, kept" if cached == job.row.tokens else f"logits of {cached + job.chunk:,} tokens"
    )


def _layer(job: TrainerJob) -> tuple[Part, ...]:
    sizes, setting, row, holding = job.sizes, job.setting, job.row, job.holding
    mode = job.training.activation_checkpointing
    again = recomputed_bytes(sizes, setting, row, mode)
    parts = [
        Part("one layer, computed again", again, "what checkpointing did not keep", is_passing=True),
        Part("one layer's gradients", backward_bytes(sizes, setting, row), "of its activations", is_passing=True),
    ]
    if job.has_adapter:
        widest = setting.item * max(sizes.num_chosen * sizes.inner, sizes.queries) // setting.tensor
        parts.append(Part("adapter's output", widest * row.tokens, "before it joins its layer's", is_passing=True))
    if job.quantized is not None:
        parts.append(dequantized_part(job.quantized, item=setting.item))
    if holding.has_head and sizes.is_tied and not job.has_adapter:
        head = setting.item * holding.gathered_head
        parts.append(Part("output layer's gradient", head, "until the embedding's joins it", is_passing=True))
    if job.uses_fsdp and not job.has_adapter:  # gradients are summed when this layer's activations are gone
        beyond = _sum_bytes(job, holding.gathered_layer) - kept_bytes(sizes, setting, row, mode) - again
        parts.append(Part("sums of gradients", max(0, beyond), "of a layer, in float32", is_passing=True))
    return tuple(parts)


def dequantized_part(quantized: QuantizedSizes, *, item: int) -> Part:
    """The largest weight that is kept in few bits, as it is computed with."""
    why = f"{quantized.largest / 1e6:,.0f} M weights x {item} bytes, for the moment of a product"
    return Part("dequantised weight", quantized.dequantized_bytes(item), why, is_passing=True)


def _head_sum(job: TrainerJob) -> tuple[Part, ...]:
    """The gradient of an output layer of its own is summed over ranks at once, while all activations wait.

    By then the gathered weight is gone, and so is the gradient in the narrow precision.
    """
    holding = job.holding
    if not (holding.has_head and job.uses_fsdp) or job.sizes.is_tied or job.has_adapter:
        return ()
    sums = _sum_bytes(job, holding.gathered_head) - job.setting.item * holding.gathered_head
    return (Part("sums of gradients", max(0, sums), "of the output layer, in float32", is_passing=True),)


def _sum_bytes(job: TrainerJob, numbers: int) -> int:
    """Gradients on their way from all ranks to the one that holds them: in float32, whole and as a shard.

    One data parallel rank adds up the rows of a step where autograd leaves their gradients, which are the whole of it
    already, and makes a second one of each only in the last row.
    """
    is_there = job.accumulates and job.layout.data_parallel == 1 and job.layout.expert == 1
    return (0 if is_there else 4 * numbers) + 4 * numbers // job.layout.shard


def _embedding_sum(job: TrainerJob) -> tuple[Part, ...]:
    """The embedding's gradient comes last, when all activations are gone.

    Where it is tied, three gradients are there at once: of the output layer, of the embedding, and both together.
    """
    holding, item = job.holding, job.setting.item
    if not holding.has_embedding or job.has_adapter:
        return ()
    weight, is_tied = holding.gathered_embedding, job.sizes.is_tied and holding.has_head
    gradients = (3 if is_tied else 1) * item * weight
    if not job.uses_fsdp:
        return (Part("embedding's gradient", gradients, "before it joins the others", is_passing=True),)
    beyond = _sum_bytes(job, weight) - gradients - item * weight
    return (
        Part("embedding's gradient", gradients, "before it is summed", is_passing=True),
        Part("gathered weights", item * weight, "the embedding", is_passing=True),
        Part("sums of gradients", max(0, beyond), "of the embedding, in float32", is_passing=True),
    )


def _optimizer(job: TrainerJob) -> tuple[Part, ...]:
    """AdamW works in place. With states in bfloat16 it takes one weight after the other, in float32. Muon gathers one
    matrix after the other, and has four copies of it in bfloat16."""
    if job.training.optimizer == "muon" and not job.has_adapter:
        widest = job.sizes.hidden * max(job.sizes.inner if not job.sizes.num_experts else 0, job.sizes.queries)
        return (Part("optimizer's copies", (4 + 4 * 2) * widest, "the largest hidden matrix", is_passing=True),)
    if job.training.optimizer_dtype != "bfloat16" or job.has_adapter:
        return ()
    holding = job.holding
    inner = job.sizes.hidden * job.sizes.inner * max(1, job.sizes.num_experts) // job.layout.tensor
    largest = max(holding.largest_end, inner) // job.layout.shard
    copies = 3 if job.master == 4 else 4
    return (Part("optimizer's copies", copies * 4 * largest, "the largest weight, in float32", is_passing=True),)
