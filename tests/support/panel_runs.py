"""Metrics of a step, and programs that show a run on a terminal of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping

import pyte

STEP: dict[str, float | int | str] = {
    "train/loss": 0.01,
    "rollout/reward_mean": 0.75,
    "train/kl": 0.12,
    "train/entropy": 1.2345,
    "rollout/staleness_mean": 0.5,
    "rollout/tokens_per_s": 1234.4,
    "train/tokens_per_s": 5678.0,
    "time/step": 8.0,
    "time/waiting": 0.8,
    "time/generating": 4.0,
    "time/training": 2.4,
    "time/syncing": 0.4,
    "time/other": 0.4,
}
EVALUATION: dict[str, float | int | str] = {
    "evaluation/reward": 0.71,
    "evaluation/pass@8": 0.93,
    "evaluation/avg@8": 0.7,
    "evaluation/length": 34.2,
    "evaluation/num_prompts": 64,
}

RUN = f"""
import logging, os, sys
from forge.observe import ConsoleSink, start_logging
from forge.observe.monitor import monitored
from forge.observe.phases import PhaseEvent, phase, take_phase

STEP = {STEP!r}
gate = int(os.environ["GATE"])
log = logging.getLogger("forge.test")
asked = set()

def told(what):  # a test lets the program continue, and sees what has become of the terminal
    print("seen", what)
    os.read(gate, 1)

def event(process, number, name, state, seconds=0.0, done=0.0, total=0.0, unit=""):
    take_phase(PhaseEvent(process, number, name, state, seconds, done, total, unit))
"""
"""What the programs of tests begin with: each runs until `told`, and continues when it is let."""


MOST_READS = 150


class Terminal:
    """A program on a terminal of its own, which is emulated: what a user would see of it at the end of `until`."""

    def __init__(
        self, program: str, *, columns: int = 80, rows: int = 24, env: Mapping[str, str] | None = None
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.master, slave = os.openpty()
        termios.tcsetwinsize(self.master, (rows, columns))
        gate, self._gate = os.pipe()
        environment = {**os.environ, "TERM": "xterm-256color", "GATE": str(gate), **(env or {})}
        for name in (
            *("COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"),
            *("FORGE_LOG", "FORGE_VERBOSITY", "FORGE_LOG_FORMAT", "CI"),
        ):
            if name not in (env or {}):
                environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
            pass_fds=[gate],
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        os.close(gate)

    def resize(self, columns: int, rows: int = 24) -> None:
        """Change the size of the terminal, as a user who drags its corner."""
        self.screen.resize(rows, columns)
        termios.tcsetwinsize(self.master, (rows, columns))

    def until(self, is_seen: str | Callable[[list[str]], bool]) -> list[str]:
        """Return the lines of the screen as soon as it shows a text, or what a function looks for. What a panel, which
        is drawn twice a second, has not shown after so many reads will not come."""
        for _ in range(MOST_READS):
            if is_seen(self.lines) if callable(is_seen) else any(is_seen in line for line in self.lines):
                return self.lines
            if not self.read():
                break
        raise AssertionError("this is not shown:\n" + "\n".join(self.lines))

    def go(self) -> None:
        """Let the program continue."""
        os.write(self._gate, b".")

    def end(self) -> tuple[int, list[str]]:
        """Let the program run to its end; return its exit code and the last screen."""
        os.close(self._gate)
        while self.read():
            pass
        code = self.process.wait(timeout=600)
        os.close(self.master)
        return code, self.lines

    @property
    def lines(self) -> list[str]:
        """The lines of the screen, down to the last that has a character."""
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def is_cursor_shown(self) -> bool:
        return not self.screen.cursor.hidden

    def read(self) -> bool:
        """Take what the program has written; wait for it. Return False when it has ended."""
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # Linux says EIO when the program has ended
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)
