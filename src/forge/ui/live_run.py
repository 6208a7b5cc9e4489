"""One run that somebody looks at: its metrics in memory, and a description of the rest of its folder."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from forge._version import __version__
from forge.errors import DataError
from forge.loops.runtime_changes import FILE_NAME as CHANGES
from forge.observe.fault_records import FILE_NAME as FAULTS
from forge.observe.league_table import LEAGUE_TABLE, MAX_BYTES, parse_league
from forge.observe.report.charts import MORE, charts_of
from forge.observe.report.headline import HEADLINE_METRICS, facts, headline
from forge.observe.report.reading import setting_of
from forge.observe.system_log import FILE_NAME as SYSTEM
from forge.ui.followed_table import FollowedTable
from forge.ui.ledger_counts import LedgerCounts
from forge.ui.metric_table import TableRows
from forge.ui.rollouts.view import RolloutView
from forge.ui.run_files import CONFIG, METRICS, fingerprint, read_bytes, read_json_lines
from forge.ui.run_summary import SUPERVISOR, RunSummary, read_settings
from forge.ui.system_charts import known_names, system_charts
from forge.ui.trace_files import TRACE, list_profiles, trace_marks
from forge.ui.trace_index import TraceIndex

_DESCRIBED: Final = (CONFIG, SUPERVISOR, CHANGES, LEAGUE_TABLE, FAULTS)
RECOVERY: Final = ("recovery/restarts", "recovery/steps_retrained", "recovery/seconds")
_MAX_EVENTS: Final = 200
MAX_SYSTEM_CELLS: Final = 6_000_000
_ENDS: Final = 20
"""So many values from each end of a metric are enough for the numbers at the head of the page."""


class LiveRun:
    """Follows the files of one run. `advance` and `describe` may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 0
        """Counts what has changed."""
        self._lock = threading.Lock()
        self._metrics = FollowedTable(folder / METRICS)
        self.system = FollowedTable(folder / SYSTEM, max_cells=MAX_SYSTEM_CELLS)
        """What processes use: a file of the same form as the metrics."""
        self.trace = TraceIndex(folder / TRACE)
        """What processes did. It is read when a page asks for it."""
        self._ledger = LedgerCounts(folder / "ledger.jsonl")
        self.rollouts = RolloutView(folder)
        self._seen: tuple[object, ...] | None = None
        self._details = 0

    @property
    def num_cells(self) -> int:
        """How many numbers are in memory."""
        followed = self._metrics.num_cells + self.system.num_cells
        return followed + self.rollouts.index.num_cells + self.trace.num_bytes // 4

    @property
    def progress(self) -> float:
        """How much of the metrics has been read, as a part of 1."""
        return self._metrics.progress

    def rows(self) -> TableRows:
        """Return the metrics: until all of a large file has been read, lines from all over it."""
        return self._metrics.rows()

    @property
    def is_partial(self) -> bool:
        """Whether `rows` has a sample of the lines instead of all."""
        return self._metrics.is_partial

    @property
    def table_id(self) -> int:
        """A number for what `rows` are of: when it changes, earlier rows are no longer the same ones."""
        return self._metrics.table_id

    def main_names(self) -> tuple[str, ...]:
        """Return the metrics of all charts but those of the section *More*, which can be hundreds."""
        shown = [chart for chart in self._charts(self.rows()) if chart["section"] != MORE]
        series = [one for chart in shown for one in chart["series"]]
        bands = [one["band"] for one in series if "band" in one]
        return tuple(dict.fromkeys([*(one["key"] for one in series), *bands, *HEADLINE_METRICS, *RECOVERY]))

    def _charts(self, rows: TableRows) -> list[dict[str, Any]]:
        return charts_of(known_names(rows))

    def advance(self) -> bool:
        """Read the next part of what is new. Return whether more is left."""
        with self._lock:
            changed = any([self._metrics.advance(), self.system.advance(), self._ledger.advance()])
            if self.rollouts.index.is_open:
                changed = self.rollouts.index.advance() or changed
            seen = (*(fingerprint(self.folder / name) for name in _DESCRIBED), *trace_marks(self.folder))
            if seen != self._seen:
                self._seen, changed = seen, True
                self._details += 1
            self.version += changed
            return not (self._metrics.is_complete and self.system.is_complete and self.rollouts.index.is_complete)

    def metric_at(self, name: str, step: int) -> float | None:
        """Return what a metric was at a step; None where that is not in memory."""
        rows = self.rows()
        place = int(np.searchsorted(rows.steps, step))
        if name not in rows.columns or rows.merged > 1 or place == len(rows) or rows.steps[place] != step:
            return None
        value = float(rows.columns[name][place])
        return None if math.isnan(value) else value

    # ---- What the page shows beside the curves

    def status(self, summary: RunSummary) -> dict[str, Any]:
        """Return what changes with every step: the state, how much is read, and the numbers at the head."""
        rows = self.rows()
        return {
            "summary": summary.plain(),
            "table": self.table_id,
            "details": self._details,
            "ledger": self._ledger.counts,
            "numRows": len(rows),
            "numNames": len(rows.columns),
            "progress": round(self.progress, 3),
            "firstTime": float(rows.times[0]) if len(rows) else None,
            "lastTime": float(rows.times[-1]) if len(rows) else None,
            "lastStep": int(rows.steps[-1]) if len(rows) else 0,
            "tiles": headline(_Ends(rows)),
            "system": self.system.facts(),
            "rollouts": self.rollouts.status(),
        }

    def describe(self, summary: RunSummary) -> dict[str, Any]:
        """Return everything but the curves and the rollouts."""
        config = read_settings(self.folder)
        rows = self.rows()
        total = setting_of(config, "training.max_steps")
        status = self.status(summary)
        notes: list[str] = []
        return {
            "run": {
                "id": summary.id,
                "name": summary.name,
                "folder": str(self.folder),
                "forge": __version__,
                "lastStep": status["lastStep"],
                "totalSteps": total if type(total) is int else None,
                "firstTime": status["firstTime"],
                "lastTime": status["lastTime"],
                "maskTruncated": setting_of(config, "rollout.mask_truncated") is True,
            },
            "status": status,
            "hasRollouts": self.rollouts.index.is_there,
            "facts": facts(_Settings(config)),
            "tiles": status["tiles"],
            "charts": self._charts(rows),
            "systemCharts": system_charts(self.system.rows()),
            "hasTrace": fingerprint(self.folder / TRACE) is not None,
            "profiles": list_profiles(self.folder),
            "league": self._league(notes),
            "changes": list(read_json_lines(self.folder / CHANGES))[-_MAX_EVENTS:],
            "events": list(read_json_lines(self.folder / SUPERVISOR))[-_MAX_EVENTS:],
            "faults": list(read_json_lines(self.folder / FAULTS))[-_MAX_EVENTS:],
            "notes": [*notes, *self._notes(rows)],
        }

    def _league(self, notes: list[str]) -> Mapping[str, Any]:
        path = self.folder / LEAGUE_TABLE
        data = read_bytes(path, limit=MAX_BYTES + 1)
        if data is None:
            if fingerprint(path) is not None:
                notes.append(f"{LEAGUE_TABLE} could not be read.")
            return {}
        try:
            return parse_league(path, data)
        except DataError as error:
            notes.append(f"{LEAGUE_TABLE} could not be read: {error.rule}.")
            return {}

    def _notes(self, rows: TableRows) -> list[str]:
        notes = []
        if self._metrics.num_unreadable:
            notes.append(f"{self._metrics.num_unreadable} lines of {METRICS} could not be read and are not shown.")
        if self._metrics.table.num_refused:
            notes.append("The run has too many metrics; some are not shown.")
        if rows.merged > 1:
            notes.append(f"The run is so long that {rows.merged} steps are kept as one, their mean.")
        return notes


class _Settings:
    """A configuration, for `facts`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def setting(self, path: str) -> Any:
        return setting_of(self._config, path)


class _Ends:
    """The first and the last values of the metrics that the head of the page shows."""

    def __init__(self, rows: TableRows) -> None:
        self.columns: Mapping[str, Sequence[float | None]] = {
            name: _ends(rows.columns[name]) for name in HEADLINE_METRICS if name in rows.columns
        }


def _ends(column: Any) -> list[float | None]:
    known = column[~np.isnan(column)]
    few = known if len(known) <= 2 * _ENDS else np.r_[known[:_ENDS], known[-_ENDS:]]
    found: list[float | None] = few.tolist()
    return found
