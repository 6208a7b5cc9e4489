"""What a user sees of a run: the phases of its start, what it does or waits for now, and what was lost.

    with monitored(progress=config.metrics.progress) as monitor:
        …                     # processes start, and report their phases
        monitor.begin_steps(step=0, total=100)
        monitor.do("training")
        monitor.started()     # the first step was taken

On a terminal this is a panel. In a notebook the start has a place below the cell that changes; elsewhere it is told in
lines on standard error. A run that is started inside another one is shown by that one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from forge.log_levels import FORMAT_VARIABLE
from forge.observe.logs.setup import is_quiet
from forge.observe.panel import Panel, panel_is_possible
from forge.observe.panel_rows import phase_text
from forge.observe.phases import set_listener
from forge.observe.startup import CONTROLLER, StartPhase, StartUp, kind_of
from forge.observe.step_lines import WIDTH, format_clock
from forge.observe.terminal import print_above

if TYPE_CHECKING:
    from forge.observe.notebook.start import StartDisplay

_log = logging.getLogger("forge.startup")
REMIND_S: Final = 15.0
"""A phase that lasts longer is told again after so many seconds."""


class StartLines:
    """Tells the phases of a start in lines: each kind of process once, and what lasts long again."""

    def __init__(self, print_line: Callable[[str], None], *, remind_s: float = REMIND_S) -> None:
        self._print, self._remind_s = print_line, remind_s
        self._told: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def tell(self, phase: StartPhase) -> None:
        """Print a line, if this phase was not told of for a while."""
        key, now_s = (kind_of(phase.process), phase.name), phase.end_s
        with self._lock:
            told_s = self._told.get(key)
            if told_s is not None and (now_s - told_s < self._remind_s or phase.state != "running"):
                return
            self._told[key] = now_s
        kind = "" if key[0] == CONTROLLER else f"{key[0]}: "
        what = phase.name if told_s is None else f"{phase_text(phase)} for {format_clock(phase.seconds)}"
        self._print(f"Start {format_clock(now_s)} | {kind}{what}"[:WIDTH])

    def remind(self, phases: list[StartPhase]) -> None:
        """Tell again what lasts long."""
        for phase in phases:
            self.tell(phase)


class RunMonitor:
    """Shows one run. Any thread may use it.

    Args:
        panel: is drawn on; None where there is no terminal.
        is_shown: whether the start is shown where there is no panel.
    """

    def __init__(self, *, panel: Panel | None, is_shown: bool) -> None:
        self.panel = panel
        is_cell = is_shown and _is_notebook()
        self._lines = StartLines(_print) if is_shown and panel is None and not is_cell else None
        self.startup = StartUp(on_change=None if self._lines is None else self._tell)
        self._cell = _open_cell(self.startup) if is_cell else None
        self._is_over = threading.Event()
        if panel is not None:
            panel.start_with(self.startup)
        elif self._lines is not None:
            threading.Thread(target=self._remind, name="forge-startup", daemon=True).start()

    def _tell(self, phase: StartPhase) -> None:
        if self._lines is not None and self.startup.seconds is None:
            self._lines.tell(phase)

    def _remind(self) -> None:
        while not self._is_over.wait(REMIND_S):
            assert self._lines is not None
            self._lines.remind(self.startup.running())

    def begin_steps(self, *, step: int, total: int | None) -> None:
        """Note after which step the run starts, and which is its last."""
        if self.panel is not None:
            self.panel.begin(step=step, total=total)

    def do(self, activity: str | None) -> None:
        """Show what the run does or waits for from now on; None for nothing that lasts."""
        if self.panel is not None:
            self.panel.do(activity)

    def lose(self, process: str) -> None:
        """Count a process that was lost."""
        self.startup.lose(process)
        if self.panel is not None:
            self.panel.lose(kind_of(process))

    def started(self) -> None:
        """Note that the first step was taken. Does nothing when called again."""
        if self.startup.seconds is not None:
            return
        line = self.startup.finish()
        self._is_over.set()
        _log.info("%s", line)
        if self.panel is not None:
            self.panel.end_start()
        if self._cell is not None:
            self._cell.end(line)
        if self.panel is not None or self._lines is not None:
            _print(line)

    def end_start(self) -> None:
        """Note that the program has started, and leave the terminal to something else."""
        self.started()
        if self.panel is not None:
            self.panel.close()

    def close(self) -> None:
        """Show nothing more."""
        self._is_over.set()
        self.startup.fail()
        if self._cell is not None:
            self._cell.end(f"The run ended before its first step, after {format_clock(self.startup.elapsed_s)}")
        if self.panel is not None:
            self.panel.close()


@contextlib.contextmanager
def shown_start() -> Iterator[RunMonitor]:
    """Show what the block starts, and at its end how long that took: of a program that takes no steps."""
    with monitored() as monitor:
        yield monitor
        monitor.started()


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error is closed, or is not read
        print_above(line, to_stderr=True)


def _is_notebook() -> bool:
    if "IPython" not in sys.modules:  # and nothing else has to be imported
        return False
    from forge.observe.notebook.kernel import is_notebook

    return is_notebook()


def _open_cell(startup: StartUp) -> StartDisplay:
    from forge.observe.notebook.start import StartDisplay

    return StartDisplay(startup)


_current: RunMonitor | None = None


def current_monitor() -> RunMonitor | None:
    """Return what shows the run of this process, if anything does."""
    return _current


def note_started() -> None:
    """Note that the first step of the run was taken, if it is shown."""
    if _current is not None:
        _current.started()


def note_lost(process: str) -> None:
    """Count a process that was lost, if a run is shown."""
    if _current is not None:
        _current.lose(process)


@contextlib.contextmanager
def monitored(*, progress: bool | None = None, is_leader: bool = True) -> Iterator[RunMonitor]:
    """Show a run inside the block, unless an outer one is shown already: that one is yielded then.

    Args:
        progress: `metrics.progress`.
        is_leader: whether this process speaks for the run; no other one shows anything.
    """
    global _current
    if _current is not None:
        yield _current
        return
    is_shown = is_leader and progress is not False and not is_quiet() and os.environ.get(FORMAT_VARIABLE) != "json"
    panel = Panel() if is_shown and not _is_notebook() and panel_is_possible(progress) else None
    monitor = _current = RunMonitor(panel=panel, is_shown=is_shown)
    set_listener(monitor.startup.take)
    try:
        yield monitor
    finally:
        _current = None
        set_listener(None)
        monitor.close()
