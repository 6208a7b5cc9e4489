"""A trace as a file that Perfetto and chrome://tracing open, at any moment of the run and after any end of it.

The file is a JSON array of events (Chrome's Trace Event Format). Between the last event and the closing bracket there
is room, filled with spaces; new events are written into it. Each write lies inside one page of memory, which a process
cannot be killed in the middle of, so that the file is whole JSON at every moment. When the room is used up, a copy with
more takes the file's place at one stroke. `close` removes the room.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from forge.observe.tracing import ORIGIN_NS, Process, Span

_log = logging.getLogger("forge.observe")
_PAGE = 4096
_LEAST_ROOM = 1 << 18
_MOST_ROOM = 1 << 24
_ORIGIN = "origin_ns"
_MAX_EVENT = 2048


class TraceFile:
    """Appends spans to a trace, one row of the viewer for each process and lane.

    With `resume_step` the run goes on: what is there already is kept, and what happens now follows on the same clock.
    The steps that a resumed run repeats are in the trace twice, as they happened. Without it, a file that is there is
    first moved to `<name>.discarded<suffix>`; so is one that cannot be read.

    A trace is not worth a run: when it cannot be written (a full disk), a warning of the logger `forge.observe` says so
    once, `failure` has the error, and later spans are dropped. A path that cannot be opened at all raises at once.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self._origin_ns = ORIGIN_NS
        self._pids: dict[Process, int] = {}
        self._lanes: dict[tuple[int, str], int] = {}
        self._file: int | None = None
        self._closed = False
        self.failure: OSError | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        events = [] if resume_step is None else self._read()
        if not events and self.path.exists():
            os.replace(self.path, self.path.with_name(f"{self.path.stem}.discarded{self.path.suffix}"))
        head = {"name": "trace", "ph": "M", "pid": 0, "tid": 0, "args": {"by": "torchforge", _ORIGIN: self._origin_ns}}
        self._end = self._rewrite([encode_event(event) for event in events or [head]])

    def write(self, spans: Iterable[Span]) -> None:
        """Add spans. They are with the operating system when it returns."""
        if self._closed:
            raise ValueError("the trace is closed: spans can no longer be written to it")
        if self.failure is not None:
            return
        events = [encode_event(event) for span in spans for event in self._events(span)]
        try:
            self._append(events)
        except OSError as error:
            self.failure = error
            _log.warning("writing the trace %s failed; the run continues without it: %s", self.path, error)

    def close(self) -> None:
        """Remove the room at the end. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.failure is None:
                self._copy(room=0)
        except OSError as error:
            self.failure = error
            _log.warning("the room at the end of the trace %s could not be removed: %s", self.path, error)
        finally:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- events

    def _events(self, span: Span) -> Iterator[dict[str, Any]]:
        pid = self._pids.get(span.process)
        if pid is None:
            pid = self._pids[span.process] = self._free_pid(span.process.pid)
            named = {"name": span.process.name, "host": span.process.host, "pid": span.process.pid}
            yield {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": named}
            order = {"sort_index": len(self._pids)}
            yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": order}
        tid = self._lanes.get((pid, span.lane))
        if tid is None:
            tid = self._lanes[pid, span.lane] = 1 + sum(known == pid for known, _ in self._lanes)
            yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": span.lane}}
        yield {
            "name": span.name,
            "ph": "X",
            "ts": max(0, span.start_ns - self._origin_ns) / 1000,
            "dur": max(0, span.end_ns - span.start_ns) / 1000,
            "pid": pid,
            "tid": tid,
            **({} if span.args is None else {"args": span.args}),
        }

    def _free_pid(self, pid: int) -> int:
        """The process's own number; another where a process of another host or time has that one."""
        taken = set(self._pids.values())
        while pid in taken or pid == 0:
            pid += 1 << 22
        return pid

    def _read(self) -> list[dict[str, Any]]:
        """The events of an earlier part of the run, and what they say about processes, lanes and the clock."""
        try:
            events = json.loads(self.path.read_bytes())
            self._origin_ns = int(events[0]["args"][_ORIGIN])
            for event in events:
                args = event.get("args", {})
                if event["name"] == "process_name" and event["ph"] == "M":
                    self._pids[Process(args["host"], args["pid"], args["name"])] = event["pid"]
                elif event["name"] == "thread_name" and event["ph"] == "M":
                    self._lanes[event["pid"], args["name"]] = event["tid"]
        except FileNotFoundError:
            return []
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self._pids.clear()
            self._lanes.clear()
            _log.warning("%s is not a trace of ours; moved aside: %s: %s", self.path, type(error).__name__, error)
            return []
        found: list[dict[str, Any]] = events
        return found

    # ---- the file

    def _rewrite(self, events: Sequence[bytes]) -> int:
        body = b"[" + b",\n".join(events)
        self._replace_by(body, room=_LEAST_ROOM)
        return len(body)

    def _append(self, events: list[bytes]) -> None:
        at = 0
        while at < len(events):
            num_written = self._fill(events[at : at + _PAGE // 16])
            at += num_written
            if num_written == 0:
                self._grow()

    def _fill(self, events: Sequence[bytes]) -> int:
        """Write as many events as fit into the rest of this page, or else of the next; returns how many did."""
        assert self._file is not None
        for start in (self._end, -(-self._end // _PAGE) * _PAGE):
            limit = min((start // _PAGE + 1) * _PAGE, self._capacity)
            num, size = 0, 0
            while num < len(events) and start + size + len(events[num]) + 2 <= limit:
                size += len(events[num]) + 2
                num += 1
            if num:
                _write_at(self._file, b"".join(b",\n" + event for event in events[:num]), start)
                self._end = start + size
                return num
        return 0

    def _grow(self) -> None:
        self._copy(room=min(max(_LEAST_ROOM, self._end), _MOST_ROOM))

    def _copy(self, *, room: int) -> None:
        assert self._file is not None
        self._replace_by(os.pread(self._file, self._end, 0), room=room)

    def _replace_by(self, body: bytes, *, room: int) -> None:
        part = self.path.with_name(f"{self.path.name}.part")
        try:
            part.write_bytes(body + b" " * room + b"\n]\n")
            file = os.open(part, os.O_RDWR)
            os.replace(part, self.path)
        finally:
            part.unlink(missing_ok=True)
        self._let_go()
        self._file = file
        self._capacity = len(body) + room

    def _let_go(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _write_at(file: int, data: bytes, place: int) -> None:
    written = os.pwrite(file, data, place)
    if written != len(data):
        os.pwrite(file, b" " * written, place)
        raise OSError(f"only {written} of {len(data)} bytes of a trace could be written: is the disk full?")


def encode_event(event: dict[str, Any]) -> bytes:
    """One event as strict JSON of less than half a page. Arguments that are not finite become texts."""
    event = {**event, "args": {name: _finite(value) for name, value in event.get("args", {}).items()}}
    data = _dump(event)
    if len(data) <= _MAX_EVENT:
        return data
    cut = {str(name)[:30]: value[:30] if isinstance(value, str) else value for name, value in event["args"].items()}
    return _dump({**event, "name": event["name"][:100], "args": cut})


def _dump(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")


def _finite(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
