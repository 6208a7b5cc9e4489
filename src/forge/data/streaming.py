"""Sources read as they come: a shuffle buffer for each, drawn from in proportion to weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge.data.corpus import Drawn, Pass
from forge.data.formats import Layout
from forge.data.mixing import derive, next_stream, pick
from forge.data.records import Mark, Record
from forge.data.sources import StreamSource
from forge.errors import DataError


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
        return _StreamPass([self._shelf(number, epoch) for number in range(len(self._sources))], self._weights)

    def resume(self, epoch: int, state: Mapping[str, Any]) -> tuple[Pass, list[Drawn]]:
        held: dict[tuple[int, int], Drawn] = {}
        shelves = []
        for number, saved in enumerate(state["streams"]):
            shelf = self._shelf(number, epoch)
            wanted = [ordinal for source, ordinal in state["held"] if source == number]
            held.update(((number, drawn.number), drawn) for drawn in shelf.restore(saved, held=wanted))
            shelves.append(shelf)
        return _StreamPass(shelves, self._weights), [held[source, ordinal] for source, ordinal in state["held"]]

    def _shelf(self, number: int, epoch: int) -> _Shelf:
        key = derive(self._seed, "stream", number, epoch)
        return _Shelf(self._sources[number], number=number, key=key, size=self._buffer)


class _Shelf:
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
    def __init__(self, shelves: Sequence[_Shelf], weights: Sequence[float]) -> None:
        self._shelves = tuple(shelves)
        self._weights = tuple(weights)

    def draw(self) -> Drawn | None:
        live = [shelf.fill() for shelf in self._shelves]
        number = next_stream([shelf.drawn for shelf in self._shelves], self._weights, live)
        return None if number is None else self._shelves[number].draw()

    def state(self, held: Sequence[Drawn]) -> dict[str, Any]:
        streams = [
            shelf.state([drawn for drawn in held if drawn.source == number])
            for number, shelf in enumerate(self._shelves)
        ]
        return {"streams": streams, "held": [[drawn.source, drawn.number] for drawn in held]}
