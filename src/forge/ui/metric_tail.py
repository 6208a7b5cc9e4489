"""Follows a metrics file into a table: first lines from all over it, at once; then all of it; then what is appended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Final

from forge.observe.jsonl import MetricsLine, decode_line
from forge.ui.metric_table import MetricTable
from forge.ui.run_files import fingerprint, open_file, read_tail

BLOCK: Final = 1 << 22
"""Bytes that one call of `advance` reads."""
SMALL: Final = 1 << 21
"""A file up to this size is read whole before anything is shown: it takes less than a tenth of a second."""
_NUM_SAMPLED: Final = 400
_HEAD: Final = 128


class MetricTail:
    """Reads a metrics file that grows, and may be replaced by another one.

    A resumed run replaces the file by one with fewer lines, and so does a run whose file has reached its bound. Then
    the table starts over: the last line that was read is no longer where it was. A last line without an end is left for
    later. Lines that are not lines of metrics are counted and skipped.
    """

    def __init__(self, path: Path, table: MetricTable) -> None:
        self.path, self.table = path, table
        self.num_unreadable = 0
        self._file: tuple[int, int] | None = None
        self._mark = (0, b"")
        """Where the last line begins that was read, and its first bytes. No other line of a run has these."""
        self._offset, self._size = 0, 0

    @property
    def is_complete(self) -> bool:
        """Whether the table has everything that the file had when it was looked at last."""
        return self._offset >= self._size

    @property
    def progress(self) -> float:
        """How much of the file is in the table, as a part of 1."""
        return 1.0 if self.is_complete else self._offset / self._size

    def advance(self) -> bool:
        """Read the next block. Return whether the table has changed."""
        if fingerprint(self.path) is None:
            return self._start_over(None) if self._file is not None else False
        changed = False
        try:
            with open_file(self.path) as file:
                found = os.fstat(file.fileno())  # of what was opened: another file may have taken its place
                if self._is_another(file, found):
                    changed = self._start_over(found)
                self._size = found.st_size
                return self._read(file) or changed
        except OSError:
            return changed

    def _is_another(self, file: BinaryIO, found: os.stat_result) -> bool:
        if self._file != (found.st_dev, found.st_ino) or found.st_size < self._offset:
            return True
        place, head = self._mark
        return found.st_size != self._size and os.pread(file.fileno(), len(head), place) != head

    def _start_over(self, found: os.stat_result | None) -> bool:
        had = len(self.table) > 0
        self._file = None if found is None else (found.st_dev, found.st_ino)
        self._offset = self._size = self.num_unreadable = 0
        self._mark = (0, b"")
        self.table.clear()
        return had

    def _read(self, file: BinaryIO) -> bool:
        if self._offset >= self._size:
            return False
        data = os.pread(file.fileno(), BLOCK, self._offset)
        end = data.rfind(b"\n") + 1
        if end == 0:
            if len(data) == BLOCK:  # no line of metrics is so long
                self._offset += len(data)
                self.num_unreadable += 1
            else:
                self._size = self._offset  # it is being written
            return False
        if self._offset + end < self._size <= self._offset + len(data):
            self._size = self._offset + end
        last = data.rfind(b"\n", 0, end - 1) + 1
        self._mark = (self._offset + last, data[last : min(end, last + _HEAD)])
        self._offset += end
        lines = [decode_line(line) for line in data[: end - 1].split(b"\n")]
        self.num_unreadable += lines.count(None)
        self.table.add([line for line in lines if line is not None])
        return True


def sample_table(path: Path) -> MetricTable:
    """Return a table of lines at evenly spaced places of a file, the first and the last ones among them."""
    table = MetricTable()
    table.add(sample_lines(path, _NUM_SAMPLED))
    last = [decode_line(line) for line in read_tail(path)]
    final = int(table.rows().steps[-1]) if len(table) else -1
    table.add([line for line in last if line is not None and line.step >= final])
    return table


def sample_lines(path: Path, count: int) -> list[MetricsLine]:
    """Return up to `count` lines at evenly spaced places of a metrics file, the first one among them."""
    lines: list[MetricsLine] = []
    try:
        with open_file(path) as file:
            size, end = os.fstat(file.fileno()).st_size, 0
            for place in range(count):
                start = size * place // count
                if start < end:
                    continue
                found, end = _line_after(file, start, size)
                if found is not None:
                    lines.append(found)
    except OSError:
        return lines
    return lines


def _line_after(file: BinaryIO, start: int, size: int) -> tuple[MetricsLine | None, int]:
    """Return the first whole line at or after a place, and where it ends."""
    data = b""
    begin = 0 if start == 0 else -1
    while start + len(data) < size and len(data) < BLOCK:
        data += os.pread(file.fileno(), 1 << 13, start + len(data))
        if begin < 0:
            begin = data.find(b"\n") + 1 or -1
        if begin >= 0 and (end := data.find(b"\n", begin)) >= 0:
            return decode_line(data[begin:end]), start + end + 1
    return None, size
