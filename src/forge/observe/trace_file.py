"""A trace as a file that Perfetto and chrome://tracing open, during the run and after any end of it.

The file is a JSON array of events (Chrome's Trace Event Format), one event to a line, and is only appended to. `close`
writes the closing bracket, which the format makes optional: a trace whose run was killed opens just as well.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from forge.observe.tracing import ORIGIN_NS, Process, Span

_log = logging.getLogger("forge.observe")
_ORIGIN = "origin_ns"
_END = b"\n]\n"


class TraceFile:
    """Appends spans to a trace, one row of the viewer for each process and lane.

    With `resume_step` the run continues: what is there already is kept, and what happens now follows on the same clock.
    The steps that a resumed run repeats are in the trace twice, as they happened. Without it, a file that is there is
    first moved to `<name>.discarded<suffix>`; so is one that cannot be read.

    When the trace cannot be written (a full disk), the run continues: a warning of the logger `forge.observe` says so
    once, `failure` has the error, and later spans are dropped. A path that cannot be opened at all raises at once.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self._origin_ns = ORIGIN_NS
        self._pids: dict[Process, int] = {}
        self._lanes: dict[tuple[int, str], int] = {}
        self.failure: OSError | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size = 0 if resume_step is None else self._read()
        if not size and self.path.exists():
            os.replace(self.path, self.path.with_name(f"{self.path.stem}.discarded{self.path.suffix}"))
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._file.truncate(size)
        if not size:
            args = {"by": "torchforge", _ORIGIN: self._origin_ns}
            self._file.write(b"[\n" + encode_event({"name": "trace", "ph": "M", "pid": 0, "tid": 0, "args": args}))

    def write(self, spans: Iterable[Span]) -> None:
        """Add spans. They are with the operating system when it returns."""
        if self._file.closed:
            raise ValueError("the trace is closed: spans can no longer be written to it")
        self._append(b"".join(b",\n" + encode_event(event) for span in spans for event in self._events(span)))

    def close(self) -> None:
        """Complete the array. May be called twice."""
        if not self._file.closed:
            self._append(_END)
            self._file.close()

    def _append(self, data: bytes) -> None:
        if self.failure is not None:
            return
        start = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(data) != len(data):
                raise OSError("a write was cut short: is the disk full?")
        except OSError as error:
            self.failure = error
            _log.warning("writing the trace %s failed; the run continues without it: %s", self.path, error)
            with contextlib.suppress(OSError):  # it leaves a cut event, which a resume repairs
                os.ftruncate(self._file.fileno(), start)

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
        """Return the process's own number; another where a process of another host or time has that one."""
        taken = set(self._pids.values())
        while pid in taken or pid == 0:
            pid += 1 << 22
        return pid

    def _read(self) -> int:
        """Take over processes, lanes and clock of an earlier part of the run. Return the bytes of its whole events."""
        try:
            events, size = read_events(self.path.read_bytes())
            self._origin_ns = int(events[0]["args"][_ORIGIN])
            for event in events:
                args = event.get("args", {})
                if event["name"] == "process_name" and event["ph"] == "M":
                    self._pids[Process(args["host"], args["pid"], args["name"])] = event["pid"]
                elif event["name"] == "thread_name" and event["ph"] == "M":
                    self._lanes[event["pid"], args["name"]] = event["tid"]
        except FileNotFoundError:
            return 0
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self._pids.clear()
            self._lanes.clear()
            _log.warning("%s is not a trace of ours; moved aside: %s: %s", self.path, type(error).__name__, error)
            return 0
        return size


def read_events(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the events of a trace, which may end in the middle of one, and the size of the whole ones."""
    events, size, end = [], 0, 0
    for line in data.splitlines(keepends=True):
        try:
            event = json.loads(line.strip(b"[,] \n") or "null")
        except ValueError:
            break  # a kill cut it off
        size += len(line)
        if event is not None:
            events.append(event)
            end = size - len(line) + len(line.rstrip(b"],\n "))
    return events, end


def encode_event(event: dict[str, Any]) -> bytes:
    """Return one event as strict JSON on one line. Arguments that are not finite become texts."""
    args = {name: _finite(value) for name, value in event.get("args", {}).items()}
    return json.dumps({**event, "args": args}, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "backslashreplace"
    )


def _finite(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
