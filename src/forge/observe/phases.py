"""`phase`: what a process does that takes long and happens once, such as loading weights.

A phase is a span of the trace as well, and is reported to the root of the run, which shows it while the run starts
(`forge.observe.startup`). Without anything that listens it costs next to nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple

from forge.observe.tracing import span

PHASES_VARIABLE: Final = "FORGE_PHASES"
"""`1` in a process whose phases are shown at the root of its run."""
REPORT_EVERY_S: Final = 0.2
"""How often progress is reported at most."""

State = Literal["begun", "progress", "done", "failed"]


class PhaseEvent(NamedTuple):
    """What happens to one phase of one process.

    Attributes:
        process: the name of the process, as that of its log file.
        number: tells the phases of a process apart.
        name: what is done, such as `loading weights`.
        seconds: since the phase began.
        done, total: how far it is, in `unit`; a total of 0 where that is not known.
    """

    process: str
    number: int
    name: str
    state: State
    seconds: float
    done: float = 0.0
    total: float = 0.0
    unit: str = ""


Listener = Callable[[PhaseEvent], None]
_listener: Listener | None = None
_owner = 0
_numbers = itertools.count(1)


def set_listener(listener: Listener | None) -> None:
    """Pass the phases of this process, and of those that it started, on from now on; None to drop them."""
    global _listener, _owner
    _listener, _owner = listener, os.getpid()


def has_listener() -> bool:
    """Whether anything takes the phases of this process. A forked child starts without."""
    return _listener is not None and _owner == os.getpid()


def take_phase(event: PhaseEvent) -> None:
    """Pass on what another process, or this one, reports. Any thread may call it."""
    listener = _listener
    if listener is not None and _owner == os.getpid():
        listener(event)


class Progress:
    """How far a phase is. Any thread may report; most reports are not sent."""

    __slots__ = ("_began", "_done", "_lock", "_name", "_number", "_process", "_reported_at", "_total", "_unit")

    def __init__(self, process: str, name: str, *, total: float, unit: str) -> None:
        self._process, self._name, self._total, self._unit = process, name, float(total), unit
        self._number, self._done = next(_numbers), 0.0
        self._began = self._reported_at = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, amount: float = 1.0) -> None:
        """Note that this much more is done."""
        with self._lock:
            self._done += amount
        self._report_soon()

    def reach(self, done: float) -> None:
        """Note how much is done."""
        with self._lock:
            self._done = done
        self._report_soon()

    def _report_soon(self) -> None:
        now = time.monotonic()
        if now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            self.report("progress")

    def set_total(self, total: float, unit: str = "") -> None:
        """Note how much there is to do."""
        self._total, self._unit = float(total), unit or self._unit

    def report(self, state: State) -> None:
        """Report what has become of the phase."""
        seconds = time.monotonic() - self._began
        take_phase(
            PhaseEvent(self._process, self._number, self._name, state, seconds, self._done, self._total, self._unit)
        )


class _NoProgress(Progress):
    """What `phase` gives while nothing listens."""

    __slots__ = ()

    def __init__(self) -> None: ...

    def reach(self, done: float) -> None: ...

    def advance(self, amount: float = 1.0) -> None: ...

    def set_total(self, total: float, unit: str = "") -> None: ...


_NONE: Final = _NoProgress()


@contextlib.contextmanager
def phase(name: str, *, total: float = 0, unit: str = "", process: str | None = None) -> Iterator[Progress]:
    """Report what the block does, and how far it is, as a phase of this process.

    `process` is another process that this one does it for, such as one that it starts.

    Example:
        >>> with phase("loading weights", total=num_bytes, unit="B") as progress:
        ...     for piece in pieces:
        ...         load(piece)
        ...         progress.advance(piece.nbytes)
    """
    if not has_listener():
        with span(name):
            yield _NONE
        return
    from forge.observe.logs.setup import process_name

    progress = Progress(process or process_name(), name, total=total, unit=unit)
    progress.report("begun")
    try:
        with span(name):
            yield progress
    except BaseException:
        progress.report("failed")
        raise
    progress.report("done")
