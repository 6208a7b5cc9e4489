"""What the model is asked about a row, and what a loss sees of the answers.

A language model is asked for logprobs (and entropies), a model with a scalar head for values. In scoring every token is
asked about, in training only those that count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge.losses import AnyLoss, LossTerms, TokenView, ValueLoss, ValueView
from forge.models.rows import RowTask
from forge.trainer.row_building import Row


@dataclass(frozen=True, slots=True, eq=False)
class RowJob:
    """One row on its way through the model.

    Attributes:
        row: the row.
        task: what is wanted of it.
        asked_N: int64, ascending: the tokens (indices of T) that the answers belong to.
    """

    row: Row
    task: RowTask
    asked_N: Tensor

    def answers(self, output: Any) -> tuple[Tensor, ...]:
        """Return what the head gave as values of all tokens, each [T]: logprobs (and entropies), or values."""
        columns = _columns(output, self.task) if self.task.as_row else output
        return tuple(self.row.align(each, self.asked_N) for each in columns if each is not None)


def _columns(output_1LC: Tensor, task: RowTask) -> tuple[Tensor, ...]:
    """Return what `RowTask.as_row` put into a row, of the places that were asked about."""
    columns = tuple(output_1LC[0].index_select(0, task.index).unbind(-1))
    return columns if task.entropy else columns[:1]


def _job(row: Row, asked_N: Tensor, index_N: Tensor, **wanted: Any) -> RowJob:
    documents = row.documents()
    task = RowTask(
        documents=documents,
        positions=row.positions_L.unsqueeze(0),
        index=index_N,
        targets=row.tokens_T.index_select(0, asked_N),
        sharing=row.sharing(documents),
        **wanted,
    )
    return RowJob(row, task, asked_N)


def scoring_job(
    row: Row, *, temperature: float | Tensor | None = None, entropy: bool = False, as_row: bool = False
) -> RowJob:
    """Ask for the logprobs of all tokens that are predicted, and with `entropy` for the entropies. `temperature` is for
    all of them; None for what the samples say, or 1."""
    asked = row.predicted_P
    chosen = row.temperature_of(asked, 1.0) if temperature is None else temperature
    return _job(row, asked, row.predictors(asked), temperature=chosen, entropy=entropy, as_row=as_row)


def value_job(row: Row, *, values_at: str = "after", as_row: bool = False) -> RowJob:
    """Ask for the values of all tokens, after them or before them (see `ValueLoss`)."""
    if values_at == "before":
        return _job(row, row.predicted_P, row.predictors(row.predicted_P), as_row=as_row)
    return _job(row, torch.arange(row.tokens_T.shape[0], device=row.tokens_T.device), row.places_T, as_row=as_row)


def training_job(row: Row, loss: AnyLoss, *, normalizer: float, as_row: bool, dtype: torch.dtype) -> RowJob:
    """Ask for what a loss reads, of the tokens that count.

    A plain sum of -logprobs is left to the head, with the tokens' weights in `dtype`.
    """
    asked = row.counted_N
    if isinstance(loss, ValueLoss):
        places = row.places_T.index_select(0, asked) if loss.values_at == "after" else row.predictors(asked)
        return _job(row, asked, places, as_row=as_row)
    named = getattr(loss, "candidates", None)
    if named is not None:
        candidates = row.fields[named].index_select(0, asked).to(torch.int64)
        return _job(row, asked, row.predictors(asked), candidates=candidates)
    temperature = row.temperature_of(asked, getattr(loss, "temperature", 1.0))
    is_plain = not isinstance(temperature, Tensor) and temperature == 1  # what the head's own loss computes with
    fused = loss.is_nll and is_plain and not as_row
    weights = row.weights_T.index_select(0, asked).to(dtype) / normalizer if fused else None
    wanted = {"temperature": temperature, "entropy": loss.needs_entropy, "weights": weights}
    return _job(row, asked, row.predictors(asked), as_row=as_row, **wanted)


def top_job(row: Row, *, k: int, as_row: bool = False) -> RowJob:
    """Ask for the k likeliest tokens at the places of those tokens that count."""
    return _job(row, row.counted_N, row.predictors(row.counted_N), num_top=k, as_row=as_row)


def loss_scoring_job(row: Row, loss: AnyLoss, *, as_row: bool) -> RowJob:
    """Ask for what a loss reads, of all tokens and not only of those that count."""
    if isinstance(loss, ValueLoss):
        return value_job(row, values_at=loss.values_at, as_row=as_row)
    temperature = row.temperature_of(row.predicted_P, getattr(loss, "temperature", 1.0))
    return scoring_job(row, temperature=temperature, entropy=loss.needs_entropy, as_row=as_row)


@dataclass(frozen=True, slots=True, eq=False)
class LossInput:
    """The tokens of a micro-batch as a loss takes them, whatever it reads.

    Attributes:
        answers: what `RowJob.answers` returns.
        weights_T, lengths, fields, sequences, sequence_weights_T: see `TokenView`.
    """

    answers: Sequence[Tensor]
    weights_T: Tensor
    lengths: tuple[int, ...]
    fields: Mapping[str, Tensor]
    sequences: tuple[int, ...]
    sequence_weights_T: Tensor | None

    @classmethod
    def of_row(cls, row: Row, answers: Sequence[Tensor]) -> LossInput:
        return cls(answers, row.weights_T, row.sample_lengths, row.fields, row.sequences, row.sequence_weights_T)

    def terms(self, loss: AnyLoss) -> LossTerms:
        """Return what the loss makes of it."""
        if isinstance(loss, ValueLoss):
            return loss(
                ValueView(
                    values_T=self.answers[0],
                    weights_T=self.weights_T,
                    lengths=self.lengths,
                    fields=self.fields,
                    sequences=self.sequences,
                    sequence_weights_T=self.sequence_weights_T,
                )
            )
        second = self.answers[1] if len(self.answers) > 1 else None
        has_candidates = getattr(loss, "candidates", None) is not None
        return loss(
            TokenView(
                logprobs_T=self.answers[0],
                entropy_T=None if has_candidates else second,
                candidate_logprobs_TK=second if has_candidates else None,
                weights_T=self.weights_T,
                lengths=self.lengths,
                fields=self.fields,
                sequences=self.sequences,
                sequence_weights_T=self.sequence_weights_T,
            )
        )
