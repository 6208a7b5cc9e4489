"""What a loss is: sums over tokens, so that it does not matter how a batch is cut into pieces.

A loss never divides by the number of tokens that it sees, since that would be the number of one micro-batch. It says
what the *whole* batch is to be divided by (`normalizer`), and gives plain sums for any part of it (`LossTerms`). The
trainer adds the sums of all micro-batches and ranks. Loss and gradient are then the same for every split, order,
packing and number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from forge.errors import DataError
from forge.types import Batch


def check_field(name: str, fields: Mapping[str, Tensor]) -> None:
    """Refuse a batch that lacks a field which a loss reads."""
    if name not in fields:
        raise DataError(
            f"the loss needs the field {name!r}, which the batch does not have",
            path=f"fields[{name!r}]",
            value=sorted(fields),
            rule="every field that the loss names in `fields`",
            repair=f"put {name!r} into the fields of each sample",
        )


class _View:
    """What `TokenView` and `ValueView` have in common: sums over the tokens of one micro-batch that count."""

    __slots__ = ()

    weights_T: Tensor
    lengths: tuple[int, ...]
    fields: Mapping[str, Tensor]
    sequences: tuple[int, ...]
    sequence_weights_T: Tensor | None

    def _check(self, **tensors: Tensor | None) -> None:
        """Refuse tensors that do not have one value for each token; the first is the one that all must be like."""
        first, of_all = next(iter(tensors.items()))
        assert of_all is not None
        num_tokens = int(of_all.shape[0])
        others = tensors | {"weights_T": self.weights_T, "sequence_weights_T": self.sequence_weights_T}
        others |= {f"fields[{name!r}]": values for name, values in self.fields.items()}
        for path, values in others.items():
            own = None if values is None else values.shape[:1] if path.startswith("fields") else values.shape
            if own is not None and own != of_all.shape:
                raise DataError(
                    f"{path} does not have one value for each token",
                    path=path,
                    value=tuple(own),
                    rule=f"[{num_tokens}], as {first}",
                    repair="cut all tensors of a micro-batch at the same places",
                )
        if sum(self.lengths) != num_tokens:
            raise DataError(
                "the lengths of the samples do not add up to the tokens",
                path="lengths",
                value=self.lengths,
                rule=f"a sum of {num_tokens}",
                repair="give the length of each whole sample of the micro-batch",
            )
        if self.sequences and (
            len(self.sequences) != len(self.lengths) or set(self.sequences) != set(range(max(self.sequences) + 1))
        ):
            raise DataError(
                "the sequences are not those of the samples",
                path="sequences",
                value=self.sequences,
                rule=f"none, or {len(self.lengths)} numbers, one per sample, from 0 on without gaps",
                repair="leave it empty where every sample is its own sequence",
            )

    @property
    def counted_T(self) -> Tensor:
        """Which tokens count: bool [T]."""
        return self.weights_T != 0

    def counted(self, values_T: Tensor) -> Tensor:
        """Values with 0 at tokens that do not count, so that no NaN or infinity there reaches a sum or a gradient."""
        return torch.where(self.counted_T, values_T, 0.0)

    def value(self, name: str) -> Tensor:
        """A field, with 0 at tokens that do not count."""
        check_field(name, self.fields)
        return self.counted(self.fields[name])

    def sum(self, values_T: Tensor) -> Tensor:
        """The weighted sum over tokens that count."""
        return (self.weights_T * self.counted(values_T)).sum()

    def sequence_sums(self, values_T: Tensor) -> Tensor:
        """The sums over what is here of each sequence."""
        num_sequences = max(self.sequences) + 1 if self.sequences else len(self.lengths)
        sums = torch.zeros(num_sequences, dtype=values_T.dtype, device=values_T.device)
        return sums.index_add(0, self.sequence_index(), values_T)

    def sequence_index(self) -> Tensor:
        """Which sequence each token belongs to: int64 [T]."""
        device = self.weights_T.device
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=device)
        if self.sequences:
            index = torch.tensor(self.sequences, dtype=torch.int64, device=device)
        else:
            index = torch.arange(len(self.lengths), device=device)
        return torch.repeat_interleave(index, lengths, output_size=int(self.weights_T.shape[0]))


@dataclass(frozen=True, slots=True, eq=False)
class TokenView(_View):
    """The tokens of one micro-batch, laid end to end: T tokens of whole samples, on the device that computes.

    Every tensor is [T], or [T, K] where a token has several values, and index t belongs to token t as *predicted* (see
    `forge.types`). Where a weight is 0, all other values are meaningless and may even be NaN.

    Attributes:
        logprobs_T: the policy's logprob of each token; the gradient flows through it.
        weights_T: how much each token counts.
        lengths: the lengths of the samples, in order; they add up to T.
        sequences: the sequence of each sample, numbered from 0 within the micro-batch. Empty where every sample is its
            own sequence. A sequence may have further samples in other micro-batches, unless the loss declares
            `needs_whole_sequences`.
        sequence_weights_T: the summed weight of each token's sequence, over the whole global batch. None where every
            sample is its own sequence.
        entropy_T: the entropy of the distribution that each token was predicted from, if the loss needs it.
        candidate_logprobs_TK: the policy's logprobs of other tokens than the sampled one, at each token's place, where
            the loss names them with `candidates`; the gradient flows through it.
        fields: what the loss's `fields` name.
    """

    logprobs_T: Tensor
    weights_T: Tensor
    lengths: tuple[int, ...]
    entropy_T: Tensor | None = None
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    sequences: tuple[int, ...] = ()
    sequence_weights_T: Tensor | None = None
    candidate_logprobs_TK: Tensor | None = None

    def __post_init__(self) -> None:
        self._check(logprobs_T=self.logprobs_T, entropy_T=self.entropy_T)


@dataclass(frozen=True, slots=True, eq=False)
class ValueView(_View):
    """The tokens of one micro-batch as a model with a scalar head sees them. See `TokenView` for what all views have.

    Attributes:
        values_T: the model's value at each token, float32 or wider; the gradient flows through it. The loss's
            `values_at` says which value that is. 0 where a weight is 0.
    """

    values_T: Tensor
    weights_T: Tensor
    lengths: tuple[int, ...]
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    sequences: tuple[int, ...] = ()
    sequence_weights_T: Tensor | None = None

    def __post_init__(self) -> None:
        self._check(values_T=self.values_T)


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """What a loss found in one micro-batch.

    Attributes:
        total: a scalar, the plain sum. The loss of a batch is the sum of all totals divided by `Loss.normalizer`.
        metrics: detached scalars by name, which are put together over micro-batches and ranks by their name:
            `…_max` and `…_min` by the largest and smallest (infinite where nothing counted); all others are sums of
            weight times value, are added, and become means when divided by `Batch.total_weight`, or by what the loss's
            `metric_divisors` say.
    """

    total: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Loss(Protocol):
    """Turns logprobs into something to minimise. Stateless: called for every micro-batch, on every rank.

    Optional attributes: `temperature`, what the trainer divides logits by where the samples of a batch do not say it
    (default 1); `needs_whole_sequences`, whether all samples of a sequence must be in one micro-batch (default False),
    as a ratio per sequence requires; `candidates`, the field [T, K] with tokens whose logprobs the loss reads besides
    that of each token; `metric_divisors(batch)`, by what the sum of each metric is divided where that is not
    `Batch.total_weight`; and `complete(batch, score)`, which returns the batch with fields that depend on the whole of
    it. It is called on every rank before the batch is cut into pieces. `score(batch)` computes the policy's logprobs of
    the tokens of samples, without gradients; all ranks must call it, with the same samples.
    """

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields per token that it reads."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `TokenView.entropy_T` must be there."""

    @property
    def is_nll(self) -> bool:
        """Whether `total` is just the weighted sum of negative logprobs, so that `chunked_nll` may compute it."""

    def normalizer(self, batch: Batch) -> float:
        """What the sum over the whole, global batch is divided by. 0 if nothing in it counts."""

    def __call__(self, tokens: TokenView) -> LossTerms:
        """The sums over one micro-batch."""


@runtime_checkable
class ValueLoss(Protocol):
    """Turns the values of a model with a scalar head (`model.head: scalar`) into something to minimise.

    It is to a critic or a reward model what `Loss` is to a language model: stateless, called for every micro-batch on
    every rank, sums only. `needs_whole_sequences` and `metric_divisors` are optional, as in `Loss`.
    """

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields per token that it reads."""

    @property
    def values_at(self) -> Literal["before", "after"]:
        """Which value belongs to token t.

        `before`: the value of the state in which token t was chosen, made from the tokens before it: a critic's.
        Tokens, weights and fields are then aligned as they are for the policy, so that one batch serves both.
        `after`: the value of what has been read up to and including token t: a reward model's, at the last token.
        """

    def normalizer(self, batch: Batch) -> float:
        """What the sum over the whole, global batch is divided by. 0 if nothing in it counts."""

    def __call__(self, tokens: ValueView) -> LossTerms:
        """The sums over one micro-batch."""


AnyLoss: TypeAlias = Loss | ValueLoss


@dataclass(frozen=True, slots=True)
class Divisors:
    """What the sums of a loss's metrics are divided by: each by its name, the others by the batch's total weight."""

    total_weight: float
    by_name: Mapping[str, float] = field(default_factory=dict)

    def of(self, name: str) -> float:
        """Return what the sum of one metric is divided by. 0 where nothing in the batch counts for it."""
        return self.by_name.get(name, self.total_weight)


def completed(loss: AnyLoss, batch: Batch, score: Callable[[Batch], list[Tensor]]) -> Batch:
    """Return a whole, global batch with the fields that the loss adds to it."""
    own = getattr(loss, "complete", None)
    found: Batch = batch if own is None else own(batch, score)
    return found


def metric_divisors(loss: AnyLoss, batch: Batch) -> Divisors:
    """Return what the sums of a loss's metrics over a whole, global batch are divided by."""
    own = getattr(loss, "metric_divisors", None)
    return Divisors(batch.total_weight, {} if own is None else own(batch))


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The mean negative logprob of the tokens that count, weighted. Metrics: `nll`."""

    @property
    def fields(self) -> tuple[str, ...]:
        return ()

    @property
    def needs_entropy(self) -> bool:
        return False

    @property
    def is_nll(self) -> bool:
        return True

    def normalizer(self, batch: Batch) -> float:
        return batch.total_weight

    def __call__(self, tokens: TokenView) -> LossTerms:
        total = -tokens.sum(tokens.logprobs_T)
        return LossTerms(total, {"nll": total.detach()})
