"""Spans of a trace as arrays: what a block of its lines says, without the arguments.

A trace of `forge.observe.TraceFile` has one event to a line with its keys in a known order. Lines that are not like
that are counted and left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAX_LANES: Final = 4_096
MAX_NAMES: Final = 2_048
_MAX_US: Final = 1e15
_MAX_TEXT: Final = 200
_SPAN: Final = re.compile(
    rb'^[\[,]?[ \t]*\{"name":"((?:[^"\\\n]|\\.)*)","ph":"X","ts":([0-9.eE+-]{1,32}),"dur":([0-9.eE+-]{1,32}),'
    rb'"pid":([0-9]{1,18}),"tid":([0-9]{1,18})[,}]',
    re.MULTILINE,
)
_META: Final = re.compile(rb'^[\[,]?[ \t]*(\{"name":"(?:process_name|thread_name|trace)","ph":"M",.*\})', re.MULTILINE)
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans, one for each row of the arrays.

    Attributes:
        start, length: microseconds since the trace began.
        lane, name: numbers of `TraceNames`.
        offset: where the line is in the file.
    """

    start: Floats
    length: Floats
    lane: Ints
    name: Ints
    offset: Ints

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> Floats:
        """When each span ended."""
        return self.start + self.length

    def where(self, rows: Any) -> Spans:
        """Return some of them: by a mask, or by row numbers."""
        return Spans(self.start[rows], self.length[rows], self.lane[rows], self.name[rows], self.offset[rows])

    @classmethod
    def joined(cls, parts: Iterable[Spans]) -> Spans:
        """Return the spans of several blocks."""
        found = [part for part in parts if len(part)] or [NO_SPANS]
        return cls(*(np.concatenate([getattr(part, name) for part in found]) for name in cls.__slots__))

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return 40 * len(self)


NO_SPANS: Final = Spans(np.zeros(0), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(slots=True)
class Lane:
    """A row of the timeline: a task or a thread of a process."""

    pid: int
    tid: int
    process: str = ""
    host: str = ""
    name: str = ""


@dataclass(slots=True)
class TraceNames:
    """The lanes and the names of spans of one trace, by number. What comes after too many of them is put together.

    Attributes:
        origin_s: when the trace began, in seconds since 1970; None where it does not say.
    """

    origin_s: float | None = None
    lanes: list[Lane] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    _lanes: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    _names: dict[bytes, int] = field(default_factory=dict)
    _processes: dict[int, tuple[str, str]] = field(default_factory=dict)
    _threads: dict[tuple[int, int], str] = field(default_factory=dict)

    def read(self, data: bytes, *, offset: int) -> Spans:
        """Return the spans of whole lines, and note what these say of lanes. `offset` is where the lines begin."""
        for found in _META.finditer(data):
            self._note(found[1])
        starts, lengths, lanes, names, offsets = [], [], [], [], []
        for found in _SPAN.finditer(data):
            name, start, length, pid, tid = found.groups()
            starts.append(start)
            lengths.append(length)
            lane = self._lanes.get((pid, tid))
            lanes.append(self._new_lane(pid, tid) if lane is None else lane)
            number = self._names.get(name)
            names.append(self._new_name(name) if number is None else number)
            offsets.append(found.start())
        if not starts:
            return NO_SPANS
        whole = [np.array(each, np.int64) for each in (lanes, names, offsets)]
        spans = Spans(_numbers(starts), _numbers(lengths), whole[0], whole[1], whole[2] + offset)
        is_valid = (spans.lane >= 0) & (spans.start >= 0) & (spans.length >= 0) & (spans.end < _MAX_US)
        return spans if is_valid.all() else spans.where(is_valid)

    def _note(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            args, pid = event["args"], int(event["pid"])
            if event["name"] == "trace":
                self.origin_s = int(args["origin_ns"]) / 1e9
            elif event["name"] == "process_name":
                self._processes[pid] = (str(args["name"])[:_MAX_TEXT], str(args.get("host", ""))[:_MAX_TEXT])
            else:
                self._threads[pid, int(event["tid"])] = str(args["name"])[:_MAX_TEXT]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
            return
        if max(len(self._processes), len(self._threads)) > 4 * MAX_LANES:
            self._processes.clear()
            self._threads.clear()

    def _new_lane(self, raw_pid: bytes, raw_tid: bytes) -> int:
        """Return the number of a lane that comes up for the first time; -1 where there are too many."""
        if len(self.lanes) >= MAX_LANES:
            return -1
        pid, tid = int(raw_pid), int(raw_tid)
        process, host = self._processes.get(pid, (f"process {pid}", ""))
        self.lanes.append(Lane(pid, tid, process, host, self._threads.get((pid, tid), f"row {tid}")))
        self._lanes[raw_pid, raw_tid] = len(self.lanes) - 1
        return len(self.lanes) - 1

    def _new_name(self, raw: bytes) -> int:
        """Return the number of a name that comes up for the first time; the last one where there are too many."""
        if len(self.names) >= MAX_NAMES:
            return MAX_NAMES - 1
        try:
            text = str(json.loads(b'"' + raw + b'"'))
        except ValueError:
            text = raw.decode("utf-8", "replace")
        self.names.append(text[:_MAX_TEXT] if len(self.names) < MAX_NAMES - 1 else "others")
        self._names[raw] = len(self.names) - 1
        return len(self.names) - 1


def _numbers(texts: Sequence[bytes]) -> Floats:
    """Return numbers of texts; NaN for what is not one."""
    try:
        return np.array(texts).astype(np.float64)
    except ValueError:
        return np.array([_number(text) for text in texts])


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def depths(spans: Spans) -> Ints:
    """Return in how many others of its lane each span is. Spans of one lane follow or contain each other."""
    found = np.zeros(len(spans), np.int64)
    if not len(spans):
        return found
    order = np.lexsort((-spans.length, spans.start, spans.lane))
    lanes = spans.lane[order]
    edges = np.flatnonzero(np.r_[True, lanes[1:] != lanes[:-1]])
    for first, last in zip(edges, np.r_[edges[1:], len(order)], strict=True):
        rows = order[first:last]
        begun = np.arange(len(rows))
        ended = np.searchsorted(np.sort(spans.end[rows]), spans.start[rows], "right")
        found[rows] = np.clip(begun - ended, 0, MAX_DEPTH - 1)
    return found


MAX_DEPTH: Final = 12
