"""Bundles: samples that go into one row together, because they share prefixes or belong to one sequence.

Samples with a common prefix form a tree: the prompt of a group, from which its episodes branch off, and the turns that
the branches of one episode share. Laid out in the order of the tree, depth first, each sample shares its longest prefix
with the sample before it. So a bundle is an order of samples and one number for each: how many of its first tokens it
shares with its predecessor. Every distinct prefix of a bundle is computed once.

A token is predicted from the same prefix in every sample that has it. So it does not matter which of them computes it,
nor in which of them it counts: gradients of all are added up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from forge.errors import DataError
from forge.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 4
"""Tokens that samples must have in common for sharing to be worth it."""

MOST_ATTENDED = 16
"""How many tokens attention may see for each that a bundle computes. Keys and values of a shared prefix are copied for
every sample on a GPU; this bounds the memory of rows with many branches."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Samples that go into one row together.

    Attributes:
        samples: indices of the batch, in the order in which they lie in the row.
        prefix: the tokens that all of them begin with, as far as that was looked at.
        num_computed: the tokens that are computed for them.
        prefixes: for each sample, how many of its first tokens it takes from the sample before it.
    """

    samples: tuple[int, ...]
    prefix: int
    num_computed: int
    prefixes: tuple[int, ...]


def find_bundles(
    batch: Batch, *, max_tokens: int, whole_sequences: bool = False, split: Collection[int] = ()
) -> list[Bundle]:
    """Return the samples of a batch in bundles, each of at most `max_tokens` tokens that are computed.

    Where every sample is its own sequence, consecutive samples share what comes before the first token that counts: the
    completions of one prompt share it, and what they happen to begin with alike is their own.

    Where sequences have several samples, bundles are trees: samples of one sequence share all that they have in common,
    and so do those of consecutive sequences that begin with the same prompt. With `whole_sequences` all samples of a
    sequence are in one bundle, whether they share anything or not, except those of sequences in `split`.
    """
    if batch.sequences:
        return _find_trees(batch, max_tokens=max_tokens, whole_sequences=whole_sequences, split=split)
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
                bundles[-1] = Bundle((*last.samples, sample), prefix, computed, (*last.prefixes, prefix))
                continue
        bundles.append(Bundle((sample,), 0, length, (0,)))
    return bundles


def large_sequences(batch: Batch, *, max_tokens: int, share_prefixes: bool) -> frozenset[int]:
    """Return the sequences whose samples do not fit into one row together."""
    trees: _Trees | None = None
    found = set()
    for sequence, samples in _samples_by_sequence(batch).items():
        num_tokens = sum(batch.lengths[index] for index in samples)
        if share_prefixes and num_tokens > max_tokens and len(samples) > 1:
            trees = trees or _Trees(batch, max_tokens=max_tokens)
            num_tokens = trees.num_computed_alone(samples, sequence)
        if num_tokens > max_tokens and len(samples) > 1:
            found.add(sequence)
    return frozenset(found)


def sequence_bundles(batch: Batch, *, max_tokens: int, split: Collection[int] = ()) -> list[Bundle]:
    """Return one bundle for each sequence, and one for each sample of those in `split`. Nothing is shared."""
    bundles = []
    for sequence, samples in _samples_by_sequence(batch).items():
        if sequence in split:
            bundles += [Bundle((index,), 0, batch.lengths[index], (0,)) for index in samples]
            continue
        num_tokens = sum(batch.lengths[index] for index in samples)
        if num_tokens > max_tokens:
            raise _too_large(batch, samples, num_tokens, max_tokens=max_tokens)
        bundles.append(Bundle(tuple(samples), 0, num_tokens, (0,) * len(samples)))
    return bundles


@dataclass(frozen=True, slots=True)
class _Tree:
    """A bundle in the making, whose samples lie in the order of their tokens: neighbours share the longest prefixes.

    Attributes:
        first: the first sample that came in, with whose prompt later sequences are compared.
        prefix: the tokens that the first samples of its sequences have in common, before any counts.
        sequences: those that have a sample in it.
        order: (tokens as bytes that compare like the tokens, sample), ascending.
        num_computed, num_attended: tokens of the tree, and of all samples.
    """

    first: int
    prefix: int = 0
    sequences: frozenset[int] = frozenset()
    order: tuple[tuple[bytes, int], ...] = ()
    num_computed: int = 0
    num_attended: int = 0

    @property
    def num_saved(self) -> int:
        return self.num_attended - self.num_computed


class _Trees:
    """Puts sequences into trees."""

    def __init__(self, batch: Batch, *, max_tokens: int) -> None:
        ends = list(accumulate(batch.lengths, initial=0))
        self._batch, self._max_tokens = batch, max_tokens
        self._tokens = [batch.token_ids[start:end] for start, end in pairwise(ends)]
        numbers = batch.token_ids.cpu().numpy().astype(">i8")
        self._keys = [(numbers[start:end].tobytes(), index) for index, (start, end) in enumerate(pairwise(ends))]
        self._leads = _leads(batch, ends)
        self._found: list[_Tree] = []

    def add(self, samples: Sequence[int], sequence: int, nearby: Iterable[int]) -> int:
        """Put samples of a sequence into the tree nearby that saves most, or into a new one. Return its index."""
        chosen, best = len(self._found), None
        for index in nearby:
            tree = self._found[index]
            prefix = self._common_prompt(tree, samples[0], is_known=sequence in tree.sequences)
            if prefix is None:
                continue
            grown = self._grown(tree, samples, sequence, prefix)
            saved = grown.num_saved - tree.num_saved
            if self._is_allowed(grown) and saved >= LEAST and (best is None or saved > best[0]):
                chosen, best = index, (saved, grown)
        if best is not None:
            self._found[chosen] = best[1]
            return chosen
        alone = self._alone(samples, sequence)
        if alone.num_computed > self._max_tokens:
            raise _too_large(self._batch, samples, alone.num_computed, max_tokens=self._max_tokens)
        self._found.append(alone)
        return chosen

    def num_computed_alone(self, samples: Sequence[int], sequence: int) -> int:
        """Return how many tokens samples of a sequence take in a tree of their own."""
        return self._alone(samples, sequence).num_computed

    def _alone(self, samples: Sequence[int], sequence: int) -> _Tree:
        return self._grown(_Tree(samples[0]), samples, sequence, 0)

    def bundles(self) -> list[Bundle]:
        """Return the trees as bundles."""
        found = []
        for tree in self._found:
            samples = tuple(sample for _, sample in tree.order)
            prefixes = (0, *(self._shared(one, other) for one, other in pairwise(samples)))
            found.append(Bundle(samples, tree.prefix, tree.num_computed, prefixes))
        return found

    def _is_allowed(self, tree: _Tree) -> bool:
        is_small = tree.num_computed <= self._max_tokens
        return is_small and tree.num_attended <= MOST_ATTENDED * tree.num_computed

    def _common_prompt(self, tree: _Tree, sample: int, *, is_known: bool) -> int | None:
        """Return what a sequence's first sample and a tree begin with; None where it does not belong there.

        Prompts that share a system prompt alone are kept apart: one bundle would take them all, and a bundle is on one
        rank.
        """
        if is_known:
            return tree.prefix
        is_second = len(tree.sequences) == 1
        most = min(self._leads[tree.first] if is_second else tree.prefix, self._leads[sample])
        prefix = _num_alike(self._tokens[tree.first], self._tokens[sample], most)
        return prefix if prefix >= LEAST and (is_second or prefix == tree.prefix) else None

    def _grown(self, tree: _Tree, samples: Sequence[int], sequence: int, prefix: int) -> _Tree:
        order, computed, attended = list(tree.order), tree.num_computed, tree.num_attended
        for sample in samples:
            key, length = self._keys[sample], self._batch.lengths[sample]
            place = bisect_left(order, key)
            before = order[place - 1][1] if place > 0 else None
            after = order[place][1] if place < len(order) else None
            computed += length - self._shared(before, sample)
            computed += self._shared(before, after) - self._shared(sample, after)  # `after` takes it from another now
            attended += length
            order.insert(place, key)
        return _Tree(tree.first, prefix, tree.sequences | {sequence}, tuple(order), computed, attended)

    def _shared(self, one: int | None, other: int | None) -> int:
        """Return how many tokens a sample takes from the one before it; at least one is its own."""
        if one is None or other is None:
            return 0
        most = min(self._batch.lengths[one], self._batch.lengths[other] - 1)
        alike = _num_alike(self._tokens[one], self._tokens[other], most)
        return alike if alike >= LEAST else 0


def _find_trees(batch: Batch, *, max_tokens: int, whole_sequences: bool, split: Collection[int]) -> list[Bundle]:
    """Put each sequence near the one before it in the batch: into the trees that took that one's samples."""
    trees = _Trees(batch, max_tokens=max_tokens)
    before: dict[int, None] = {}
    for sequence, samples in _samples_by_sequence(batch).items():
        own: dict[int, None] = {}  # an ordered set
        is_whole = whole_sequences and sequence not in split
        for part in [samples] if is_whole else [[sample] for sample in samples]:
            own[trees.add(part, sequence, own | before)] = None
        before = own
    return trees.bundles()


def _samples_by_sequence(batch: Batch) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, sequence in enumerate(batch.sequence_numbers):
        found.setdefault(sequence, []).append(index)
    return found


def _leads(batch: Batch, ends: Sequence[int]) -> list[int]:
    """Return how many tokens of each sample come before the first that counts; at least one is always left over."""
    leads: list[int] = []
    for start, end in pairwise(ends):
        counted = batch.loss_weights[start:end].nonzero()
        leads.append(int(counted[0]) if counted.numel() else end - start - 1)
    return leads


def _num_alike(one: Tensor, other: Tensor, most: int) -> int:
    differing = (one[:most] != other[:most]).nonzero()
    return int(differing[0]) if differing.numel() else most


def _too_large(batch: Batch, samples: Sequence[int], num_tokens: int, *, max_tokens: int) -> DataError:
    identity = (batch.identities[samples[0]] if batch.identities else "") or f"sample {samples[0]} of the batch"
    return DataError(
        f"the sequence of {identity} is too large for one micro-batch: {len(samples)} samples, {num_tokens} tokens",
        path=identity,
        value=num_tokens,
        rule=f"at most {max_tokens} tokens: the loss has one ratio per sequence, so a sequence is never split",
        repair=f"raise training.microbatch_tokens to {num_tokens} or more, or use a loss with a ratio per token "
        "(algorithm.loss.kind other than gspo, algorithm.loss.correction.level: token, no sequence_mask)",
    )
