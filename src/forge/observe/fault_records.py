"""`record_fault`: what went wrong in a run that continues, from any process, with its traceback.

Each process keeps what it has recorded, the first `MAX_KEPT`, until the run collects it (`forge.runtime.collect`). The
controller writes it into `faults.jsonl` in the run's folder.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import threading
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from forge.observe.clock import wall_s
from forge.observe.tracing import this_process

FILE_NAME: Final = "faults.jsonl"
MAX_KEPT: Final = 64
"""Faults of one process that are kept until they are collected. More are counted."""
MAX_LINES: Final = 2_000
"""Lines that one start of a run writes. Of more only the number is known."""
_MAX_TRACEBACK: Final = 12_000
_MAX_MESSAGE: Final = 2_000
_NUM_TRACEBACKS: Final = 3
"""So often a fault of the same kind and text is written with its traceback."""
_MAX_BYTES: Final = 8 << 20
"""So much one start of a run writes with tracebacks, and then without."""
_log = logging.getLogger("forge.observe")


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """One fault.

    Attributes:
        time: seconds since 1970.
        kind: a word or two by which faults are counted, such as `replica` or `episode`.
        message: what happened.
        where: what it happened to, such as `generator[1]` or `episode 3 of group 17`.
        process: the process that noticed it.
        traceback: as text; of a remote exception with the remote traceback. Empty where there is none.
        num_like: how many faults of this kind and process were not kept, because there were too many.
    """

    time: float
    kind: str
    message: str
    where: str = ""
    process: str = ""
    traceback: str = ""
    num_like: int = 0


class _Kept:
    """The faults of this process that were not collected yet."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._faults: list[FaultRecord] = []
        self._more: Counter[str] = Counter()

    def add(self, fault: FaultRecord) -> None:
        with self._lock:
            if len(self._faults) < MAX_KEPT:
                self._faults.append(fault)
            else:
                self._more[fault.kind] += 1

    def drain(self) -> list[FaultRecord]:
        with self._lock:
            faults, self._faults = self._faults, []
            more, self._more = self._more, Counter()
        now, process = wall_s(), this_process().name
        return faults + [
            FaultRecord(now, kind, f"{count} more of this kind", process=process, num_like=count)
            for kind, count in more.items()
        ]


_kept = _Kept()


def record_fault(kind: str, failure: BaseException | str, *, where: str = "", trace: str = "") -> None:
    """Note what went wrong, in any process and any thread. `trace` is the traceback where `failure` has none."""
    text = failure if isinstance(failure, str) else _message_of(failure)
    if isinstance(failure, BaseException):
        trace = trace or "".join(traceback.format_exception(failure))
    trace = _cut(trace, _MAX_TRACEBACK)
    _kept.add(FaultRecord(wall_s(), kind, _cut(text, _MAX_MESSAGE), where, this_process().name, trace))


def _message_of(failure: BaseException) -> str:
    text = getattr(failure, "message", None) or str(failure)
    return f"{type(failure).__name__}: {text}" if text else type(failure).__name__


def _cut(text: str, limit: int) -> str:
    """Return a text with its middle left out where it is long: how a traceback begins and ends says most."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 3]}\n… {len(text) - limit} characters …\n{text[-(limit - limit // 3) :]}"


def drain_faults() -> list[FaultRecord]:
    """Return what this process has recorded since the last call."""
    return _kept.drain()


def _begin_anew() -> None:
    """Start without faults in a forked child; its parent reports those from before."""
    global _kept
    _kept = _Kept()


os.register_at_fork(after_in_child=_begin_anew)


class FaultFile:
    """Appends faults to a file, each a line of JSON, through to the operating system. It has at most `MAX_LINES` more
    lines when it is closed; what cannot be written is logged once, and does not end the run. A run that is not resumed
    moves the file of an earlier one aside."""

    def __init__(self, path: Path, *, is_resumed: bool, max_bytes: int = _MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._num_lines = self._num_left_out = self._num_bytes = 0
        self._seen: Counter[tuple[str, str]] = Counter()
        self._has_failed = False
        if not is_resumed and path.exists():  # of another run
            try:
                os.replace(path, path.with_name(f"{path.stem}.discarded{path.suffix}"))
            except OSError as error:
                self._give_up(error)

    def write(self, step: int, faults: Iterable[FaultRecord]) -> None:
        """Add faults that were noticed after so many steps."""
        lines = []
        for fault in faults:
            if self._num_lines >= MAX_LINES:
                self._num_left_out += max(1, fault.num_like)
                continue
            self._num_lines += 1
            lines.append(self._line(step, fault))
        self._append(lines)

    def close(self, step: int) -> None:
        """Say how many faults were left out."""
        if self._num_left_out:
            text = f"{self._num_left_out} more faults are not in this file"
            self._append([self._line(step, FaultRecord(wall_s(), "more", text, num_like=self._num_left_out))])
            self._num_left_out = 0

    def _line(self, step: int, fault: FaultRecord) -> str:
        like = (fault.kind, fault.message[:200])
        self._seen[like] += 1
        if self._seen[like] > _NUM_TRACEBACKS or self._num_bytes > self._max_bytes:
            fault = replace(fault, traceback="")
        time = datetime.datetime.fromtimestamp(fault.time, datetime.UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {"time": time, "step": step, "kind": fault.kind, "where": fault.where}
        fields |= {"process": fault.process, "message": fault.message}
        fields |= {"traceback": fault.traceback} if fault.traceback else {}
        fields |= {"num_like": fault.num_like} if fault.num_like else {}
        line = json.dumps(fields, ensure_ascii=True)
        self._num_bytes += len(line)
        return line

    def _append(self, lines: list[str]) -> None:
        if not lines or self._has_failed:
            return
        try:
            with self._path.open("ab", buffering=0) as file:
                left = memoryview("".join(f"{line}\n" for line in lines).encode())
                while left:  # a write may take a part, on a full disk
                    left = left[file.write(left) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._has_failed = True
        _log.warning("writing %s failed; the run continues without it: %s", self._path, error)
