"""From the batch of one optimizer step to the rows that each data parallel rank takes through the model.

A *row* is a handful of samples laid end to end, each a document of its own: it attends to nothing outside itself and
its positions start at 0. `plan_rows` decides who takes what, from lengths alone, so that every rank reaches the same
plan without asking; `forge.trainer.row_building` makes the tensors of one rank from it; `scatter_back` brings results
into the batch's order.
Nothing here changes a gradient: the plan only decides where it is computed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from forge.errors import ConfigError, DataError
from forge.losses.base import check_field
from forge.losses.head import check_temperature
from forge.trainer.bundles import find_bundles, sequence_bundles
from forge.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from forge.losses import AnyLoss


EVEN_LENGTH = 24_576
"""Length at which attention costs as much as all else, for a width of 2048: 12 times the width."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which samples go where.

    Attributes:
        lengths: the length of every sample, in the batch's order.
        rows: `rows[rank][row]` holds indices of samples, in the order in which they lie in the row. All ranks have the
            same number of rows; one without samples is there so that its rank keeps step with the others.
        row_lengths: `row_lengths[rank][row]`: tokens that are computed, padding included.
        empty_length: the length of a row without samples.
        prefixes: for each sample, how many of its first tokens it shares with the sample before it in its row, and
            takes from there; see `forge.trainer.bundles`. Empty where nothing is shared.
    """

    lengths: tuple[int, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    row_lengths: tuple[tuple[int, ...], ...]
    empty_length: int
    prefixes: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def num_rows(self) -> int:
        """Rows of each rank."""
        return len(self.rows[0])

    def rounded_up(self, multiple: int) -> RowPlan:
        """Return the same plan with rows without samples added, until their number on each rank is a multiple.

        A pipeline takes a fixed number of rows at once.
        """
        missing = -self.num_rows % multiple
        return replace(
            self,
            rows=tuple(rows + ((),) * missing for rows in self.rows),
            row_lengths=tuple(lengths + (self.empty_length,) * missing for lengths in self.row_lengths),
        )


def plan_rows(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    row_multiple: int = 1,
    fixed_shape: bool = False,
    identities: Sequence[str] = (),
) -> RowPlan:
    """Share samples out among data parallel ranks, in few rows of about the same cost.

    The samples of a row add up to at most `max_tokens`; its length is that, rounded up to `row_multiple`. With
    `fixed_shape` every row has the length of a full one. The largest rows come first, and rows of the same number are
    of similar cost on all ranks, since ranks wait for each other after every layer. The ranks' costs differ by no more
    than that of one row. The same arguments give the same plan. `identities` are for the message about a sample that
    is too long.
    """
    for name, value in (("num_ranks", num_ranks), ("max_tokens", max_tokens), ("row_multiple", row_multiple)):
        if value < 1:
            raise ConfigError("rows cannot be planned", path=name, value=value, rule="at least 1", repair="raise it")
    check_lengths(lengths, max_tokens=max_tokens, identities=identities)
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    packed = _pack_tightly(order, lengths, max_tokens=max_tokens)
    num_rows = -(-len(packed) // num_ranks) * num_ranks
    rows = _pack_evenly(order, lengths, max_tokens=max_tokens, num_rows=num_rows) or packed
    full, empty = _round_up(max_tokens, row_multiple), row_multiple

    def row_length(row: tuple[int, ...]) -> int:
        return full if fixed_shape else _round_up(sum(lengths[index] for index in row), row_multiple) or empty

    dealt = _deal(rows, lengths, num_ranks=num_ranks)
    return RowPlan(
        lengths=tuple(lengths),
        rows=dealt,
        row_lengths=tuple(tuple(row_length(row) for row in rank_rows) for rank_rows in dealt),
        empty_length=full if fixed_shape else empty,
    )


def normalizer_of(loss: AnyLoss, batch: Batch) -> float:
    """Return what the sum of a batch's losses is divided by."""
    normalizer: float = loss.normalizer(batch)
    if normalizer == 0:
        raise DataError(
            "no token of the batch counts, so there is nothing to learn from it",
            path="batch.loss_weights",
            value=0.0,
            rule="at least one weight that is not 0",
            repair="leave such batches out",
        )
    return normalizer


def check_fields(batch: Batch, fields: Sequence[str]) -> None:
    """Refuse a batch that lacks a field which a loss reads, or whose fields do not have a value for each token."""
    _check_shapes(batch)
    for name in fields:
        check_field(name, batch.fields)


def check_batch(batch: Batch, *, vocab_size: int | None) -> None:
    """Refuse on every rank what only the rank with that sample, or the last stage of a pipeline, would reject.

    Without this check the other ranks would wait for that rank indefinitely.
    """
    _check_shapes(batch)
    _check_sequences(batch)
    _check_temperatures(batch)
    _check_signs(batch)
    is_outside = (batch.token_ids < 0) | (batch.token_ids >= (vocab_size or 2**62))
    if not bool(is_outside.any()):
        return
    place = int(torch.nonzero(is_outside)[0])
    ends = list(accumulate(batch.lengths))
    index = next(index for index, end in enumerate(ends) if place < end)
    identity = (batch.identities[index] if batch.identities else "") or f"sample {index} of the batch"
    raise DataError(
        f"{identity} has a token that is not in the vocabulary",
        path=f"{identity}: token_ids[{place - ends[index] + batch.lengths[index]}]",
        value=int(batch.token_ids[place]),
        rule=f"at least 0 and below {vocab_size}, the size of the model's vocabulary",
        repair="use the tokenizer of this model",
    )


def scatter_back(plan: RowPlan, values: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return results per token, `values[rank][row]` of at least T elements, as one tensor per sample, in order.

    What lies behind the T tokens of the samples is padding and is left out.
    """
    found: list[Tensor | None] = [None] * len(plan.lengths)
    for rank_rows, rank_values in zip(plan.rows, values, strict=True):
        for samples, row_values in zip(rank_rows, rank_values, strict=True):
            lengths = [plan.lengths[index] for index in samples]
            if row_values.shape[0] < sum(lengths):
                raise ValueError(f"{row_values.shape[0]} values came for a row with {sum(lengths)} tokens of samples")
            for index, part in zip(samples, row_values[: sum(lengths)].split(lengths), strict=True):
                found[index] = part
    return [part for part in found if part is not None]


def check_lengths(lengths: Sequence[int], *, max_tokens: int, identities: Sequence[str] = ()) -> None:
    """Refuse a batch without samples, and samples without tokens or with too many."""
    if not lengths:
        raise DataError("the batch is empty", path="batch", value=0, rule="at least one sample", repair="add samples")
    for index, length in enumerate(lengths):
        if 1 <= length <= max_tokens:
            continue
        identity = (identities[index] if identities else "") or f"sample {index} of the batch"
        if length < 1:
            raise DataError(
                f"{identity} has no tokens", path=identity, value=length, rule="at least 1 token", repair="drop it"
            )
        raise DataError(
            f"{identity} is too long: {length} tokens",
            path=identity,
            value=length,
            rule=f"at most {max_tokens} tokens, what a rank runs through the model at once: a sample is never split",
            repair=f"raise training.microbatch_tokens to {length} or more, or drop or truncate longer samples",
        )


def _check_shapes(batch: Batch) -> None:
    num_tokens = sum(batch.lengths)
    tensors = {"token_ids": batch.token_ids, "loss_weights": batch.loss_weights}
    tensors |= {f"fields[{name!r}]": values for name, values in batch.fields.items()}
    for path, values in tensors.items():
        shape = tuple(values.shape[:1] if path.startswith("fields") else values.shape)
        if shape != (num_tokens,):
            raise DataError(
                f"{path} does not have one value for each token of the batch",
                path=path,
                value=tuple(values.shape),
                rule=f"[{num_tokens}], the sum of the batch's lengths",
                repair="make batches with Batch.of(samples), and give every tensor of a sample the same length",
            )


def _check_sequences(batch: Batch) -> None:
    if len(batch.sequences) not in (0, len(batch)):
        raise DataError(
            "the batch does not have one sequence number for each sample",
            path="sequences",
            value=len(batch.sequences),
            rule=f"{len(batch)} numbers, one per sample, or none where every sample is its own sequence",
            repair="make batches with Batch.of(samples), and give samples of one sequence the same Sample.sequence",
        )


def _check_temperatures(batch: Batch) -> None:
    if len(batch.temperatures) not in (0, len(batch)):
        raise DataError(
            "the batch does not have one temperature for each sample",
            path="temperatures",
            value=len(batch.temperatures),
            rule=f"{len(batch)} numbers, one per sample, or none where the loss says it",
            repair="make batches with Batch.of(samples), and give all samples a temperature or none",
        )
    for temperature in set(batch.temperatures):
        check_temperature(temperature)


def _check_signs(batch: Batch) -> None:
    """Refuse negative weights: the loss is divided by their sum."""
    wrong = torch.nonzero(batch.loss_weights < 0)
    if wrong.numel():
        raise DataError(
            "a loss weight is negative",
            path=f"loss_weights[{int(wrong[0])}]",
            value=float(batch.loss_weights[int(wrong[0])]),
            rule="at least 0",
            repair="to push a token's probability down use a policy loss, with a negative advantage",
        )


def _cost(length: int) -> float:
    return length * (1.0 + length / EVEN_LENGTH)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _pack_tightly(order: Sequence[int], lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Pack into few rows: each sample, longest first, goes where the least room is left that takes it."""
    rows: list[list[int]] = []
    rows_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for index in order:
        length = lengths[index]
        place = bisect_left(rooms, length)
        if place == len(rooms):
            room, row = max_tokens, len(rows)
            rows.append([])
        else:
            room = rooms[place]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rows_by_room[room], rooms[place]
        rows[row].append(index)
        left = room - length
        if left and left not in rows_by_room:
            insort(rooms, left)
            rows_by_room[left] = []
        if left:
            rows_by_room[left].append(row)
    return rows


def _pack_evenly(
    order: Sequence[int], lengths: Sequence[int], *, max_tokens: int, num_rows: int
) -> list[list[int]] | None:
    """Pack into so many rows of about the same cost, longest sample first. None if a row overflows."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    tokens = [0] * num_rows
    cheapest = [(0.0, row) for row in range(num_rows)]
    for index in order:
        cost, row = cheapest[0]
        tokens[row] += lengths[index]
        if tokens[row] > max_tokens:
            return None
        rows[row].append(index)
        heapq.heapreplace(cheapest, (cost + _cost(lengths[index]), row))
    return rows


def _deal(
    rows: Sequence[Sequence[int]], lengths: Sequence[int], *, num_ranks: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Deal rows to ranks, in rounds of one row for each, costliest rows first and the costliest to the cheapest rank.

    After each round the ranks differ by at most the dearest row: a rank that has more never gets more than another.
    """
    costs = [sum(_cost(lengths[index]) for index in row) for row in rows]
    order = sorted(range(len(rows)), key=lambda row: (-costs[row], row))
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(rows), num_ranks):
        hands = order[start : start + num_ranks]
        ranks = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for place, rank in enumerate(ranks):
            row = hands[place] if place < len(hands) else None
            dealt[rank].append(() if row is None else tuple(sorted(rows[row])))
            totals[rank] += 0.0 if row is None else costs[row]
    return tuple(tuple(rank_rows) for rank_rows in dealt)


def plan_batch(
    batch: Batch,
    *,
    num_ranks: int,
    max_tokens: int,
    row_multiple: int = 1,
    fixed_shape: bool = False,
    share_prefixes: bool = False,
    whole_sequences: bool = False,
    split: Collection[int] = (),
) -> RowPlan:
    """As `plan_rows`, for samples that share prefixes or belong together.

    With `share_prefixes` a prefix that samples share is counted, and computed, once. The completions of one prompt are
    samples with the same first tokens, and so are the branches of an episode. Attention is causal, so these tokens get
    the same values in each of them, and the gradient of what is computed once is the sum of theirs. All layers but
    attention work on the tokens that differ; attention sees whole samples. Loss and gradient are the same.
    `forge.trainer.bundles` says which samples share what. With `whole_sequences` all samples of a sequence are in one
    row, except those of sequences in `split`; see `forge.trainer.split_sequences`.
    """
    options: dict[str, Any] = {
        "num_ranks": num_ranks,
        "max_tokens": max_tokens,
        "row_multiple": row_multiple,
        "fixed_shape": fixed_shape,
    }
    if not share_prefixes and not (whole_sequences and batch.sequences):
        return plan_rows(batch.lengths, **options, identities=batch.identities)
    check_lengths(batch.lengths, max_tokens=max_tokens, identities=batch.identities)
    if share_prefixes:
        bundles = find_bundles(batch, max_tokens=max_tokens, whole_sequences=whole_sequences, split=split)
    else:
        bundles = sequence_bundles(batch, max_tokens=max_tokens, split=split)
    plan = plan_rows([bundle.num_computed for bundle in bundles], **options)
    prefixes = {sample: prefix for each in bundles for sample, prefix in zip(each.samples, each.prefixes, strict=True)}
    rows = tuple(
        tuple(tuple(sample for bundle in row for sample in bundles[bundle].samples) for row in rank_rows)
        for rank_rows in plan.rows
    )
    return replace(plan, lengths=batch.lengths, rows=rows, prefixes=tuple(prefixes[each] for each in range(len(batch))))
