"""What the timeline shows of a part of a trace: the spans that are wide enough to be seen, and the rest together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from forge.ui.metric_table import TableRows
from forge.ui.trace_index import TraceIndex
from forge.ui.trace_spans import MAX_LANES, Ints, Spans, TraceNames, depths

MAX_SPANS: Final = 20_000
MAX_MARKS: Final = 30_000
MAX_STEPS: Final = 400
_MAX_TOTALS: Final = 1_000
_FARTHEST_US: Final = 1e18


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a trace, in seconds since it began, and in how many points it is drawn."""

    start_s: float
    end_s: float
    points: int = 1_000


def describe_trace(index: TraceIndex) -> dict[str, Any]:
    """Return what does not depend on the part that is looked at."""
    names = index.names
    return {
        "generation": index.generation,
        "progress": round(index.progress, 4),
        "origin": names.origin_s,
        "first": index.start_us / 1e6,
        "end": index.end_us / 1e6,
        "numSpans": index.num_spans,
        "isCut": len(names.lanes) >= MAX_LANES,
        "lanes": [[lane.pid, lane.tid, lane.process, lane.host, lane.name] for lane in list(names.lanes)],
        "names": list(names.names),
    }


def view_window(index: TraceIndex, window: Window, steps: TableRows | None) -> dict[str, Any]:
    """Return the spans of a part of a trace; `isCoarse` says that they come from the overview."""
    start, end = window.start_s * 1e6, min(window.end_s * 1e6, _FARTHEST_US)
    found = index.spans_between(start, end)
    shown = _coarse(index, start, end, points=window.points) if found is None else _exact(found, window)
    return {
        **describe_trace(index),
        "start": window.start_s,
        "finish": window.end_s,
        "steps": [] if steps is None else _steps(steps, index.names, window),
        **shown,
    }


def _coarse(index: TraceIndex, start: float, end: float, *, points: int) -> dict[str, Any]:
    points = min(points, max(64, MAX_MARKS // max(1, len(index.names.lanes))))
    busy = index.overview.between(start, end, points=points)
    marks = {
        "lane": busy.lane.tolist(),
        "depth": [0] * len(busy.lane),
        "name": busy.name.tolist(),
        "start": _rounded(busy.start),
        "share": _rounded(busy.share),
        "count": None,
        "length": busy.length / 1e6,
    }
    totals = [(lane, name, total, None, None) for lane, name, total in index.overview.totals(start, end)]
    return {"isCoarse": True, "spans": _plain(None), "marks": marks, "totals": _totals(totals)}


def _exact(found: Spans, window: Window) -> dict[str, Any]:
    start, end = window.start_s * 1e6, window.end_s * 1e6
    deep = depths(found)
    inside = (found.start <= end) & (found.end >= start)
    spans, deep = found.where(inside), deep[inside]
    pixel = max((end - start) / window.points, 1e-3)
    is_wide = spans.length >= pixel
    if len(spans) <= MAX_SPANS // 4:
        is_wide[:] = True
    elif is_wide.sum() > MAX_SPANS:
        is_wide &= spans.length >= np.partition(spans.length, -MAX_SPANS)[-MAX_SPANS]
    narrow = spans.where(~is_wide)
    marks = _marks(narrow, deep[~is_wide], start=start, pixel=pixel)
    plain = _plain(spans.where(is_wide), deep[is_wide])
    return {"isCoarse": False, "spans": plain, "marks": marks, "totals": _sums(spans)}


def _plain(spans: Spans | None, deep: Ints | None = None) -> dict[str, Any]:
    if spans is None or deep is None:
        return {name: [] for name in ("lane", "depth", "name", "start", "length", "offset")}
    return {
        "lane": spans.lane.tolist(),
        "depth": deep.tolist(),
        "name": spans.name.tolist(),
        "start": _rounded(spans.start),
        "length": _rounded(spans.length),
        "offset": spans.offset.tolist(),
    }


def _rounded(values: Any) -> list[float]:
    found: list[float] = np.round(values, 3).tolist()
    return found


def _marks(spans: Spans, deep: Ints, *, start: float, pixel: float) -> dict[str, Any]:
    """Put spans together that are too narrow to be seen: one mark for each place of a lane that has any."""
    while True:
        places = np.floor((np.maximum(spans.start, start) - start) / pixel).astype(np.int64)
        keys, rows = np.unique(np.stack([spans.lane, deep, places], axis=1), axis=0, return_inverse=True)
        if len(keys) <= MAX_MARKS:
            break
        pixel *= 2
    rows = rows.reshape(-1)
    count = np.bincount(rows, minlength=len(keys))
    busy = np.bincount(rows, weights=spans.length, minlength=len(keys))
    name = np.zeros(len(keys), np.int64)
    order = np.argsort(spans.length, kind="stable")
    name[rows[order]] = spans.name[order]  # of the longest
    return {
        "lane": keys[:, 0].tolist(),
        "depth": keys[:, 1].tolist(),
        "name": name.tolist(),
        "start": _rounded(start + keys[:, 2] * pixel),
        "share": _rounded(np.minimum(1.0, busy / pixel)),
        "count": count.tolist(),
        "length": pixel / 1e6,
    }


# ---- Beside the spans


def _sums(spans: Spans) -> list[list[Any]]:
    """Return lane, name, seconds, number and longest of the spans, by lane and name."""
    if not len(spans):
        return []
    keys, rows = np.unique(np.stack([spans.lane, spans.name], axis=1), axis=0, return_inverse=True)
    rows = rows.reshape(-1)
    total = np.bincount(rows, weights=spans.length, minlength=len(keys))
    count = np.bincount(rows, minlength=len(keys))
    longest = np.zeros(len(keys))
    np.maximum.at(longest, rows, spans.length)
    order = np.argsort(-total)[:_MAX_TOTALS]
    return [
        [
            int(keys[row, 0]),
            int(keys[row, 1]),
            round(total[row] / 1e6, 6),
            int(count[row]),
            round(longest[row] / 1e6, 6),
        ]
        for row in order.tolist()
    ]


def _totals(rows: Sequence[tuple[int, int, float, None, None]]) -> list[list[Any]]:
    ordered = sorted(rows, key=lambda row: -row[2])[:_MAX_TOTALS]
    return [[lane, name, round(total / 1e6, 6), count, longest] for lane, name, total, count, longest in ordered]


def _steps(rows: TableRows, names: TraceNames, window: Window) -> list[list[float]]:
    """Return the steps that ended in a part of the trace: number, and seconds since the trace began."""
    if names.origin_s is None or not len(rows):
        return []
    times = rows.times - names.origin_s
    inside = np.flatnonzero((times >= window.start_s) & (times <= window.end_s))
    before = inside[0] - 1 if len(inside) and inside[0] > 0 else None
    stride = max(1, -(-len(inside) // MAX_STEPS))
    chosen = [*([] if before is None else [before]), *inside[::stride].tolist()]
    return [[int(rows.steps[row]), round(float(times[row]), 6)] for row in chosen]


def read_arguments(index: TraceIndex, offset: int) -> dict[str, Any] | None:
    """Return the name and the arguments of the span whose line begins at an offset; None where there is none."""
    line = index.line_at(offset)
    try:
        event = json.loads((line or b"").strip(b"[,] \t\r"))
        if event["ph"] != "X":
            return None
        args = event.get("args", {})
        return {"name": str(event["name"]), "args": args if isinstance(args, dict) else {}}
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def header_events(index: TraceIndex) -> bytes:
    """Return the start of a trace file with the lanes of this one, to which lines of spans can be added."""
    names = index.names
    origin = 0 if names.origin_s is None else int(names.origin_s * 1e9)
    events: list[dict[str, Any]] = [_event("trace", 0, 0, {"by": "torchforge", "origin_ns": origin})]
    seen: set[int] = set()
    for lane in list(names.lanes):
        if lane.pid not in seen:
            seen.add(lane.pid)
            events.append(_event("process_name", lane.pid, 0, {"name": lane.process, "host": lane.host}))
            events.append(_event("process_sort_index", lane.pid, 0, {"sort_index": len(seen)}))
        events.append(_event("thread_name", lane.pid, lane.tid, {"name": lane.name}))
    return b"[\n" + b",\n".join(json.dumps(event, separators=(",", ":")).encode() for event in events)


def _event(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}
