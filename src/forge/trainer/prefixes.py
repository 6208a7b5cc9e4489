"""Samples that begin alike: their beginning goes through the model once.

The completions of one prompt are samples with the same first tokens. Attention is causal, so these tokens get the same
values in each of them, and the gradient of what is computed once is the sum of theirs. All layers but attention work on
the tokens that are different; attention sees whole samples, as without sharing. Loss and gradient are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from forge.trainer.microbatches import RowPlan, check_lengths, plan_rows

if TYPE_CHECKING:
    from torch import Tensor

    from forge.types import Batch

LEAST = 4
"""Tokens that samples must have in common for sharing to be worth it."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Consecutive samples that begin with the same `prefix` tokens; all but the first take them from the first."""

    samples: tuple[int, ...]
    prefix: int
    num_computed: int


def plan_shared_rows(batch: Batch, *, num_ranks: int, max_tokens: int, row_multiple: int = 1) -> RowPlan:
    """As `plan_rows`, with each beginning that samples have in common counted, and computed, once.

    Samples are compared with those before them in the batch: those of one prompt must follow each other.
    """
    check_lengths(batch.lengths, max_tokens=max_tokens, identities=batch.identities)
    bundles = find_bundles(batch, max_tokens=max_tokens)
    plan = plan_rows(
        [bundle.num_computed for bundle in bundles],
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        row_multiple=row_multiple,
    )
    prefixes = [0] * len(batch)
    for bundle in bundles:
        for sample in bundle.samples[1:]:
            prefixes[sample] = bundle.prefix
    rows = tuple(
        tuple(tuple(sample for bundle in row for sample in bundles[bundle].samples) for row in rank_rows)
        for rank_rows in plan.rows
    )
    return replace(plan, lengths=batch.lengths, rows=rows, prefixes=tuple(prefixes))


def find_bundles(batch: Batch, *, max_tokens: int) -> list[Bundle]:
    """The samples of a batch in bundles, each of at most `max_tokens` tokens that are computed.

    Only tokens before the first that counts are shared: what completions happen to begin with alike is their own.
    """
    ends = list(accumulate(batch.lengths, initial=0))
    tokens = [batch.token_ids[start:end] for start, end in pairwise(ends)]
    leads = _leads(batch, ends)
    bundles: list[Bundle] = []
    for sample, length in enumerate(batch.lengths):
        last = bundles[-1] if bundles else None
        if last is not None:
            first = last.samples[0]
            most = min(leads[first], leads[sample]) if len(last.samples) == 1 else min(last.prefix, leads[sample])
            prefix = _num_alike(tokens[first], tokens[sample], most)
            is_alike = prefix >= LEAST and (len(last.samples) == 1 or prefix == last.prefix)
            computed = last.num_computed + length - prefix
            if is_alike and computed <= max_tokens:
                bundles[-1] = Bundle((*last.samples, sample), prefix, computed)
                continue
        bundles.append(Bundle((sample,), 0, length))
    return bundles


def _leads(batch: Batch, ends: Sequence[int]) -> list[int]:
    """How many tokens of each sample come before the first that counts; at least one is always left over."""
    leads: list[int] = []
    for start, end in pairwise(ends):
        counted = batch.loss_weights[start:end].nonzero()
        leads.append(int(counted[0]) if counted.numel() else end - start - 1)
    return leads


def _num_alike(one: Tensor, other: Tensor, most: int) -> int:
    differing = (one[:most] != other[:most]).nonzero()
    return int(differing[0]) if differing.numel() else most
