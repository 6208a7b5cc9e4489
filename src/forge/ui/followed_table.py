"""A file of metrics that somebody looks at: its rows in memory, at first lines from all over it, then all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge.ui.metric_table import MAX_CELLS, MetricTable, TableRows
from forge.ui.metric_tail import SMALL, MetricTail, sample_table
from forge.ui.run_files import fingerprint


class FollowedTable:
    """Follows one file. `advance` is called by one thread at a time; the rest by any."""

    def __init__(self, path: Path, *, max_cells: int = MAX_CELLS) -> None:
        self._path = path
        self.table = MetricTable(max_cells=max_cells)
        self._tail = MetricTail(path, self.table)
        self._sample: tuple[int, MetricTable] | None = None

    @property
    def num_cells(self) -> int:
        """How many numbers are in memory."""
        rows = self.table.rows()
        return len(rows) * (len(rows.columns) + 6)

    @property
    def progress(self) -> float:
        """How much of the file has been read, as a part of 1."""
        return self._tail.progress

    @property
    def is_complete(self) -> bool:
        """Whether everything that was there at the last look has been read."""
        return self._tail.is_complete

    @property
    def num_unreadable(self) -> int:
        """Lines that are not lines of metrics."""
        return self._tail.num_unreadable

    def rows(self) -> TableRows:
        """Return the metrics: until all of a large file has been read, lines from all over it."""
        sample = self._sample
        return self.table.rows() if self._tail.is_complete or sample is None else sample[1].rows()

    @property
    def is_partial(self) -> bool:
        """Whether `rows` has a sample of the lines instead of all."""
        return not self._tail.is_complete and self._sample is not None

    @property
    def table_id(self) -> int:
        """A number for what `rows` are of: when it changes, earlier rows are no longer the same ones."""
        return -1 if self.is_partial else self.table.generation

    def advance(self) -> bool:
        """Read the next part of what is new. Return whether `rows` has changed."""
        was_partial = self.is_partial
        changed = self._tail.advance()
        if not self._tail.is_complete and self._needs_sample():
            self._sample = (self.table.generation, sample_table(self._path))
            changed = True
        if self._tail.is_complete:
            self._sample = None
        return changed or was_partial != self.is_partial

    def _needs_sample(self) -> bool:
        found = fingerprint(self._path)
        is_large = found is not None and found.size > SMALL
        return is_large and (self._sample is None or self._sample[0] != self.table.generation)

    def facts(self) -> dict[str, Any]:
        """Return what a page is told of the table beside its rows."""
        rows = self.rows()
        return {
            "table": self.table_id,
            "numRows": len(rows),
            "numNames": len(rows.columns),
            "progress": round(self.progress, 3),
            "lastStep": int(rows.steps[-1]) if len(rows) else 0,
        }
