"""Follows the trace of a run while it grows, and finds the spans of any part of it without holding all of them.

Of each block of the file is known which time it covers, and of the whole a coarse overview. A narrow part is read from
its blocks; for a wide one the overview has to do.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from forge.ui.run_files import Fingerprint, fingerprint, open_file
from forge.ui.trace_overview import TraceOverview
from forge.ui.trace_spans import NO_SPANS, Spans, TraceNames

READ: Final = 1 << 22
"""Bytes that are read at a time."""
BLOCK: Final = 1 << 18
MAX_BLOCKS: Final = 16_384
MAX_EXACT: Final = 32 << 20
_KEPT: Final = 64 << 20
"""Memory for spans of blocks that were read before."""
_BUDGET_S: Final = 0.15
_HEAD: Final = 128
_MAX_LINE: Final = 1 << 16


@dataclass(slots=True)
class _Block:
    offset: int
    size: int
    start_us: float
    end_us: float
    num_spans: int


class TraceIndex:
    """The trace in one file. Calls may come from any thread; one at a time is carried out.

    Args:
        path: the file.
        block: bytes of a block, as the file is read; more when there are more than `max_blocks`.
        max_blocks: of how many blocks the time is known.
        max_exact: bytes of blocks that are read for one part of the trace; of more the overview is shown.
    """

    def __init__(
        self, path: Path, *, block: int = BLOCK, max_blocks: int = MAX_BLOCKS, max_exact: int = MAX_EXACT
    ) -> None:
        self.path, self._block, self._max_blocks, self._max_exact = path, block, max_blocks, max_exact
        self.guard = threading.RLock()
        """Held while the index changes. Take it to see several of its parts at the same time."""
        self._file: tuple[int, int] | None = None
        self._head = b""
        self._size = self._offset = 0
        self._start_over()

    def _start_over(self) -> None:
        self.names, self.overview = TraceNames(), TraceOverview()
        self.generation = getattr(self, "generation", 0) + 1
        self.start_us = self.end_us = 0.0
        """When the first span began, and the last one ended."""
        self.num_spans = 0
        self._blocks: list[_Block] = []
        self._kept: OrderedDict[int, Spans] = OrderedDict()
        self._offset = 0

    @property
    def progress(self) -> float:
        """How much of the file is in the index, as a part of 1."""
        return 1.0 if self._offset >= self._size else self._offset / self._size

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, apart from what is small."""
        return self.overview.num_bytes + sum(spans.num_bytes for spans in self._kept.values())

    # ---- Reading

    def advance(self, *, budget_s: float = _BUDGET_S) -> None:
        """Read what is new, for about so long. `progress` says how far that came."""
        with self.guard:
            until = time.monotonic() + budget_s
            found = fingerprint(self.path)
            if found is None:
                if self._file is not None:
                    self._file = None
                    self._size = 0
                    self._start_over()
                return
            try:
                with open_file(self.path) as file:
                    self._look(file, found)
                    while self._read(file) and time.monotonic() < until:
                        pass
            except OSError:
                return

    def _look(self, file: BinaryIO, found: Fingerprint) -> None:
        """Start over if the file is another one."""
        is_same = self._file == (found.device, found.inode) and found.size >= self._offset
        if not is_same or os.pread(file.fileno(), len(self._head), 0) != self._head:
            self._start_over()
        self._file, self._size = (found.device, found.inode), found.size
        self._head = os.pread(file.fileno(), _HEAD, 0)

    def _read(self, file: BinaryIO) -> bool:
        """Read the next lines. Returns whether there may be more."""
        if self._offset >= self._size:
            return False
        data = os.pread(file.fileno(), READ, self._offset)
        is_last = self._offset + len(data) >= self._size
        end = data.rfind(b"\n") + 1
        if is_last:
            if _is_whole(data[end:]):  # an event ends with its line only when another one follows
                end = len(data)
            end = len(data[:end].rstrip(b"], \t\r\n"))  # a run that is resumed continues after the last event
        if end == 0:
            if len(data) < READ:  # it is being written
                self._size = self._offset
                return False
            end = len(data)  # no event is so long
        self._add(data[:end])
        if is_last:
            self._size = self._offset
        return not is_last

    def _add(self, data: bytes) -> None:
        place = 0
        while place < len(data):
            is_rest = len(data) - place <= self._block
            end = 0 if is_rest else data.rfind(b"\n", place, place + self._block) + 1
            end = end or len(data)
            part = data[place:end]
            spans = self.names.read(part, offset=self._offset + place)
            if len(spans):
                first, last = float(spans.start.min()), float(spans.end.max())
                self._blocks.append(_Block(self._offset + place, len(part), first, last, len(spans)))
                self.start_us = min(self.start_us, first) if self.num_spans else first
                self.end_us = max(self.end_us, last)
                self.num_spans += len(spans)
                self.overview.add(spans)
            place = end
        self._offset += len(data)
        while len(self._blocks) > self._max_blocks:
            self._merge_blocks()

    def _merge_blocks(self) -> None:
        pairs = [self._blocks[place : place + 2] for place in range(0, len(self._blocks), 2)]
        self._blocks = [_joined(pair) for pair in pairs]
        self._kept.clear()

    # ---- What is in a part of the trace

    def spans_between(self, start_us: float, end_us: float) -> Spans | None:
        """Return all spans of the blocks that have any in this part of the trace; None where that is too much."""
        with self.guard:
            blocks = self._between(start_us, end_us)
            if sum(block.size for block in blocks) > self._max_exact:
                return None
            try:
                with open_file(self.path) as file:
                    return Spans.joined([self._spans_of(block, file) for block in blocks])
            except OSError:
                return NO_SPANS

    def _between(self, start_us: float, end_us: float) -> list[_Block]:
        return [block for block in self._blocks if block.end_us >= start_us and block.start_us <= end_us]

    def _spans_of(self, block: _Block, file: BinaryIO) -> Spans:
        known = self._kept.get(block.offset)
        if known is not None:
            self._kept.move_to_end(block.offset)
            return known
        spans = self.names.read(os.pread(file.fileno(), block.size, block.offset), offset=block.offset)
        self._kept[block.offset] = spans
        total = sum(each.num_bytes for each in self._kept.values())
        while total > _KEPT and len(self._kept) > 1:
            total -= self._kept.popitem(last=False)[1].num_bytes
        return spans

    def line_at(self, offset: int) -> bytes | None:
        """Return the line that begins at a place of the file; None where there is none."""
        try:
            with open_file(self.path) as file:
                data = os.pread(file.fileno(), _MAX_LINE, offset)
        except (OSError, ValueError, OverflowError):
            return None
        end = data.find(b"\n")
        return data if end < 0 else data[:end]

    def lines_between(self, start_us: float, end_us: float) -> Iterator[bytes]:
        """Yield the lines of the spans in a part of the trace, a block at a time."""
        with self.guard:
            blocks = self._between(start_us, end_us)
        for block in blocks:
            with self.guard, open_file(self.path) as file:
                data = os.pread(file.fileno(), block.size, block.offset)
                spans = self.names.read(data, offset=0)
            inside = (spans.start <= end_us) & (spans.end >= start_us)
            lines = []
            for offset in np.flatnonzero(inside):
                begin = int(spans.offset[offset])
                end = data.find(b"\n", begin)
                lines.append(data[begin : len(data) if end < 0 else end])
            yield b"".join(b",\n" + line.lstrip(b"[, \t").rstrip(b"], \t\r") for line in lines)


def _is_whole(line: bytes) -> bool:
    """Return whether a line that has no end yet is a whole event."""
    try:
        return isinstance(json.loads(line.strip(b"[,] \t\r")), dict)
    except (ValueError, RecursionError):
        return False


def _joined(pair: list[_Block]) -> _Block:
    first, last = pair[0], pair[-1]
    return _Block(
        first.offset,
        last.offset + last.size - first.offset,
        min(each.start_us for each in pair),
        max(each.end_us for each in pair),
        sum(each.num_spans for each in pair),
    )
