"""The start of a run: which process did what, and for how long, until the first step was taken.

    startup.json   {"seconds": 12.3, "phases": [{"process": "trainer-0", "phase": "loading weights", …}], …}

The file is there while the run starts, and after a start that failed or was killed: it is replaced whenever a phase
has ended, but not more often than twice a second.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from forge.observe.clock import wall_s
from forge.observe.lines import format_seconds
from forge.observe.phases import PhaseEvent

_log = logging.getLogger("forge.startup")
FILE_NAME: Final = "startup.json"
CONTROLLER: Final = "controller"
_WRITE_EVERY_S: Final = 0.5
_MAX_PHASES: Final = 4096
_NUM_LONGEST: Final = 3
_LATENESS_S: Final = 0.1
"""How much later than it happens another process's phase is heard of."""


@dataclass(slots=True)
class StartPhase:
    """One phase of one process. `seconds` is what it took, or has taken so far."""

    process: str
    name: str
    start_s: float
    seconds: float = 0.0
    done: float = 0.0
    total: float = 0.0
    unit: str = ""
    state: Literal["running", "done", "failed"] = "running"

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds

    @property
    def part(self) -> float | None:
        """How far it is, from 0 to 1; None where that is not known."""
        return min(1.0, self.done / self.total) if self.total > 0 else None


class StartUp:
    """The phases of all processes of a run. Any thread may use it.

    Args:
        on_change: called with each phase that has begun, moved or ended.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        *,
        on_change: Callable[[StartPhase], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path: Path | None = None
        self._on_change, self._clock = on_change, clock
        self._began_s, self._began = clock(), wall_s()
        self._phases: list[StartPhase] = []
        self._open: dict[tuple[str, int], StartPhase] = {}
        self._written_s = float("-inf")
        self._lock = threading.RLock()
        self.seconds: float | None = None
        """How long it took, once it is over."""

    def write_to(self, folder: Path) -> None:
        """Write `startup.json` into a folder from now on."""
        self._path = folder / FILE_NAME

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began_s

    @property
    def phases(self) -> tuple[StartPhase, ...]:
        """All phases so far, in the order in which they began."""
        with self._lock:
            return tuple(self._phases)

    def take(self, event: PhaseEvent) -> None:
        """Note what happens to a phase. After the end of the start, phases are logged and not kept."""
        with self._lock:
            phase = self._update(event)
            if self.seconds is None and event.state in ("done", "failed"):
                self._write("running", is_due=self._clock() - self._written_s >= _WRITE_EVERY_S)
        if event.state in ("done", "failed"):
            how = "took" if event.state == "done" else "failed after"
            _log.info("%s: %s %s %s", event.process, event.name, how, format_seconds(event.seconds))
        if self._on_change is not None:
            self._on_change(phase)

    def _update(self, event: PhaseEvent) -> StartPhase:
        key = event.process, event.number
        phase = self._open.get(key)
        if phase is None:
            phase = StartPhase(event.process, event.name, self.elapsed_s - event.seconds)
            if self.seconds is None and len(self._phases) < _MAX_PHASES:
                self._phases.append(phase)
            self._open[key] = phase
        phase.seconds, phase.done = event.seconds, event.done
        phase.total, phase.unit = event.total, event.unit
        if event.state in ("done", "failed"):
            phase.state = "done" if event.state == "done" else "failed"
            del self._open[key]
        return phase

    def lose(self, process: str) -> None:
        """Note that a process has ended: what it was doing has failed."""
        with self._lock:
            for key in [key for key in self._open if key[0] == process]:
                phase = self._open.pop(key)
                phase.state, phase.seconds = "failed", self.elapsed_s - phase.start_s

    def running(self) -> list[StartPhase]:
        """Return what each process is doing now, the innermost of its phases; `seconds` is up to now."""
        with self._lock:
            innermost = {phase.process: phase for phase in self._open.values()}
            now = self.elapsed_s
            for phase in innermost.values():
                phase.seconds = max(phase.seconds, now - phase.start_s)
            return list(innermost.values())

    def finish(self) -> str:
        """Note that the run has started; return a line that says how long it took, and what took longest."""
        with self._lock:
            self.seconds = self.elapsed_s
            self._write("done")
            return summary(self.seconds, self._phases)

    def fail(self) -> None:
        """Note that the run has ended before it had started. Does nothing after `finish`."""
        with self._lock:
            if self.seconds is None:
                self.seconds = self.elapsed_s
                self._write("failed")

    def _write(self, state: str, *, is_due: bool = True) -> None:
        if self._path is None or not is_due:
            return
        self._written_s = self._clock()
        own = own_seconds(self._phases)
        fields = [_plain(phase, seconds) for phase, seconds in zip(self._phases, own, strict=True)]
        whole = {"started": self._began, "seconds": round(self.elapsed_s, 3), "state": state, "phases": fields}
        draft = self._path.with_name(f".{FILE_NAME}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
            os.replace(draft, self._path)
        except OSError as error:  # nothing depends on it
            _log.warning("%s could not be written: %s", self._path, error)
            self._path = None


def _plain(phase: StartPhase, own_s: float) -> dict[str, Any]:
    fields: dict[str, Any] = {"process": phase.process, "phase": phase.name}
    fields |= {"start_s": round(phase.start_s, 3), "seconds": round(phase.seconds, 3), "own_s": round(own_s, 3)}
    if phase.total:
        fields |= {"done": phase.done, "total": phase.total, "unit": phase.unit}
    return {**fields, "state": phase.state}


def own_seconds(phases: Sequence[StartPhase]) -> list[float]:
    """Return the seconds of each phase in which its process was in no shorter phase inside it."""
    by_process: dict[str, list[StartPhase]] = {}
    for phase in phases:
        by_process.setdefault(phase.process, []).append(phase)
    return [max(0.0, phase.seconds - _covered(phase, by_process[phase.process])) for phase in phases]


def _covered(outer: StartPhase, phases: Sequence[StartPhase]) -> float:
    """Return the seconds of a phase that shorter ones of the same process cover."""
    first, last = outer.start_s - _LATENESS_S, outer.end_s + _LATENESS_S
    shorter = [each for each in phases if each is not outer and each.seconds < outer.seconds]
    inside = [each for each in shorter if first <= each.start_s and each.end_s <= last]
    spans = sorted((max(each.start_s, outer.start_s), min(each.end_s, outer.end_s)) for each in inside)
    covered, reached = 0.0, outer.start_s
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def kind_of(process: str) -> str:
    """Return the name of a process without its number: `generator-1` is a `generator`."""
    if re.fullmatch(r"rank-\d+", process):  # of a program that was started several times: each runs the whole loop
        return CONTROLLER
    return re.sub(r"(-\d+)?(-rank-\d+)?$", "", process)


def longest(phases: Sequence[StartPhase]) -> list[tuple[str, float]]:
    """Return what took longest, each once for all processes of a kind, with the most seconds that one of them took."""
    spent: dict[tuple[str, str], float] = {}
    for phase, seconds in zip(phases, own_seconds(phases), strict=True):
        key = phase.process, phase.name
        spent[key] = spent.get(key, 0.0) + seconds
    most: dict[str, float] = {}
    for (process, what), seconds in spent.items():
        kind = kind_of(process)
        name = what if kind == CONTROLLER else f"{kind} {what}"
        most[name] = max(most.get(name, 0.0), seconds)
    return sorted(most.items(), key=lambda item: -item[1])


def summary(seconds: float, phases: Sequence[StartPhase], *, width: int = 80) -> str:
    """`Started in 12.3 s: generator compiling 4.2 s, trainer loading weights 3.1 s`, as far as it fits."""
    text = f"Started in {format_seconds(seconds)}"
    for number, (name, spent) in enumerate(longest(phases)[:_NUM_LONGEST]):
        more = f"{', ' if number else ': '}{name} {format_seconds(spent)}"
        if len(text) + len(more) > width or spent < 0.005:
            break
        text += more
    return text


def read_startup(folder: Path) -> Mapping[str, Any] | None:
    """Return what the start of a run has written, or None where there is nothing that can be read."""
    try:
        found = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
