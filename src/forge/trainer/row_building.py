"""Rows as tensors: what one data parallel rank takes through the model, as the plan of `microbatches` says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from forge.errors import DataError
from forge.kernels.paged import shared_places
from forge.losses.base import Divisors
from forge.models.rows import Documents, Sharing
from forge.trainer.microbatches import RowPlan
from forge.types import Batch

PAD_TOKEN = 0


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What goes through the model at once.

    Its samples have T tokens in all. L tokens are computed: all of theirs, or fewer where samples share their
    beginning, and padding after them. A padding token is a document by itself: nothing attends to it, and it attends to
    nothing else.

    Attributes:
        token_ids_L: int64, the tokens that are computed.
        positions_L: int64, their positions, from 0 in every sample.
        tokens_T: int64, the tokens of the samples, one sample after the other.
        places_T: int64, where each of them is computed: an index of the row.
        predicted_P: int64, ascending: the tokens (indices of T) that are predicted, which is all but samples' first.
        counted_N: int64, ascending: those among them that count, which is where their weight is not 0.
        own_U: int64, ascending: the tokens that are computed for the sample that they stand in. Place u of the row
            computes token own_U[u].
        document_lengths: of the samples, then a 1 for each padding token.
        sample_indices: which samples of the batch these are.
        weights_T: float32 or wider, the weight of each token as a *target*; 0 for the first of a sample.
        prefixes: how many of its first tokens each sample takes from the sample before it.
        fields: further values of the samples' tokens, each [T].
        temperatures: what the logits of each sample's tokens are divided by; empty for what the loss says.
        sequences: the sequence of each sample, numbered from 0 within the row; empty where every sample of the batch is
            its own sequence.
        sequence_weights_T: the summed weight of each token's sequence, over the whole batch; None where every sample of
            the batch is its own sequence.
    """

    token_ids_L: Tensor
    positions_L: Tensor
    tokens_T: Tensor
    places_T: Tensor
    predicted_P: Tensor
    counted_N: Tensor
    own_U: Tensor
    document_lengths: tuple[int, ...]
    sample_indices: tuple[int, ...]
    weights_T: Tensor
    prefixes: tuple[int, ...]
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    sequences: tuple[int, ...] = ()
    sequence_weights_T: Tensor | None = None
    temperatures: tuple[float, ...] = ()

    @property
    def sample_lengths(self) -> tuple[int, ...]:
        """The lengths of the samples, without padding. They add up to T."""
        return self.document_lengths[: len(self.sample_indices)]

    @property
    def num_padding(self) -> int:
        return len(self.document_lengths) - len(self.sample_indices)

    @property
    def is_shared(self) -> bool:
        """Whether some token is computed for several samples."""
        return int(self.own_U.shape[0]) < int(self.tokens_T.shape[0])

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each document starts, and its end: what attention over variable lengths asks for."""
        return tuple(accumulate(self.document_lengths, initial=0))

    def predictors(self, tokens_M: Tensor) -> Tensor:
        """Return the places of the row that predict these tokens."""
        return self.places_T.index_select(0, tokens_M - 1)

    def documents(self) -> Documents:
        """Return the samples, and padding after them, as attention takes them."""
        return Documents.of(self.sample_lengths, num_padding=self.num_padding, device=self.token_ids_L.device)

    def sharing(self, documents: Documents) -> Sharing | None:
        """Return how attention gets at these whole samples; None where the row holds them as they are."""
        if not self.is_shared:
            return None
        num_tokens, num_places = self.tokens_T.shape[0], self.own_U.shape[0]
        padding = torch.arange(self.num_padding, device=self.places_T.device)
        places, own = torch.cat([self.places_T, padding + num_places]), torch.cat([self.own_U, padding + num_tokens])
        return Sharing.of(documents, self.prefixes, places=places, own=own)

    def align(self, values_M: Tensor, tokens_M: Tensor) -> Tensor:
        """Return values of some tokens, such as their logprobs, as values of all tokens [T, …]: 0 for the others.

        `tokens_M` says of which: `counted_N` or `predicted_P`. Gradients flow back.
        """
        shape = (self.weights_T.shape[0], *values_M.shape[1:])
        return values_M.new_zeros(shape).index_copy(0, tokens_M, values_M)

    def temperature_of(self, tokens_M: Tensor, default: float) -> float | Tensor:
        """Return what the logits of some tokens are divided by: one number, or one for each token [M] where the samples
        of the row differ. `default` is for samples that do not say."""
        if len(set(self.temperatures)) < 2:
            return self.temperatures[0] if self.temperatures else default
        lengths = torch.tensor(self.sample_lengths, device=tokens_M.device)
        of_samples = torch.tensor(self.temperatures, dtype=torch.float64, device=tokens_M.device)
        return of_samples.repeat_interleave(lengths).index_select(0, tokens_M)

    def to(self, device: torch.device | str) -> Row:
        """Return the same row on a device. The copies do not wait where memory is pinned."""
        names = ("token_ids_L", "positions_L", "tokens_T", "places_T", "predicted_P", "counted_N", "own_U", "weights_T")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        if self.sequence_weights_T is not None:
            moved["sequence_weights_T"] = self.sequence_weights_T.to(device, non_blocking=True)
        fields = {name: values.to(device, non_blocking=True) for name, values in self.fields.items()}
        return replace(self, fields=fields, **moved)


def build_rows(batch: Batch, plan: RowPlan, rank: int) -> list[Row]:
    """Return the rows of one data parallel rank, in the order of the plan, on the batch's device."""
    if batch.lengths != plan.lengths:
        raise DataError(
            "this plan was made for another batch",
            path="plan.lengths",
            value=plan.lengths,
            rule="must be the lengths of the batch's samples",
            repair="plan the rows of this batch with plan_rows(batch.lengths, ...)",
        )
    starts = list(accumulate(batch.lengths, initial=0))
    _check_first_weights(batch, starts[:-1])
    rows = [
        _build_row(batch, samples, starts=starts, length=length, prefixes=plan.prefixes)
        for samples, length in zip(plan.rows[rank], plan.row_lengths[rank], strict=True)
    ]
    return _with_sequences(rows, batch) if batch.sequences else rows


def _with_sequences(rows: Sequence[Row], batch: Batch) -> list[Row]:
    """Return the rows with their samples' sequences, and how much these weigh in the whole batch."""
    totals: dict[int, float] = {}
    for sequence, sample in zip(batch.sequences, batch.samples(), strict=True):
        totals[sequence] = totals.get(sequence, 0.0) + float(sample.loss_weights.double().sum())

    def completed(row: Row) -> Row:
        sequences = [batch.sequences[index] for index in row.sample_indices]
        numbers = {sequence: number for number, sequence in enumerate(dict.fromkeys(sequences))}
        of_samples = row.weights_T.new_tensor([totals[sequence] for sequence in sequences])
        lengths = torch.tensor(row.sample_lengths, dtype=torch.int64, device=row.weights_T.device)
        return replace(
            row,
            sequences=tuple(numbers[sequence] for sequence in sequences),
            sequence_weights_T=of_samples.repeat_interleave(lengths),
        )

    return [completed(row) for row in rows]


def _check_first_weights(batch: Batch, starts: Sequence[int]) -> None:
    wrong = torch.nonzero(batch.loss_weights[torch.tensor(starts, device=batch.loss_weights.device)])
    if wrong.numel():
        index = int(wrong[0])
        identity = (batch.identities[index] if batch.identities else "") or f"sample {index} of the batch"
        raise DataError(
            f"the first token of {identity} has a loss weight, but nothing predicts it",
            path=f"{identity}: loss_weights[0]",
            value=float(batch.loss_weights[starts[index]]),
            rule="must be 0",
            repair="set the first loss weight of every sample to 0",
        )


def _build_row(
    batch: Batch, samples: tuple[int, ...], *, starts: Sequence[int], length: int, prefixes: Sequence[int]
) -> Row:
    device = batch.token_ids.device
    sample_lengths = tuple(batch.lengths[index] for index in samples)
    shared = tuple(prefixes[index] for index in samples) if prefixes else (0,) * len(samples)

    def of_samples(values: Tensor) -> Tensor:
        parts = [values[starts[index] : starts[index + 1]] for index in samples]
        return torch.cat(parts) if parts else values[:0]

    tokens = of_samples(batch.token_ids)
    positions = _joined([torch.arange(each) for each in sample_lengths]).to(device)
    places, own = (each.to(device) for each in shared_places(sample_lengths, shared))
    token_ids = torch.full((length,), PAD_TOKEN, dtype=torch.int64, device=device)
    token_ids[: own.shape[0]] = tokens[own]
    computed_at = torch.zeros_like(token_ids)
    computed_at[: own.shape[0]] = positions[own]
    predicted = torch.nonzero(positions)[:, 0]
    weights = of_samples(batch.loss_weights)
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))  # sums of a mask would be a mask
    return Row(
        token_ids_L=token_ids,
        positions_L=computed_at,
        tokens_T=tokens,
        places_T=places,
        predicted_P=predicted,
        counted_N=predicted[weights[predicted] != 0],
        own_U=own,
        document_lengths=sample_lengths + (1,) * (length - own.shape[0]),
        sample_indices=samples,
        weights_T=weights,
        prefixes=shared,
        fields={name: of_samples(values) for name, values in batch.fields.items()},
        temperatures=tuple(batch.temperatures[index] for index in samples) if batch.temperatures else (),
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, dtype=torch.int64)


@dataclass(slots=True)
class Sums:
    """What is added up over rows, and over ranks: loss, metrics, and which samples are not finite."""

    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    bad_samples: tuple[int, ...] = ()

    @classmethod
    def of_row(cls, row: Row, scaled: Tensor, metrics: Mapping[str, Tensor]) -> Sums:
        """Sum up a row. Waits for the device, so it is called when all rows of a step are in progress."""
        loss = float(scaled)
        plain = {name: float(tensor) for name, tensor in metrics.items()}
        return cls(loss, plain, () if math.isfinite(loss) else row.sample_indices)

    def __add__(self, other: Sums) -> Sums:
        metrics = dict(self.metrics)
        for name, value in other.metrics.items():
            metrics[name] = _merged(name, metrics.get(name), value)
        return Sums(self.loss + other.loss, metrics, self.bad_samples + other.bad_samples)

    def parts(self, divisors: Divisors) -> dict[str, tuple[float, float]]:
        """Return each metric that is a mean, as a sum and what it is divided by. Largest and smallest are left out."""
        return {
            name: (value, divisors.of(name)) for name, value in self.metrics.items() if not name.endswith(_EXTREMES)
        }

    def means(self, divisors: Divisors) -> dict[str, float]:
        """Return the metrics, sums divided; those for which nothing in the batch counts are left out."""
        extremes = {name: value for name, value in self.metrics.items() if name.endswith(_EXTREMES)}
        means = {name: total / by for name, (total, by) in self.parts(divisors).items() if by}
        return {name: (extremes | means)[name] for name in self.metrics if name in extremes or name in means}


_EXTREMES = ("_max", "_min")


def _merged(name: str, old: float | None, new: float) -> float:
    if old is None:
        return new
    if name.endswith("_max"):
        return max(old, new)
    return min(old, new) if name.endswith("_min") else old + new
