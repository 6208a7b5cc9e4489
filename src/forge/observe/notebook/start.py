"""The start of a run in a notebook: one place below the cell that says what the run's processes do."""

from __future__ import annotations

import html
import logging
import threading

from forge.observe.notebook.kernel import KernelOutput, Output
from forge.observe.panel_rows import phase_text, slowest
from forge.observe.startup import CONTROLLER, StartPhase, StartUp, kind_of
from forge.observe.step_lines import format_clock

_log = logging.getLogger("forge.observe")
_REFRESH_S = 1.0


class StartDisplay:
    """Shows the phases of a start until `end`, and then the line that it is given.

    `output` takes the place of the cell's output. With `refresh_s` of 0 it changes with `show` alone.
    """

    def __init__(self, startup: StartUp, *, output: Output | None = None, refresh_s: float = _REFRESH_S) -> None:
        self._startup = startup
        self._output: Output | None = output or KernelOutput()
        self._is_over, self._lock = threading.Event(), threading.Lock()
        self.show()  # here, and not on the thread: the output belongs to the cell that runs now
        if refresh_s > 0:
            threading.Thread(target=self._refresh, args=(refresh_s,), name="forge-startup", daemon=True).start()

    def _refresh(self, refresh_s: float) -> None:
        while not self._is_over.wait(refresh_s):
            self.show()

    def show(self) -> None:
        """Show what the processes do now."""
        with self._lock:
            if not self._is_over.is_set():
                self._put(start_text(self._startup.elapsed_s, self._startup.running()))

    def end(self, line: str) -> None:
        """Show a last line. Does nothing when called again."""
        with self._lock:
            if not self._is_over.is_set():
                self._is_over.set()
                self._put(line)

    def _put(self, text: str) -> None:
        try:
            if self._output is not None:
                self._output.show(f"<div>{html.escape(text)}</div>", text)
        except Exception as error:  # noqa: BLE001 - a front end that is gone must not end a run
            self._output = None
            _log.warning("the start is no longer shown in the notebook: %s: %s", type(error).__name__, error)


def start_text(elapsed_s: float, phases: list[StartPhase]) -> str:
    """Return `Starting 0:12: trainer loading weights 43%, generator starting`: each kind of process once."""
    kinds: dict[str, list[StartPhase]] = {}
    for phase in phases:
        kinds.setdefault(kind_of(phase.process), []).append(phase)
    found = [(kind, phase_text(slowest(members))) for kind, members in kinds.items()]
    words = ", ".join(text if kind == CONTROLLER else f"{kind} {text}" for kind, text in found)
    return f"Starting {format_clock(elapsed_s)}{': ' if words else ''}{words}"
