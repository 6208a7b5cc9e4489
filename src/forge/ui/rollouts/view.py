"""What the page asks of a run's rollouts: a part of a list, one sample, the members of a group."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from forge.observe.report.reading import setting_of
from forge.observe.report.samples import describe_episodes
from forge.observe.report.turns import number
from forge.ui.rollouts.columns import Array
from forge.ui.rollouts.explanation import LearningRules, batch_size, explain, explain_advantage
from forge.ui.rollouts.gradient import BatchSize
from forge.ui.rollouts.index import RolloutIndex, RolloutRows
from forge.ui.rollouts.lines import FLAGS, NO_VERSION, Fields, parse_start
from forge.ui.rollouts.query import (
    Filters,
    SampleName,
    all_of,
    arrange,
    conditions,
    counts_of,
    histograms,
    name_row,
)
from forge.ui.rollouts.search import UNKNOWN, YES, TextSearch
from forge.ui.run_files import CONFIG, Fingerprint, fingerprint
from forge.ui.run_summary import read_settings

SEARCH_S: Final = 0.25
"""How long one request searches. The page asks again until all is searched."""
_MAX_CHARACTERS: Final = 1_000_000
_MAX_COMPARED: Final = 1024
"""Members of a group whose rewards explain an advantage."""
_SNIPPET_BYTES: Final = (1 << 15, 1 << 20)
"""How much is read of a line for the beginning of its text; more where the prompt before it is long."""
_SNIPPET: Final = 200
_NUM_LISTS: Final = 4
_NUM_SEARCHES: Final = 4

Metric = Callable[[str, int], float | None]
"""Returns what a metric was at a step; None where that is not known."""


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What is shown of a group side by side: members, tokens of all of them, and bytes of lines that are read."""

    max_members: int = 32
    max_tokens: int = 60_000
    max_bytes: int = 48 << 20


@dataclass(frozen=True, slots=True)
class Window:
    """Which part of a list is wanted: `limit` rows from `offset` on, or around the sample `at`."""

    offset: int = 0
    limit: int = 50
    at: SampleName | None = None


@dataclass(frozen=True, slots=True)
class _List:
    """The rows that pass all filters but the text, in order, and how many there are of each kind."""

    order: Array
    facts: Mapping[str, Any]


class RolloutView:
    """The rollouts of one run. All methods may be called from any thread."""

    def __init__(self, folder: Path, *, index: RolloutIndex | None = None, limits: GroupLimits | None = None) -> None:
        self._folder, self._limits = folder, limits or GroupLimits()
        self.index = index or RolloutIndex(folder)
        self._lock = threading.Lock()
        self._lists: OrderedDict[tuple[int, Filters, str], _List] = OrderedDict()
        self._searches: OrderedDict[str, TextSearch] = OrderedDict()
        self._rules: tuple[Fingerprint | None, LearningRules, bool] | None = None

    def status(self) -> dict[str, Any] | None:
        """Return what a page hears while the index grows; None before somebody asked for rollouts."""
        if not self.index.is_open:
            return None
        rows = self.index.rows()
        return {"version": rows.version, "numRows": len(rows), "progress": round(rows.progress, 4)}

    # ---- A list

    def find(self, filters: Filters, sort: str, window: Window) -> dict[str, Any]:
        """Return a part of the rollouts that pass the filters, in an order, with what there is in all."""
        rows = self._rows()
        if window.at is not None:
            self.index.ensure(window.at.place)
            rows = self.index.rows()
        found = self._arranged(rows, filters, sort)
        order, searched, facts = found.order, 1.0, dict(found.facts)
        if filters.text:
            search = self._search(filters.text.lower())
            search.advance(rows, order, seconds=SEARCH_S)
            known = search.known(rows)[order]
            searched = float((known != UNKNOWN).mean()) if len(order) else 1.0
            order = order[known == YES]
            if searched >= 1:
                is_found = np.zeros(len(rows), np.bool_)
                is_found[order] = True
                facts["histograms"] = histograms(rows, {"text": is_found})
        offset, at = _placed(rows, order, window)
        return {
            "version": rows.version,
            "numRows": len(rows),
            "numFiles": rows.num_files,
            "progress": round(rows.progress, 4),
            "isCut": rows.is_cut,
            "numUnreadable": rows.num_unreadable,
            "numFound": len(order),
            "searched": searched,
            "offset": offset,
            "at": at,
            "rows": [self._row(rows, int(row)) for row in order[offset : offset + window.limit]],
            **facts,
        }

    def _rows(self) -> RolloutRows:
        """Return the rows; those of the newest files, where nothing was read before."""
        if not self.index.is_open:
            self.index.advance()
        return self.index.rows()

    def _arranged(self, rows: RolloutRows, filters: Filters, sort: str) -> _List:
        key = (rows.version, replace(filters, text=""), sort)
        with self._lock:
            found = self._lists.get(key)
        if found is None:
            passed = conditions(rows, filters)
            order = arrange(rows, all_of(rows, passed), sort).astype(np.int32)
            found = _List(order, {"histograms": histograms(rows, passed), **counts_of(rows)})
        with self._lock:
            self._lists[key] = found
            self._lists.move_to_end(key)
            while len(self._lists) > _NUM_LISTS:
                self._lists.popitem(last=False)
        return found

    def _search(self, text: str) -> TextSearch:
        with self._lock:
            search = self._searches.setdefault(text, TextSearch(self.index, text))
            self._searches.move_to_end(text)
            while len(self._searches) > _NUM_SEARCHES:
                self._searches.popitem(last=False)
        return search

    def _row(self, rows: RolloutRows, row: int) -> dict[str, Any]:
        kind, step = rows.place(row)
        columns = {name: column[row].item() for name, column in rows.columns.items()}
        words = rows.vocabulary
        has_versions = columns["oldest"] != NO_VERSION
        return {
            "name": name_row(rows, row),
            "kind": kind,
            "step": step,
            "group": columns["group"],
            "index": columns["index"],
            "outcome": words.outcomes.all()[columns["outcome"]],
            "ending": words.endings.all()[columns["ending"]],
            "flags": [name for name, bit in FLAGS.items() if columns["flags"] & bit],
            "reward": number(columns["reward"]),
            "advantage": number(columns["advantage"]),
            "gap": number(columns["gap"]),
            "tokens": columns["tokens"],
            "turns": columns["turns"],
            "versions": [columns["oldest"], columns["newest"]] if has_versions else None,
            "text": self._snippet(rows, row),
        }

    def _snippet(self, rows: RolloutRows, row: int) -> str:
        """Return how a completion begins, on one line."""
        for limit in _SNIPPET_BYTES:
            text = parse_start(self.index.read_lines(rows, row, row, limit=limit)).get("text")
            if isinstance(text, str):
                return " ".join(text[: 4 * _SNIPPET].split())[:_SNIPPET]
        return ""

    # ---- One sample

    def sample(self, name: SampleName, *, limit: int, metric: Metric) -> dict[str, Any] | None:
        """Return a sample with at most `limit` tokens, its group, and what it was learned from; None where it is not
        there."""
        rows, row = self._locate(name)
        fields = None if row is None else self.index.read_fields(rows, row)
        if row is None or fields is None:
            return None
        members = self._members(rows, name)
        rewards = [float(rows.columns["reward"][each]) for each in members]
        reward = float(rows.columns["reward"][row])
        return {
            **self._shown(name, fields, limit=limit, size=self._size(rows, name, metric)),
            "maskTruncated": self._learning()[1],
            "group": [self._member(rows, each) for each in members],
            "advantageFrom": self._advantage(rewards, reward) if name.place[0] == "step" else None,
        }

    def group(self, name: SampleName, *, metric: Metric) -> dict[str, Any] | None:
        """Return the members of a sample's group, each as `sample` does; None where it is not there."""
        rows, row = self._locate(name)
        if row is None:
            return None
        members, limits = self._members(rows, name), self._limits
        shown: list[dict[str, Any]] = []
        left = limits.max_bytes
        size = self._size(rows, name, metric)
        limit = max(64, limits.max_tokens // max(1, min(len(members), limits.max_members)))
        for each in members[: limits.max_members]:
            left -= int(rows.columns["length"][each])
            fields = self.index.read_fields(rows, int(each)) if left > 0 or not shown else None
            if fields is not None:
                own = replace(name, index=int(rows.columns["index"][each]))
                shown.append(self._shown(own, fields, limit=limit, size=size))
        return {"members": shown, "numMembers": len(members), "maskTruncated": self._learning()[1]}

    def _advantage(self, rewards: Sequence[float], reward: float) -> dict[str, Any] | None:
        return explain_advantage(rewards, reward, self._learning()[0]) if len(rewards) <= _MAX_COMPARED else None

    def _locate(self, name: SampleName) -> tuple[RolloutRows, int | None]:
        rows = self._rows()
        row = rows.find(name.place, name.group, name.index)
        if row is None:
            self.index.ensure(name.place)
            rows = self.index.rows()
            row = rows.find(name.place, name.group, name.index)
        return rows, row

    def _members(self, rows: RolloutRows, name: SampleName) -> Array:
        """Return the rows of a group, in the order of its members."""
        found = rows.of_file(name.place)
        found = found[rows.columns["group"][found] == name.group]
        members: Array = found[np.argsort(rows.columns["index"][found], kind="stable")]
        return members

    def _member(self, rows: RolloutRows, row: int) -> dict[str, Any]:
        columns = rows.columns
        return {
            "name": name_row(rows, row),
            "index": int(columns["index"][row]),
            "reward": number(float(columns["reward"][row])),
            "advantage": number(float(columns["advantage"][row])),
            "tokens": int(columns["tokens"][row]),
        }

    def _size(self, rows: RolloutRows, name: SampleName, metric: Metric) -> BatchSize | None:
        """Return what the loss of a sample's step was divided by; None where it was not trained on, or is not known."""
        kind, step = name.place
        if kind != "step":
            return None
        return batch_size(rows, step, self._learning()[0], metric("train/num_loss_tokens", step))

    def _shown(self, name: SampleName, fields: Fields, *, limit: int, size: BatchSize | None) -> dict[str, Any]:
        kind, step = name.place
        found = describe_episodes([fields], max_tokens=limit, max_characters=_MAX_CHARACTERS)
        return {
            "name": f"{kind}.{step}.{name.group}.{name.index}",
            "kind": kind,
            "item": {**found.items[0], "step": step},
            "prompts": found.prompts,
            "messages": found.messages,
            "notes": found.notes,
            "gradient": explain(fields, self._learning()[0], size, limit=limit),
        }

    def _learning(self) -> tuple[LearningRules, bool]:
        """Return what the run's configuration says about learning, and whether cut-off completions are left out."""
        seen = fingerprint(self._folder / CONFIG)
        if self._rules is None or self._rules[0] != seen:
            config = read_settings(self._folder)
            is_masking = setting_of(config, "rollout.mask_truncated") is True
            self._rules = seen, LearningRules.of(config), is_masking
        return self._rules[1], self._rules[2]


def _placed(rows: RolloutRows, order: Array, window: Window) -> tuple[int, int | None]:
    """Return from where a part of the list is shown, and the place of the sample that it is to have in it."""
    if window.at is None:
        return min(window.offset, max(0, len(order) - 1)) // window.limit * window.limit, None
    row = rows.find(window.at.place, window.at.group, window.at.index)
    places: Array = np.flatnonzero(order == (-1 if row is None else row))
    if not len(places):
        return window.offset // window.limit * window.limit, None
    return int(places[0]) // window.limit * window.limit, int(places[0])
