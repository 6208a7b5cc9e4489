"""Sequences that are too large for one micro-batch, for losses that need whole sequences.

A loss with one ratio per sequence needs the logprobs (or values) of all tokens of a sequence at once, but not the graph
that they come from. So a sequence that does not fit into one row is taken through the model twice. The first pass
computes its logprobs (and entropies), row by row and without gradients. From these alone follow the loss of the
sequence, its metrics, and the gradient of the loss with respect to each of them. In the second pass the rows' loss is
the sum of gradient times logprob: by the chain rule, the gradient of the weights is that of the loss itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forge.losses import AnyLoss, LossTerms
from forge.trainer.row_building import Sums
from forge.trainer.row_jobs import LossInput
from forge.types import Batch

IS_SPLIT = "split.is_split"
GRADIENTS = ("split.gradient", "split.entropy")
"""Fields of a batch: which tokens belong to such sequences, and the gradient of the loss at each of them.

The first gradient is that with respect to logprobs or values, the second with respect to entropies."""


@dataclass(frozen=True, slots=True)
class SplitSequences:
    """The sequences of a batch that are split, after the first pass.

    Attributes:
        sequences: their numbers.
        batch: the whole batch, with the gradients as fields.
        sums: their loss, normalised, and their metrics.
    """

    sequences: frozenset[int]
    batch: Batch
    sums: Sums


def samples_of(batch: Batch, sequences: Collection[int]) -> Batch:
    """Return the samples of some sequences."""
    return Batch.of([sample for sample in batch.samples() if sample.sequence in sequences])


def split_sequences(
    batch: Batch,
    sequences: frozenset[int],
    *,
    loss: AnyLoss,
    scores: Sequence[Tensor],
    normalizer: float,
) -> SplitSequences:
    """Return what the second pass needs. `scores` has the logprobs (or values) of each sample of `sequences`, and the
    entropies beside them where the loss needs them: [L, 1 or 2]."""
    part = samples_of(batch, sequences)
    leaves = [each.contiguous().requires_grad_() for each in torch.cat(list(scores)).unbind(-1)]
    weights = part.loss_weights.to(torch.promote_types(part.loss_weights.dtype, torch.float32))
    tokens = LossInput(
        answers=leaves,
        weights_T=weights,
        lengths=part.lengths,
        fields=part.fields,
        sequences=part.sequences,
        sequence_weights_T=_sequence_weights(part, weights),
    )
    with torch.enable_grad():
        terms = tokens.terms(loss)
        gradients = torch.autograd.grad(terms.total, leaves, allow_unused=True, materialize_grads=True)
    total = float(terms.total.detach()) / normalizer
    metrics = {name: float(value) for name, value in terms.metrics.items()}
    indices = tuple(index for index, sequence in enumerate(batch.sequences) if sequence in sequences)
    sums = Sums(total, metrics, () if math.isfinite(total) else indices)
    fields = dict(zip(GRADIENTS, gradients, strict=False))
    return SplitSequences(sequences, _with_fields(batch, {IS_SPLIT: torch.ones_like(weights), **fields}, indices), sums)


def split_terms(loss: AnyLoss, tokens: LossInput) -> LossTerms:
    """Return the terms of a row of the second pass.

    Of tokens of split sequences they have the gradient alone: the value of their loss and their metrics are in
    `SplitSequences.sums`.
    """
    weights = torch.where(tokens.fields[IS_SPLIT] != 0, 0.0, tokens.weights_T)
    terms = replace(tokens, weights_T=weights).terms(loss)
    total = terms.total
    for name, values in zip(GRADIENTS, tokens.answers, strict=False):
        total = total + (tokens.fields[name] * (values - values.detach())).sum()
    return replace(terms, total=total)


def _sequence_weights(part: Batch, weights: Tensor) -> Tensor:
    """Return the summed weight of each token's sequence."""
    lengths = torch.tensor(part.lengths, device=weights.device)
    index = torch.tensor(part.sequence_numbers, device=weights.device).repeat_interleave(lengths)
    return weights.new_zeros(part.num_sequences).index_add(0, index, weights)[index]


def _with_fields(batch: Batch, values: dict[str, Tensor], indices: Sequence[int]) -> Batch:
    """Return the batch with values of the tokens of some samples as fields; 0 for the others."""
    starts = [0]
    for length in batch.lengths:
        starts.append(starts[-1] + length)
    places = torch.cat([torch.arange(starts[index], starts[index + 1]) for index in indices])
    fields = dict(batch.fields)
    for name, given in values.items():
        fields[name] = given.new_zeros(batch.num_tokens).index_copy(0, places, given.detach())
    return replace(batch, fields=fields)
