"""How many batches there will be, from the lengths of samples alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forge.config import DataConfig, TrainingConfig
from forge.data.corpus import IndexedCorpus
from forge.data.mixing import Indices, shuffled
from forge.data.packing import Packer
from forge.data.samples import Counters, Encoder

EXACT_UP_TO = 200_000
PROBES = 4096


@dataclass(frozen=True, slots=True)
class BatchCount:
    """The number of batches in each epoch.

    Attributes:
        per_epoch: one number for each epoch.
        exact: whether every sample was looked at; otherwise it is an estimate from some of them.
    """

    per_epoch: tuple[int, ...]
    exact: bool

    @property
    def total(self) -> int:
        """Over all epochs."""
        return sum(self.per_epoch)


def count_batches(
    corpus: IndexedCorpus,
    encoder: Encoder,
    *,
    data: DataConfig,
    training: TrainingConfig,
    exact_up_to: int = EXACT_UP_TO,
) -> BatchCount:
    """Tokenise all samples once, or some where there are more than `exact_up_to`, and pack their lengths."""
    exact = len(corpus) <= exact_up_to
    if exact:
        lengths = _lengths(corpus, encoder, np.arange(len(corpus), dtype=np.int64))
        rows = [_num_rows(lengths[corpus.order(epoch)], data, encoder) for epoch in range(training.num_epochs)]
    else:
        probes = min(PROBES, exact_up_to)
        sizes = [len(corpus.order(epoch)) for epoch in range(training.num_epochs)]
        chosen = shuffled(len(corpus), key=0)[:probes]
        found = _num_rows(_lengths(corpus, encoder, chosen), data, encoder)
        rows = [math.ceil(size * found / probes) for size in sizes]
    per_batch = training.batch_size * training.gradient_accumulation_steps
    return BatchCount(tuple(math.ceil(number / per_batch) for number in rows), exact)


def _lengths(corpus: IndexedCorpus, encoder: Encoder, numbers: Indices) -> Indices:
    """The length of each sample; 0 for one that is left out."""
    lengths = np.zeros(len(numbers), dtype=np.int64)
    scratch = Counters()
    for place, number in enumerate(numbers):
        drawn = corpus.at(int(number))
        sample = encoder.encode(drawn.record, layout=corpus.layouts[drawn.source], counters=scratch)
        lengths[place] = 0 if sample is None else len(sample)
    return lengths


def _num_rows(lengths: Indices, data: DataConfig, encoder: Encoder) -> int:
    kept: Iterator[int] = iter(lengths[lengths > 0].tolist())

    def draw() -> tuple[None, int] | None:
        length = next(kept, None)
        return None if length is None else (None, length)

    if not data.packing:
        return int((lengths > 0).sum())
    packer = Packer(draw, capacity=encoder.max_seq_len, lookahead=data.pack_lookahead)
    num_rows = 0
    while packer.next_row():
        num_rows += 1
    return num_rows
