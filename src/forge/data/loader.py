"""Batches for training: mixed, tokenized, packed, and resumable to the token."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from forge.config import DataConfig, TrainingConfig
from forge.data.corpus import Corpus, Drawn, IndexedCorpus, Pass
from forge.data.files import Record
from forge.data.mixing import Indices, shuffled
from forge.data.packing import Packer
from forge.data.read_ahead import ReadAhead
from forge.data.samples import Counters, SampleEncoder
from forge.errors import DataError
from forge.types import Batch, Sample

_STATE_FORMAT = 1

Item = tuple[Drawn, tuple[Sample, ...]]
"""A record and its samples, which stay together."""


@dataclass(frozen=True, slots=True)
class _Position:
    """Where the loader stands after a batch. `place` is the state of the epoch's pass; None before its first batch."""

    epoch: int
    num_batches: int
    place: dict[str, Any] | None
    counters: dict[str, int]


class BatchLoader:
    """An iterator over the batches of all epochs.

    A batch has training.batch_size x training.gradient_accumulation_steps rows; the last one of an epoch may have
    fewer, and no batch reaches into the next epoch. `for batch in loader` continues where the last one stopped. With
    `read_ahead`, so many batches are made ahead in a background thread; neither the order nor the state depends on it,
    and `close`, or leaving the loader as a context, ends the thread.
    """

    def __init__(
        self,
        corpus: Corpus,
        encoder: SampleEncoder,
        *,
        data: DataConfig,
        training: TrainingConfig,
        read_ahead: int = 2,
    ) -> None:
        self._corpus = corpus
        self._maker = _Maker(corpus, encoder, data=data, training=training)
        self._read_ahead = read_ahead
        self._position = self._start = _Position(0, 0, None, Counters().as_dict())
        self._made: Iterator[tuple[Batch, _Position]] | None = None
        self._release: weakref.finalize[Any, Any] | None = None
        self._closed = False
        self._count: BatchCount | None = None

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0, of the batch that was given last."""
        return self._position.epoch

    @property
    def batch_in_epoch(self) -> int:
        """How many batches of this epoch were given."""
        return self._position.num_batches

    @property
    def formats(self) -> tuple[str, ...]:
        """The format of each source, also where the configuration said `auto`."""
        return tuple(layout.format for layout in self._corpus.layouts)

    def ends(self) -> tuple[Record, Record] | None:
        """Return the first and the last record, as their source has them; None for a stream."""
        if not isinstance(self._corpus, IndexedCorpus):
            return None
        return self._corpus.at(0).record, self._corpus.at(len(self._corpus) - 1).record

    @property
    def num_samples(self) -> int | None:
        """How many samples an epoch chooses from; None for a stream."""
        return len(self._corpus) if isinstance(self._corpus, IndexedCorpus) else None

    @property
    def counters(self) -> Counters:
        """What became of the records up to the batch that was given last. Samples that wait in the packer are read."""
        return Counters(**self._position.counters)

    @property
    def fill_rate(self) -> float:
        """Which part of its rows is filled with tokens, so far; 0 before the first batch."""
        counters = self._position.counters
        return counters["tokens"] / max(1, counters["rows"] * self._maker.encoder.max_seq_len)

    def count_batches(self) -> BatchCount | None:
        """How many batches all epochs have; None for a stream, whose length is unknown.

        Which samples are dropped and how they pack is known only from their lengths. Up to 200,000 samples are all
        tokenised once to know it exactly; of more, some are, and the answer says that it is an estimate. It is the same
        for the same data, whatever the position.
        """
        if self._count is None and isinstance(self._corpus, IndexedCorpus):
            maker = self._maker
            self._count = count_batches(self._corpus, maker.encoder, data=maker.data, training=maker.training)
        return self._count

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise RuntimeError("the loader is closed")
        if self._made is None:
            made = self._maker.batches(self._position)
            if self._read_ahead:
                ahead = ReadAhead(made, depth=self._read_ahead)
                self._release = weakref.finalize(self, ahead.close)
                self._made = ahead
            else:
                self._made = made
        try:
            batch, self._position = next(self._made)
        except BaseException:
            self._stop()
            raise
        return batch

    def from_start(self) -> BatchLoader:
        """Return another loader of the same batches, which begins with the first one."""
        maker = self._maker
        return BatchLoader(
            self._corpus, maker.encoder, data=maker.data, training=maker.training, read_ahead=self._read_ahead
        )

    def rewind(self) -> None:
        """Go back to the first batch of the first epoch, with all counts at 0."""
        self._stop()
        self._position = self._start

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands after the batch that was given last: positions and numbers, no tokens; plain JSON."""
        position = self._position
        return {
            "format": _STATE_FORMAT,
            "corpus": self._corpus.identity(),
            "epoch": position.epoch,
            "num_batches": position.num_batches,
            "place": position.place,
            "counters": dict(position.counters),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch at which the state was taken.

        The state must be of the same data in the same order, or it is refused with a DataError. Batch size, packing and
        lengths may be others: the samples to come are the same, only their batches differ.
        """
        if state.get("format") != _STATE_FORMAT:
            raise DataError(
                "this is not a state of a data loader",
                path="format",
                value=state.get("format"),
                rule=f"its format is {_STATE_FORMAT}",
                repair="give what state_dict() of this version gave",
            )
        _check_identity(state["corpus"], self._corpus.identity())
        self._stop()
        self._position = _Position(state["epoch"], state["num_batches"], state["place"], dict(state["counters"]))

    def close(self) -> None:
        """End the background thread. The loader gives no more batches; its state can still be asked for."""
        self._stop()
        self._closed = True

    def _stop(self) -> None:
        if self._release is not None:
            self._release()
        self._made = self._release = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Maker:
    """Makes batches from a position on. It is all that the background thread holds on to."""

    def __init__(self, corpus: Corpus, encoder: SampleEncoder, *, data: DataConfig, training: TrainingConfig) -> None:
        self.corpus = corpus
        self.encoder = encoder
        self.data = data
        self.training = training

    def batches(self, position: _Position) -> Iterator[tuple[Batch, _Position]]:
        """Every batch after a position, each with the position after it."""
        counters = Counters(**position.counters)
        num_batches, place = position.num_batches, position.place
        for epoch in range(position.epoch, self.training.num_epochs):
            held: list[Drawn] = []
            if place is None:
                walk = self.corpus.begin(epoch)
            else:
                walk, held = self.corpus.resume(epoch, place)
            packer = self._packer(walk, held, counters)
            while batch := self._batch(packer, counters):
                num_batches += 1
                waiting = [drawn for drawn, _ in packer.waiting()]
                yield batch, _Position(epoch, num_batches, walk.state(waiting), counters.as_dict())
            if num_batches == 0:
                raise _nothing_left(epoch, counters)
            num_batches, place = 0, None

    def _packer(self, walk: Pass, held: list[Drawn], counters: Counters) -> Packer[Item]:
        def draw() -> tuple[Item, int] | None:
            while (drawn := walk.draw()) is not None:
                if samples := self._encode(drawn, counters):
                    return (drawn, samples), num_computed(samples)
            return None

        data = self.data
        packer = Packer(draw, capacity=self.encoder.max_seq_len, lookahead=data.pack_lookahead, packing=data.packing)
        for drawn in held:
            if samples := self._encode(drawn, Counters()):
                packer.add((drawn, samples), num_computed(samples))
        return packer

    def _encode(self, drawn: Drawn, counters: Counters) -> tuple[Sample, ...]:
        return self.encoder.encode_all(drawn.record, layout=self.corpus.layouts[drawn.source], counters=counters)

    def _batch(self, packer: Packer[Item], counters: Counters) -> Batch | None:
        rows: list[list[Item]] = []
        while len(rows) < rows_per_batch(self.training) and (row := packer.next_row()):
            rows.append(row)
        if not rows:
            return None
        batch = Batch.of(_numbered([samples for row in rows for _, samples in row]))
        counters.rows += len(rows)
        counters.samples += len(batch)
        counters.tokens += batch.num_tokens
        counters.loss_tokens += int((batch.loss_weights > 0).sum())
        return batch


def num_computed(samples: Sequence[Sample]) -> int:
    """Return how many tokens the samples of a record take in a row, where what a pair begins with is there once."""
    total = sum(map(len, samples))
    if len(samples) != 2 or samples[0].sequence is None:
        return total
    most = min(map(len, samples))
    differing = (samples[0].token_ids[:most] != samples[1].token_ids[:most]).nonzero()
    return total - (int(differing[0]) if differing.numel() else most)


def _numbered(items: Sequence[tuple[Sample, ...]]) -> list[Sample]:
    """Return the samples of some records, those of one sequence with a number of their own."""
    return [
        sample if sample.sequence is None else replace(sample, sequence=number)
        for number, samples in enumerate(items)
        for sample in samples
    ]


def rows_per_batch(training: TrainingConfig) -> int:
    """Rows of one optimizer step."""
    return training.batch_size * training.gradient_accumulation_steps


def _nothing_left(epoch: int, counters: Counters) -> DataError:
    return DataError(
        f"epoch {epoch + 1} has no sample to train on",
        path="data.sources",
        value=counters.as_dict(),
        rule="at least one sample is neither left out nor dropped",
        repair="look at the counts: raise training.max_seq_len, set data.oversize to truncate, or correct the records",
    )


def _check_identity(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    repair = "give the data and the settings that the run began with, or start anew"
    for key in present:
        if key != "sources" and saved.get(key) != present[key]:
            rule = f"{key} is {saved.get(key)!r}, as when the state was saved"
            raise DataError(
                f"the state does not fit: {key} has changed",
                path="run.seed" if key == "seed" else f"data.{key}",
                value=present[key],
                rule=rule,
                repair=repair,
            )
    before, now = saved["sources"], present["sources"]
    if len(before) != len(now):
        rule = f"{len(before)} sources, as when the state was saved"
        raise DataError(
            "the state does not fit: there are other sources",
            path="data.sources",
            value=len(now),
            rule=rule,
            repair=repair,
        )
    for old, new in zip(before, now, strict=True):
        for key in ("length", "digest", "weight"):
            if old.get(key) != new.get(key):
                what = {"length": "another length", "digest": "another content", "weight": "another weight"}[key]
                raise DataError(
                    f"the state does not fit: {new['name']} has {what}",
                    path=new["name"],
                    value=new.get(key),
                    rule=f"its {key} is {old.get(key)!r}, as when the state was saved",
                    repair=repair,
                )


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
    encoder: SampleEncoder,
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


def _lengths(corpus: IndexedCorpus, encoder: SampleEncoder, numbers: Indices) -> Indices:
    """The tokens of each record's samples; 0 for one that is left out."""
    lengths = np.zeros(len(numbers), dtype=np.int64)
    scratch = Counters()
    for place, number in enumerate(numbers):
        drawn = corpus.at(int(number))
        samples = encoder.encode_all(drawn.record, layout=corpus.layouts[drawn.source], counters=scratch)
        lengths[place] = num_computed(samples)
    return lengths


def _num_rows(lengths: Indices, data: DataConfig, encoder: SampleEncoder) -> int:
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
