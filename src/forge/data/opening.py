"""From a configuration to the loaders of a run."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from forge.config import DataConfig, SourceConfig, TrainingConfig, ValidationConfig
from forge.data.corpus import Corpus, IndexedCorpus, StreamCorpus
from forge.data.files import Record
from forge.data.formats import CONVERSATIONS, Layout, RecordFormats, detect
from forge.data.loader import BatchLoader
from forge.data.samples import Encoder, SampleEncoder, Tokenizer
from forge.data.sources import IndexedSource, StreamSource, open_indexed, open_stream
from forge.errors import ConfigError, DataError

logger = logging.getLogger("forge.data")

_LOOKED_AT = 100


@dataclass(frozen=True, slots=True)
class Loaders:
    """The data of a run: batches to train on, and held-out ones where there are any. A context that closes both."""

    train: BatchLoader
    validation: BatchLoader | None

    def close(self) -> None:
        """End the background threads."""
        self.train.close()
        if self.validation is not None:
            self.validation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_loaders(
    data: DataConfig,
    *,
    training: TrainingConfig,
    tokenizer: Tokenizer,
    seed: int,
    validation: ValidationConfig | None = None,
    read_ahead: int = 2,
    encoder: SampleEncoder | None = None,
    formats: RecordFormats = CONVERSATIONS,
) -> Loaders:
    """Open the sources of a configuration, whose records have some of the `formats`.

    `encoder` makes samples of records; None for one sample of each conversation or text, made with `tokenizer`.

    Validation goes once through its samples, in the same order each time: `rewind()` it before each use. Its samples
    are indexed even where training streams, each is there once whatever its source's weight, and those held out by
    fraction are the same for the same data and seed.
    """
    encoder = encoder or Encoder(tokenizer, data=data, max_seq_len=training.max_seq_len)
    corpus = open_corpus(data.sources, data=data, seed=seed, formats=formats)
    held: IndexedCorpus | None = None
    if validation is not None and validation.sources:
        held = open_indexed_corpus(validation.sources, data=data, seed=seed, formats=formats)
    elif validation is not None and validation.fraction > 0:
        if not isinstance(corpus, IndexedCorpus):
            raise ConfigError(
                "a stream cannot be split",
                path="validation.fraction",
                value=validation.fraction,
                rule="0 with data.streaming",
                repair="give validation.sources",
            )
        corpus, held = corpus.split(validation.fraction, seed=seed)
    train = BatchLoader(corpus, encoder, data=data, training=training, read_ahead=read_ahead)
    if held is None or validation is None:
        return Loaders(train, None)
    if validation.max_samples is not None:
        held = held.limited(validation.max_samples, seed=seed)
    once = training.model_copy(update={"num_epochs": 1})
    return Loaders(train, BatchLoader(held.in_order(), encoder, data=data, training=once, read_ahead=read_ahead))


def open_corpus(
    sources: Sequence[SourceConfig], *, data: DataConfig, seed: int, formats: RecordFormats = CONVERSATIONS
) -> Corpus:
    """Sources as data.streaming says."""
    if not sources:
        raise ConfigError(
            "there is no data to train on",
            path="data.sources",
            value=(),
            rule="at least one source",
            repair="add one, such as {path: train.jsonl}",
        )
    if not data.streaming:
        return open_indexed_corpus(sources, data=data, seed=seed, formats=formats)
    opened = [open_stream(config, wanted=formats.wanted(config.columns)) for config in sources]
    return StreamCorpus(
        opened,
        layouts=[
            _layout(config, source, (record for _, record in source.records(None)), data=data, formats=formats)
            for config, source in zip(sources, opened, strict=True)
        ],
        weights=[config.weight for config in sources],
        seed=seed,
        shuffle=data.shuffle,
        buffer=data.shuffle_buffer,
    )


def open_indexed_corpus(
    sources: Sequence[SourceConfig], *, data: DataConfig, seed: int, formats: RecordFormats = CONVERSATIONS
) -> IndexedCorpus:
    """Sources with random access, whatever data.streaming says."""
    opened = [open_indexed(config, wanted=formats.wanted(config.columns)) for config in sources]
    return IndexedCorpus(
        opened,
        layouts=[
            _layout(config, source, (source.read(index) for index in range(len(source))), data=data, formats=formats)
            for config, source in zip(sources, opened, strict=True)
        ],
        weights=[config.weight for config in sources],
        seed=seed,
        shuffle=data.shuffle,
    )


def _layout(
    config: SourceConfig,
    source: IndexedSource | StreamSource,
    records: Iterable[Record],
    *,
    data: DataConfig,
    formats: RecordFormats,
) -> Layout:
    if config.format != "auto":
        return Layout(config.format, config.columns)
    first = list(itertools.islice(records, _LOOKED_AT if data.on_bad_record == "skip" else 1))
    if not first:
        raise DataError(
            f"there are no records in {source.name}",
            path=source.name,
            rule="a source has at least one record",
            repair="correct the path, or remove the source",
        )
    found = detect(first, columns=config.columns, lenient=data.on_bad_record == "skip", formats=formats)
    logger.info("%s: the format is %s, by the keys of its first record", source.name, found)
    return Layout(found, config.columns)
