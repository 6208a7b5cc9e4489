"""Sources mixed into one sequence of records per epoch: what is indexed, and the seam that streams share with it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from forge.data.files import Mark, Record
from forge.data.formats import Layout
from forge.data.mixing import Indices, derive, epoch_order, hold_out, next_stream, pick, shuffled
from forge.data.sources import IndexedSource, StreamSource
from forge.errors import DataError


@dataclass(frozen=True, slots=True)
class Drawn:
    """A record that an epoch came to, with what finds it again: its number, and for streams a mark."""

    source: int
    number: int
    record: Record
    mark: Mark | None = None


class Pass(Protocol):
    """One epoch on its way through the records."""

    def draw(self) -> Drawn | None:
        """The next record; None at the end of the epoch."""
        ...

    def state(self, held: Sequence[Drawn]) -> dict[str, Any]:
        """Where it stands, with what was drawn and is not used up, in plain JSON."""
        ...


class Corpus(Protocol):
    """Records in an order that the seed decides.

    Attributes:
        layouts: the layout of each source's records.
    """

    layouts: tuple[Layout, ...]

    def identity(self) -> dict[str, Any]:
        """What a saved position belongs to. Two corpora with the same give the same records in the same order."""
        ...

    def begin(self, epoch: int) -> Pass:
        """An epoch from its start."""
        ...

    def resume(self, epoch: int, state: Mapping[str, Any]) -> tuple[Pass, list[Drawn]]:
        """An epoch from where `Pass.state` was taken, and what was held then, read again."""
        ...


class IndexedCorpus:
    """Sources with random access. Every source may be narrowed to a part of its samples."""

    def __init__(
        self,
        sources: Sequence[IndexedSource],
        *,
        layouts: Sequence[Layout],
        weights: Sequence[float],
        seed: int,
        shuffle: bool,
        parts: Sequence[Indices] | None = None,
    ) -> None:
        self._sources = tuple(sources)
        self.layouts = tuple(layouts)
        self._weights = tuple(weights)
        self._seed = seed
        self._shuffle = shuffle
        self._parts = tuple(np.arange(len(source)) for source in sources) if parts is None else tuple(parts)
        self._ends = np.cumsum([len(part) for part in self._parts])
        self._digests: tuple[str, ...] | None = None

    def __len__(self) -> int:
        """How many samples there are, each counted once whatever its source's weight."""
        return int(self._ends[-1])

    def split(self, fraction: float, *, seed: int) -> tuple[IndexedCorpus, IndexedCorpus]:
        """What stays for training and what is held out of each source.

        Both are the same for the same data, fraction and seed, and have no sample in common. A source of one sample
        keeps it.
        """
        pairs = [
            hold_out(len(part), fraction=fraction, key=derive(seed, "split", number))
            for number, part in enumerate(self._parts)
        ]
        if not sum(len(held) for _, held in pairs):
            raise DataError(
                "there is nothing to hold out",
                path="validation.fraction",
                value=fraction,
                rule="at least one source has two samples",
                repair="give validation.sources, or set the fraction to 0",
            )
        stays = [part[stay] for part, (stay, _) in zip(self._parts, pairs, strict=True)]
        held = [part[out] for part, (_, out) in zip(self._parts, pairs, strict=True)]
        return self._narrowed(stays), self._narrowed(held)

    def limited(self, count: int, *, seed: int) -> IndexedCorpus:
        """At most `count` of the samples, spread over all, the same ones for the same seed."""
        if len(self) <= count:
            return self
        chosen = np.sort(shuffled(len(self), derive(seed, "limit"))[:count])
        starts = [0, *self._ends[:-1]]
        inside = [
            chosen[(chosen >= start) & (chosen < end)] - start for start, end in zip(starts, self._ends, strict=True)
        ]
        return self._narrowed([part[picked] for part, picked in zip(self._parts, inside, strict=True)])

    def in_order(self) -> IndexedCorpus:
        """The same samples, each once, always in the same order: what validation goes through."""
        return IndexedCorpus(
            self._sources,
            layouts=self.layouts,
            weights=[1.0] * len(self._sources),
            seed=self._seed,
            shuffle=False,
            parts=self._parts,
        )

    def _narrowed(self, parts: Sequence[Indices]) -> IndexedCorpus:
        return IndexedCorpus(
            self._sources,
            layouts=self.layouts,
            weights=self._weights,
            seed=self._seed,
            shuffle=self._shuffle,
            parts=parts,
        )

    def identity(self) -> dict[str, Any]:
        if self._digests is None:  # it goes over every index, and a loop asks for its position before each batch
            self._digests = tuple(
                hashlib.blake2b(part.tobytes() + source.digest.encode(), digest_size=16).hexdigest()
                for source, part in zip(self._sources, self._parts, strict=True)
            )
        sources = [
            {
                "name": source.name,
                "length": len(part),
                "digest": digest,
                "weight": weight,
            }
            for source, part, digest, weight in zip(
                self._sources, self._parts, self._digests, self._weights, strict=True
            )
        ]
        return {"streaming": False, "seed": self._seed, "shuffle": self._shuffle, "sources": sources}

    def order(self, epoch: int) -> Indices:
        """The numbers of an epoch's samples, in order."""
        counts = [len(part) for part in self._parts]
        return epoch_order(counts, self._weights, seed=self._seed, epoch=epoch, shuffle=self._shuffle)

    def at(self, number: int) -> Drawn:
        """The sample with a number, which counts through source after source."""
        source = int(np.searchsorted(self._ends, number, side="right"))
        part = self._parts[source]
        index = int(part[number - (int(self._ends[source]) - len(part))])
        return Drawn(source, number, self._sources[source].read(index))

    def begin(self, epoch: int) -> Pass:
        return _IndexedPass(self, epoch)

    def resume(self, epoch: int, state: Mapping[str, Any]) -> tuple[Pass, list[Drawn]]:
        return _IndexedPass(self, epoch, position=state["position"]), [self.at(number) for number in state["held"]]


class _IndexedPass:
    def __init__(self, corpus: IndexedCorpus, epoch: int, *, position: int = 0) -> None:
        self._corpus = corpus
        self._order = corpus.order(epoch)
        self._position = position

    def draw(self) -> Drawn | None:
        if self._position >= len(self._order):
            return None
        self._position += 1
        return self._corpus.at(int(self._order[self._position - 1]))

    def state(self, held: Sequence[Drawn]) -> dict[str, Any]:
        return {"position": self._position, "held": [drawn.number for drawn in held]}


class StreamCorpus:
    """Sources that are read from front to back in every epoch. `buffer` records of each wait to be drawn from."""

    def __init__(
        self,
        sources: Sequence[StreamSource],
        *,
        layouts: Sequence[Layout],
        weights: Sequence[float],
        seed: int,
        shuffle: bool,
        buffer: int,
    ) -> None:
        self._sources = tuple(sources)
        self.layouts = tuple(layouts)
        self._weights = tuple(weights)
        self._seed = seed
        self._buffer = buffer if shuffle else 1

    def identity(self) -> dict[str, Any]:
        sources = [
            {"name": source.name, "digest": source.digest, "weight": weight}
            for source, weight in zip(self._sources, self._weights, strict=True)
        ]
        return {"streaming": True, "seed": self._seed, "shuffle_buffer": self._buffer, "sources": sources}

    def begin(self, epoch: int) -> Pass:
        return _StreamPass([self._shuffle_buffer(number, epoch) for number in range(len(self._sources))], self._weights)

    def resume(self, epoch: int, state: Mapping[str, Any]) -> tuple[Pass, list[Drawn]]:
        held: dict[tuple[int, int], Drawn] = {}
        buffers = []
        for number, saved in enumerate(state["streams"]):
            shuffle_buffer = self._shuffle_buffer(number, epoch)
            wanted = [ordinal for source, ordinal in state["held"] if source == number]
            held.update(((number, drawn.number), drawn) for drawn in shuffle_buffer.restore(saved, held=wanted))
            buffers.append(shuffle_buffer)
        return _StreamPass(buffers, self._weights), [held[source, ordinal] for source, ordinal in state["held"]]

    def _shuffle_buffer(self, number: int, epoch: int) -> _ShuffleBuffer:
        key = derive(self._seed, "stream", number, epoch)
        return _ShuffleBuffer(self._sources[number], number=number, key=key, size=self._buffer)


class _ShuffleBuffer:
    """The records of one stream that were read and not yet drawn."""

    def __init__(self, source: StreamSource, *, number: int, key: int, size: int) -> None:
        self._source = source
        self._number = number
        self._key = key
        self._size = size
        self._incoming: Iterator[tuple[Mark, Record]] | None = None
        self._slots: list[Drawn] = []
        self._last: Mark | None = None
        self.drawn = 0

    def fill(self) -> bool:
        """Read until as many wait as may; False when nothing is left."""
        if self._incoming is None:
            self._incoming = self._source.records(None)
        while len(self._slots) < self._size and (read := next(self._incoming, None)) is not None:
            mark, record = read
            self._last = mark
            self._slots.append(Drawn(self._number, mark[0], record, mark))
        return bool(self._slots)

    def draw(self) -> Drawn:
        """One of those that wait. The last one takes its place, so that the order of slots is known again later."""
        slot = pick(self._key, draw=self.drawn, count=len(self._slots))
        self.drawn += 1
        self._slots[slot], self._slots[-1] = self._slots[-1], self._slots[slot]
        return self._slots.pop()

    def state(self, held: Sequence[Drawn]) -> dict[str, Any]:
        """Which records wait, and one mark from which all of them, and those held, can be read again."""
        marks = [drawn.mark for drawn in (*self._slots, *held) if drawn.mark is not None]
        earliest = min(marks, default=self._last)
        return {
            "drawn": self.drawn,
            "read": 0 if self._last is None else self._last[0] + 1,
            "slots": [drawn.number for drawn in self._slots],
            "mark": None if earliest is None else list(earliest),
        }

    def restore(self, saved: Mapping[str, Any], *, held: Sequence[int]) -> list[Drawn]:
        """Read again what waited; gives those that were held."""
        self.drawn = saved["drawn"]
        mark = saved["mark"]
        self._incoming = self._source.records(None if mark is None else (mark[0], mark[1], mark[2], mark[3]))
        wanted = {*saved["slots"], *held}
        found: dict[int, Drawn] = {}
        while (self._last[0] + 1 if self._last else 0) < saved["read"]:
            read = next(self._incoming, None)
            if read is None:
                break
            self._last, record = read
            if self._last[0] in wanted:
                found[self._last[0]] = Drawn(self._number, self._last[0], record, self._last)
        if len(found) != len(wanted):
            raise DataError(
                f"{self._source.name} has fewer records than when the state was saved",
                path=self._source.name,
                value=len(found),
                rule=f"{len(wanted)} records that were read ahead are still there",
                repair="restore the data, or start a new run",
            )
        self._slots = [found[number] for number in saved["slots"]]
        return [found[number] for number in held]


class _StreamPass:
    def __init__(self, buffers: Sequence[_ShuffleBuffer], weights: Sequence[float]) -> None:
        self._buffers = tuple(buffers)
        self._weights = tuple(weights)

    def draw(self) -> Drawn | None:
        live = [shuffle_buffer.fill() for shuffle_buffer in self._buffers]
        number = next_stream([shuffle_buffer.drawn for shuffle_buffer in self._buffers], self._weights, live)
        return None if number is None else self._buffers[number].draw()

    def state(self, held: Sequence[Drawn]) -> dict[str, Any]:
        streams = [
            shuffle_buffer.state([drawn for drawn in held if drawn.source == number])
            for number, shuffle_buffer in enumerate(self._buffers)
        ]
        return {"streams": streams, "held": [[drawn.source, drawn.number] for drawn in held]}
