"""What a plan consists of: parts, the moments at which they are alive together, and the devices that hold them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from forge.memory.card import Card
from forge.models.quantized_names import QuantizedSizes
from forge.models.sizes import Sizes
from forge.trainer.layout import Layout

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
MASTER_BYTES = {"float32": 4, "bfloat16": 4, "float16": 4, "bfloat16_pure": 2, "float64": 8}
"""Of a weight as the trainer keeps it, by `distributed.precision`."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank has of a model, in numbers.

    Attributes:
        num_layers: of its pipeline stages.
        has_embedding, has_head: whether these are among its stages.
        held: parameters that it keeps, its shard of them.
        gathered_layer: one layer as it computes with it, when its shards are together.
        gathered_embedding, gathered_head: the embedding and the output layer, likewise.
        vocab: rows of the output layer that it has.
        adapted: parameters of adapters that it keeps, its shard of them; None where all weights are trained.
        quantized: weights that it keeps in few bits, whole, in `quantized_bytes`; they are not among the others.
    """

    num_layers: int
    has_embedding: bool
    has_head: bool
    held: int
    gathered_layer: int
    gathered_embedding: int
    gathered_head: int
    vocab: int
    adapted: int | None = None
    quantized: int = 0
    quantized_bytes: int = 0

    @property
    def trained(self) -> int:
        """Parameters that it trains, and has gradients and optimizer states for."""
        return self.held if self.adapted is None else self.adapted

    @property
    def largest_end(self) -> int:
        """The larger of embedding and output layer, of those that it has."""
        return max(self.gathered_embedding * self.has_embedding, self.gathered_head * self.has_head)

    @property
    def gathered(self) -> int:
        """Everything that its stages compute with, when all of it is together, tied embeddings counted twice."""
        ends = self.gathered_embedding * self.has_embedding + self.gathered_head * self.has_head
        return self.num_layers * self.gathered_layer + ends


def holdings(
    sizes: Sizes, layout: Layout, *, adapter: int | None = None, quantized: QuantizedSizes | None = None
) -> tuple[tuple[str, Holding], ...]:
    """What ranks hold, by kind of rank: all are alike without a pipeline, and with one its ends differ.

    `adapter` are the weights of a whole adapter. Tensor parallel ranks split one of its two matrices; here it counts as
    if they split none. `quantized` says what of each layer is kept in few bits.
    """
    found = _plain_holdings(sizes, layout)
    if quantized is not None:
        found = tuple((name, _with_quantized(holding, layout, quantized)) for name, holding in found)
    if adapter is None:
        return found
    heads = sizes.hidden if sizes.num_outputs == 1 else 0
    layer = -(-adapter // sizes.num_layers)
    return tuple(
        (name, replace(holding, adapted=-(-(layer * holding.num_layers + heads * holding.has_head) // layout.shard)))
        for name, holding in found
    )


def _with_quantized(holding: Holding, layout: Layout, quantized: QuantizedSizes) -> Holding:
    numbers = holding.num_layers * quantized.numbers
    return replace(
        holding,
        held=holding.held - numbers // layout.shard,
        gathered_layer=holding.gathered_layer - quantized.numbers,
        quantized=numbers,
        quantized_bytes=holding.num_layers * quantized.num_bytes,
    )


def _plain_holdings(sizes: Sizes, layout: Layout) -> tuple[tuple[str, Holding], ...]:
    per_stage = -(-sizes.num_layers // layout.num_stages)
    num_layers = min(sizes.num_layers, per_stage * (layout.num_stages // layout.pipeline))
    if layout.pipeline == 1:
        return (("", _holding(sizes, layout, num_layers, first=True, last=True)),)
    return (
        (" (first stage)", _holding(sizes, layout, num_layers, first=True, last=False)),
        (" (last stage)", _holding(sizes, layout, num_layers, first=False, last=True)),
    )


def _holding(sizes: Sizes, layout: Layout, num_layers: int, *, first: bool, last: bool) -> Holding:
    tensor = layout.tensor
    layer = sizes.layer_matrices // tensor + sizes.layer_norms
    experts = sizes.layer_experts // max(tensor, layout.expert)
    outputs = sizes.num_outputs // tensor if sizes.num_outputs > 1 else 1  # a scalar head is not split
    head = outputs * sizes.hidden
    ends = sizes.embedding // tensor * first + (0 if sizes.is_tied and first else head * last)
    norm = sizes.hidden if last else 0
    dense = num_layers * layer + ends + norm
    sparse = num_layers * sizes.layer_experts // (layout.shard * tensor)
    return Holding(
        num_layers=num_layers,
        has_embedding=first,
        has_head=last,
        held=-(-dense // layout.shard) + sparse,
        gathered_layer=layer + experts,
        gathered_embedding=sizes.embedding // tensor,
        gathered_head=head,
        vocab=outputs,
    )


Phase = Literal["generating", "training", "syncing", "scoring"]


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes memory.

    Attributes:
        name: what it is.
        num_bytes: how much it takes.
        why: where the number comes from, in a few words.
        is_passing: whether it comes and goes within a step, so that the allocator leaves gaps around it.
        owner: the process that holds it, where a device has several.
    """

    name: str
    num_bytes: int
    why: str
    is_passing: bool = False
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """Parts that are alive at the same time."""

    phase: Phase
    name: str
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One GPU, or the memory of one host.

    Attributes:
        name: who is on it, such as `trainer` or `trainer + generator`.
        count: how many devices look like this.
        capacity: what one has for processes, in bytes; None where that is not known.
        moments: what may be its fullest moment.
    """

    name: str
    count: int
    capacity: int | None
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The fullest moment."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @property
    def free(self) -> int | None:
        """What is left at the fullest moment; negative where it does not fit."""
        return None if self.capacity is None else self.capacity - self.peak.num_bytes

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.peak.num_bytes <= self.capacity

    def phase_peaks(self) -> dict[Phase, Moment]:
        """The fullest moment of each phase, in the order in which phases first occur."""
        peaks: dict[Phase, Moment] = {}
        for moment in self.moments:
            if moment.phase not in peaks or moment.num_bytes > peaks[moment.phase].num_bytes:
                peaks[moment.phase] = moment
        return peaks


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a whole run.

    Attributes:
        model: what the model is called, and `num_parameters` how large it is.
        card: the GPUs that it was planned for; None for a run on CPUs.
        gpus: GPUs that hold the same are one entry.
        host: the controller's host, with all processes that run there.
        num_gpus: how many GPUs the run needs in all.
        notes: what the plan had to assume.
    """

    model: str
    num_parameters: int
    card: Card | None
    gpus: tuple[DevicePlan, ...]
    host: DevicePlan
    num_gpus: int
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[DevicePlan, ...]:
        return (*self.gpus, self.host)

    @property
    def has_enough_gpus(self) -> bool:
        return self.card is None or self.card.num_gpus is None or self.num_gpus <= self.card.num_gpus

    @property
    def fits(self) -> bool:
        return self.has_enough_gpus and all(device.fits for device in self.devices)


def owned(parts: Iterable[Part], owner: str) -> tuple[Part, ...]:
    """The same parts, as those of a process. Parts that take nothing are left out."""
    return tuple(replace(part, owner=owner) for part in parts if part.num_bytes > 0)
