"""The panel at the foot of a terminal: the start of a run, and then how far it is."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TextIO

from forge.log_levels import FORMAT_VARIABLE
from forge.observe.logs.setup import is_quiet
from forge.observe.panel_rows import PanelState, evaluated, rows_of
from forge.observe.sink import NUM_FAILED, REWARD_MEAN, TRAIN_LOSS, Value
from forge.observe.startup import StartUp, kind_of
from forge.observe.terminal import current_foot, set_foot

if TYPE_CHECKING:
    from rich.text import Text

    from forge.observe.live_rows import LiveRows

_HISTORY: Final = 512
_REFRESH_S: Final = 0.5


def panel_is_possible(progress: bool | None) -> bool:
    """Whether there is a terminal that a panel can be drawn on, and the user has not asked for less.

    Standard output must be one as well: a line on its way through a pipe, and a panel, would run into each other.
    """
    if progress is False or is_quiet() or os.environ.get(FORMAT_VARIABLE) == "json":
        return False
    streams = (sys.stdout, sys.stderr)
    if any(stream is None or not stream.isatty() for stream in streams):
        return False
    if progress is None and os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return False  # what it draws would be kept as lines
    return os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _stop(live: LiveRows) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        live.stop()


class Panel:
    """Rows at the foot of a terminal, which are cut to its width and never wrap.

    Lines are printed above it. After `close`, and also when the program ends without it, its last state stays and the
    terminal is as it was. Any thread may use it.

    Args:
        stream: the terminal; None for standard error.
        clock: seconds that never go back.
        refresh_s: how often it is drawn anew by itself; 0 for never.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        refresh_s: float = _REFRESH_S,
    ) -> None:
        from rich.console import Console

        from forge.observe.live_rows import LiveRows

        self._state, self._clock = PanelState(), clock
        self._lock = threading.RLock()
        self._began_s = self._first_s = clock()
        self._activity: tuple[str, float] | None = None
        self._history: deque[float] = deque(maxlen=_HISTORY)
        self._num_failed = 0
        self._lost: dict[str, int] = {}
        self._startup: StartUp | None = None
        self._console = Console(file=stream or sys.stderr, highlight=False, emoji=False)
        self._refreshes = refresh_s > 0
        self._live = LiveRows(self._console, self._rows, refresh_s=refresh_s, takes_streams=stream is None)
        self._finish = weakref.finalize(self, _stop, self._live)  # the cursor comes back however the program ends
        self._live.start()
        set_foot(self)

    @property
    def is_closed(self) -> bool:
        return not self._finish.alive

    def start_with(self, startup: StartUp) -> None:
        """Show the phases of a start until `begin`, and those of processes that are started again after it."""
        with self._lock:
            self._startup, self._state.is_starting = startup, True

    def begin(self, *, step: int, total: int | None) -> None:
        """Show the progress of a run that is after a step, and is to reach `total`."""
        with self._lock:
            self._state.step = self._state.first = step
            self._state.total = total

    def end_start(self) -> None:
        """Show steps from now on."""
        with self._lock:
            self._state.is_starting = False
            self._first_s = self._clock()
        self._refresh()

    def show(self, step: int, values: Mapping[str, Value]) -> None:
        """Show the metrics of a step that has ended, or of its evaluation."""
        with self._lock:
            found = evaluated(values)
            if found is not None:
                self._state.evaluation = (step, found)
            name = next((name for name in (REWARD_MEAN, TRAIN_LOSS) if name in values), None)
            if name is not None:
                self._num_failed += int(float(values.get(NUM_FAILED, 0)))
                self._history.append(float(values[name]))
                self._state.step, self._state.values = step, dict(values)
        self._refresh()

    def _refresh(self) -> None:
        """Draw the panel anew, unless it does so by itself: a run does not wait for a terminal that is not read."""
        if not self._refreshes:
            self._live.refresh()

    def do(self, activity: str | None) -> None:
        """Show what the run does or waits for from now on. The clock beside it starts when the words do."""
        with self._lock:
            if activity is None:
                self._activity = None
            elif self._activity is None or self._activity[0].split(":")[0] != activity.split(":")[0]:
                self._activity = (activity, self._clock())
            else:
                self._activity = (activity, self._activity[1])

    def lose(self, what: str) -> None:
        """Count something that was lost, such as a `generator`."""
        with self._lock:
            self._lost[f"{what} lost"] = self._lost.get(f"{what} lost", 0) + 1

    def print(self, line: str, *, to_stderr: bool = False) -> None:
        """Print a line above the panel."""
        self._console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Draw the last state and leave it. May be called twice."""
        if current_foot() is self:
            set_foot(None)
        with self._lock:
            self._state.is_over = True
        self._finish()

    def _rows(self) -> list[Text]:
        with self._lock:
            state, now = self._state, self._clock()
            state.elapsed_s = now - (self._began_s if state.is_starting else self._first_s)
            state.left_s = self._left_s(now)
            state.history = tuple(self._history)
            state.activity = None if self._activity is None else (self._activity[0], now - self._activity[1])
            state.faults = {**self._lost, "rewards failed": self._num_failed}
            if self._startup is not None:
                state.phases = self._startup.running()
                state.ended = tuple(dict.fromkeys(kind_of(phase.process) for phase in self._startup.phases))
            return rows_of(state, width=self._console.width, is_ascii=self._console.options.ascii_only)

    def _left_s(self, now: float) -> float | None:
        state = self._state
        num_taken = state.step - state.first
        if not state.total or num_taken < 1 or state.is_starting or state.step >= state.total:
            return None
        return (now - self._first_s) / num_taken * (state.total - state.step)
