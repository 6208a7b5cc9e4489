"""The index of a run's rollouts: for each line of its files where it is, and the numbers that filters and sorting need.

It is made in the background in small parts, newest steps first, and follows files that appear, grow, are replaced, or
are moved away when a run resumes. It is kept in memory alone: 88 bytes for a line and about 0.4 KB for a file. Of a run
with more than `MAX_ROWS` lines it has the newest.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from forge.observe.report.reading import EVAL_SAMPLES
from forge.ui.rollouts.columns import Array, Columns
from forge.ui.rollouts.files import KINDS, Place, RolloutFolder, name_of, place_of, read_at
from forge.ui.rollouts.lines import COLUMNS, MAX_LINE, Fields, Vocabulary, facts_of, parse_line

MAX_ROWS: Final = 1_500_000
CELLS_PER_ROW: Final = 22
"""What a line takes in memory, in numbers of 4 bytes."""
_KEPT: Final = 0.9
"""How much is kept of an index that became too large."""
_CHUNK: Final = 1 << 21
_MAX_FILES: Final = 1_000_000
_ENSURED_SLICES: Final = 32
_TOLD_EVERY: Final = 1.2
"""While an index is made, pages hear of it whenever it has grown by a fifth."""
_NUM_GROWING: Final = 2


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Bounds of an index.

    Attributes:
        max_rows: lines that are kept; of more the newest.
        slice_files, slice_bytes: what one call of `advance` reads at most, unless a single line is longer.
        told_rows: by how many lines an index that is being made has grown at least when pages hear of it.
    """

    max_rows: int = MAX_ROWS
    slice_files: int = 256
    slice_bytes: int = 6 << 20
    told_rows: int = 500


@dataclass(slots=True)
class _File:
    """A file of rollouts. `order` is its place in time; `offset` says how much of it is in the index, `size` how
    long it was then, and `inode` which file that was."""

    name: str
    number: int
    place: Place
    order: tuple[int, int]
    mark: int
    inode: int = 0
    offset: int = 0
    size: int = -1
    is_in_long_line: bool = False


@dataclass(frozen=True, slots=True)
class RolloutRows:
    """What an index had at one moment.

    Attributes:
        version: another one means other rows.
        generation: another one means that rows which were there are gone, or have other numbers.
        columns: `file`, `offset` and `length` of each line, and what `forge.ui.rollouts.lines.COLUMNS` names.
        steps, kinds: of each file, by its number; a kind is its place in `KINDS`.
        segments: `file`, `first` row and `count` of the runs of rows that were read at once.
        is_ordered: whether the rows of every file are in the order of groups and places in them.
        vocabulary: the words that columns have numbers of.
        num_files, num_waiting: files, and those of them that are not read to their ends.
        num_unreadable: lines that are not those of an episode.
        is_cut: whether older lines were left out.
    """

    version: int
    generation: int
    columns: Mapping[str, Array]
    steps: Array
    kinds: Array
    segments: Mapping[str, Array]
    is_ordered: bool
    vocabulary: Vocabulary
    num_files: int = 0
    num_waiting: int = 0
    num_unreadable: int = 0
    is_cut: bool = False

    def __len__(self) -> int:
        return len(self.columns["file"])

    @property
    def progress(self) -> float:
        """How much has been read, as a part of 1."""
        return 1.0 - self.num_waiting / self.num_files if self.num_files else 1.0

    def place(self, row: int) -> Place:
        """Return the file that a row is from."""
        number = int(self.columns["file"][row])
        return KINDS[int(self.kinds[number])], int(self.steps[number])

    def step_column(self) -> Array:
        """Return the step of each row."""
        return self.steps[self.columns["file"]]

    def kind_column(self) -> Array:
        """Return the kind of each row, as its place in `KINDS`."""
        return self.kinds[self.columns["file"]]

    def of_file(self, place: Place) -> Array:
        """Return the rows of a file."""
        matching = np.flatnonzero((self.steps == place[1]) & (self.kinds == KINDS.index(place[0])))
        return np.flatnonzero(np.isin(self.columns["file"], matching)) if len(matching) else matching

    def find(self, place: Place, group: int, index: int) -> int | None:
        """Return the row of an episode; None where it is not there."""
        rows = self.of_file(place)
        found = rows[(self.columns["group"][rows] == group) & (self.columns["index"][rows] == index)]
        return int(found[0]) if len(found) else None


@dataclass(slots=True)
class _Tables:
    """The columns of an index."""

    rows: Columns = field(
        default_factory=lambda: Columns({"file": np.int32, "offset": np.int64, "length": np.int32, **COLUMNS})
    )
    files: Columns = field(default_factory=lambda: Columns({"step": np.int64, "kind": np.int8}))
    segments: Columns = field(
        default_factory=lambda: Columns({"file": np.int32, "first": np.int64, "count": np.int32, "ordered": np.bool_})
    )


class RolloutIndex:
    """Follows the rollouts of one run once it is opened. All methods may be called from any thread."""

    def __init__(self, run_folder: Path, *, limits: IndexLimits | None = None) -> None:
        self._folder = RolloutFolder(run_folder)
        self._limits = limits or IndexLimits()
        self._lock = threading.Lock()
        self._tables, self._words = _Tables(), Vocabulary.empty()
        self._files: dict[str, _File] = {}
        self._waiting: list[_File] = []
        self._unfinished: set[str] = set()
        self._floor: tuple[int, int] | None = None
        self._version = self._generation = self._num_unreadable = self._told = 0
        self.is_open = False
        """Whether somebody has asked for rollouts: before that nothing is read."""

    @property
    def num_cells(self) -> int:
        """About how much memory it takes, in numbers of 4 bytes."""
        return len(self._tables.rows) * CELLS_PER_ROW

    @property
    def is_there(self) -> bool:
        """Whether the run has a folder of rollouts, or is an evaluation."""
        return self._folder.is_there

    def advance(self) -> bool:
        """Read the next part of what is new. Return whether pages should hear of it."""
        with self._lock:
            self.is_open = True
            before = self._version
            self._look()
            self._read_some()
            is_done, count = not self._waiting, len(self._tables.rows)
            has_news = self._version != before or (is_done and self._told < 0)
            if not has_news or (not is_done and count < self._told * _TOLD_EVERY):
                return False
            self._told = count + self._limits.told_rows
            return True

    @property
    def is_complete(self) -> bool:
        """Whether all that is known of is read."""
        return not self._waiting

    def rows(self) -> RolloutRows:
        """Return what is in the index now."""
        with self._lock:
            tables = self._tables
            return RolloutRows(
                version=self._version,
                generation=self._generation,
                columns=tables.rows.views(),
                steps=tables.files["step"],
                kinds=tables.files["kind"],
                segments=tables.segments.views(),
                is_ordered=bool(tables.segments["ordered"].all()),
                vocabulary=self._words,
                num_files=len(self._files),
                num_waiting=len(self._waiting),
                num_unreadable=self._num_unreadable,
                is_cut=self._floor is not None,
            )

    def ensure(self, place: Place) -> None:
        """Read a file now, if it is there and not yet read, as far as that is quick."""
        with self._lock:
            self._look()
            file = self._at(place)
            if file is None or not any(each is file for each in self._waiting):
                return
            for _ in range(_ENSURED_SLICES):
                if self._read(file) <= 0:
                    self._waiting = [each for each in self._waiting if each is not file]
                    break
            self._version += 1

    def _at(self, place: Place) -> _File | None:
        found = self._files.get(name_of(place))
        return self._files.get(EVAL_SAMPLES) if found is None and place == ("evaluation", 0) else found

    def read_lines(self, rows: RolloutRows, first: int, last: int, *, limit: int = MAX_LINE) -> bytes:
        """Return the bytes of rows that follow each other in their file, `limit` of them at most; nothing where the
        file is another one now."""
        number, offset = int(rows.columns["file"][first]), int(rows.columns["offset"][first])
        end = int(rows.columns["offset"][last]) + int(rows.columns["length"][last])
        with self._lock:
            file = self._at(rows.place(first))
            name, inode = (file.name, file.inode) if file is not None and file.number == number else ("", 0)
        with self._folder.open(name) as handle:
            if not name or handle is None or os.fstat(handle).st_ino != inode:
                return b""
            return read_at(handle, offset, min(limit, end - offset))

    def read_fields(self, rows: RolloutRows, row: int) -> Fields | None:
        """Return the fields of a row; None where its line is not there any more."""
        fields = parse_line(self.read_lines(rows, row, row))
        columns = rows.columns
        if fields is None or (fields["group"], fields["index"]) != (columns["group"][row], columns["index"][row]):
            return None
        return fields

    # ---- Which files there are

    def _look(self) -> None:
        found = self._folder.files()
        if found is not None:
            self._compare(found)
        for file in [file for name in self._unfinished if (file := self._files.get(name)) is not None]:
            with self._folder.open(file.name) as handle:
                has_more = handle is not None and os.fstat(handle).st_size != file.size
            if has_more and not any(each is file for each in self._waiting):
                self._waiting.append(file)

    def _compare(self, found: Mapping[str, int]) -> None:
        gone = [file for name, file in self._files.items() if found.get(name) != file.mark]
        if gone:
            self._forget(gone)
            for file in gone:
                del self._files[file.name]
        new = [name for name in found if name not in self._files][: _MAX_FILES - len(self._files)]
        places = [(name, place) for name in new if (place := place_of(name)) is not None]
        orders = [(place[1], KINDS.index(place[0])) for _, place in places]
        numbers = itertools.count(len(self._tables.files))
        self._tables.files.add(orders)
        added = [
            _File(name, number, place, order, found[name])
            for number, (name, place), order in zip(numbers, places, orders, strict=False)
        ]
        self._files |= {file.name: file for file in added}
        lowest = self._floor or (-1, -1)
        left = [file for file in self._waiting if file.name in self._files]
        self._waiting = sorted([*left, *(file for file in added if file.order > lowest)], key=lambda file: file.order)
        self._note_growing()
        self._version += bool(gone or added)

    def _note_growing(self) -> None:
        """Note which files may grow: the newest ones that do group by group, and those with half a line at the end."""
        steps = sorted(place[1] for file in self._files.values() if (place := file.place)[0] == "fruitless")
        names = {name_of(("fruitless", step)) for step in steps[-_NUM_GROWING:]} | {EVAL_SAMPLES} | self._unfinished
        self._unfinished = {name for name in names if name in self._files}

    def _forget(self, files: list[_File]) -> None:
        """Leave out the rows of files."""
        numbers = np.array([file.number for file in files if file.offset], np.int32)
        if not len(numbers):
            return
        tables = self._tables
        is_kept = ~np.isin(tables.rows["file"], numbers)
        shifts = np.cumsum(~is_kept) if len(is_kept) else np.zeros(1, np.int64)
        tables.segments.keep(~np.isin(tables.segments["file"], numbers))
        first = tables.segments["first"]
        tables.segments.replace("first", first - shifts[first])
        tables.rows.keep(is_kept)
        self._generation += 1
        self._version += 1

    # ---- Reading them

    def _read_some(self) -> None:
        left_bytes, left_files = self._limits.slice_bytes, self._limits.slice_files
        while self._waiting and left_bytes > 0 and left_files > 0:
            file = self._waiting[-1]
            left_files -= 1
            count = self._read(file)
            if count <= 0:
                self._waiting.pop()
            left_bytes -= abs(count)
            self._version += 1
            if len(self._tables.rows) > self._limits.max_rows:
                self._make_room()

    def _read(self, file: _File) -> int:
        """Read the next part of a file. Return how many bytes, negative or 0 where that was the last of it."""
        with self._folder.open(file.name) as handle:
            if handle is None:
                return 0
            facts = os.fstat(handle)
            if file.offset and (facts.st_ino != file.inode or facts.st_size < file.offset):
                self._forget([file])
                file.offset, file.is_in_long_line = 0, False
            file.inode, file.size = facts.st_ino, facts.st_size
            data = read_at(handle, file.offset, _CHUNK)
            if b"\n" not in data and len(data) == _CHUNK:
                data = read_at(handle, file.offset, MAX_LINE)
        end = data.rfind(b"\n") + 1
        if end:
            self._take(file, data[:end])
            file.offset += end
        elif len(data) >= MAX_LINE:
            self._num_unreadable += not file.is_in_long_line
            file.is_in_long_line = True
            file.offset += len(data)
        is_last = file.offset >= facts.st_size or (not end and len(data) < MAX_LINE)
        if is_last and file.offset < facts.st_size:
            self._unfinished.add(file.name)
        return -len(data) if is_last else len(data)

    def _take(self, file: _File, data: bytes) -> None:
        """Add the lines of a part of a file."""
        start, rows = 0, []
        if file.is_in_long_line:
            start, file.is_in_long_line = data.find(b"\n") + 1, False
        while start < len(data):
            end = data.find(b"\n", start) + 1
            facts = None if end - start > MAX_LINE else self._facts(data[start:end])
            if facts is None:
                self._num_unreadable += 1
            else:
                rows.append((file.number, file.offset + start, end - start, *facts))
            start = end
        if not rows:
            return
        first = len(self._tables.rows)
        keys = [(row[3], row[4]) for row in rows]
        self._tables.rows.add(rows)
        is_ordered = all(one <= other for one, other in itertools.pairwise(keys))
        self._tables.segments.add([(file.number, first, len(rows), is_ordered)])

    def _facts(self, line: bytes) -> tuple[Any, ...] | None:
        fields = parse_line(line)
        return None if fields is None else facts_of(fields, self._words)

    def _make_room(self) -> None:
        """Leave out the oldest files."""
        counts = np.bincount(self._tables.rows["file"], minlength=len(self._tables.files))
        left = len(self._tables.rows) - int(_KEPT * self._limits.max_rows)
        gone = []
        for file in sorted((file for file in self._files.values() if counts[file.number]), key=lambda file: file.order):
            if left <= 0:
                break
            left -= int(counts[file.number])
            gone.append(file)
        self._forget(gone)
        self._floor = gone[-1].order
        self._waiting = [file for file in self._waiting if file.order > self._floor]
        self._unfinished -= {file.name for file in gone}
