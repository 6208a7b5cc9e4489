"""Metrics on the console: lines, and a progress display on a terminal."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TextIO

from forge.observe import lines, step_lines
from forge.observe.displays import Display, StepBar
from forge.observe.lines import rollout_line, train_line
from forge.observe.logs.setup import is_quiet
from forge.observe.monitor import current_monitor
from forge.observe.panel import Panel, panel_is_possible
from forge.observe.printing import drain, print_patiently
from forge.observe.sink import EVALUATION_REWARD, REWARD_MEAN, TRAIN_LOSS, VALIDATION_LOSS, Value, closed_error
from forge.observe.step_lines import WIDTH, plain_line, step_line
from forge.observe.terminal import print_above

_log = logging.getLogger("forge.observe")


class ConsoleSink:
    """Prints a line every `log_interval` steps and at step `total_steps`; a validation or an evaluation is printed
    whenever it comes.

    Lines go to standard output, and are no longer than the terminal is wide, or 80 characters. The progress display
    goes to standard error and moves with every step: on a terminal a panel, that of the run where one is shown
    (`forge.observe.monitor`). It is there when `progress` is None and both streams are terminals: a line on its way
    through a pipe and a panel on the terminal would run into each other. With `progress` true, a bar takes its place
    where there is no terminal. `stream` takes the place of both streams. Where a stream is closed, or is no longer read
    (`| head`), nothing more is printed, and the run continues. After `-q` nothing is.

    `style` is `step`, or `episode` for the lines that tools know from elsewhere: `Episode 1 | Avg Reward: 0.75 | KL
    Divergence: 0.12`, `Epoch 1/10 | Step 100 | Loss: 2.45 | LR: 0.0001`.
    """

    def __init__(
        self,
        *,
        log_interval: int = 10,
        style: str = "step",
        num_epochs: int | None = None,
        total_steps: int | None = None,
        resume_step: int | None = None,
        progress: bool | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._log_interval, self._style = log_interval, style
        self._num_epochs, self._total_steps = num_epochs, total_steps
        self._stream = stream
        self._closed, self._is_muted = False, stream is None and is_quiet()
        self._pace = Pace(total_steps)
        self._display, self._is_shared = _open_display(progress, stream)
        if self._display is not None:
            self._display.begin(step=resume_step or 0, total=total_steps)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        if self._closed:
            raise closed_error(self)
        if self._is_muted:
            return
        streams = (sys.stdout, sys.stderr) if self._stream is None else ()
        try:
            print_patiently(partial(self._show, step, dict(values)), *streams)
        except OSError as error:
            self._mute(error)

    def _show(self, step: int, values: Mapping[str, Value]) -> None:
        if REWARD_MEAN in values or TRAIN_LOSS in values:
            self._pace.note(step)
        if self._display is not None:
            self._display.show(step, values)
        for line in self._lines(step, values):
            self._print(line)

    def close(self) -> None:
        self._closed = True
        drain()
        if self._display is not None and not self._is_muted and not self._is_shared:
            self._display.close()

    def _mute(self, error: OSError) -> None:
        """Print no more: a run does not end because its output cannot be written."""
        self._is_muted = True
        if self._stream is None:
            discard_output(sys.stdout.fileno())
        _log.warning("metrics are no longer printed: standard output: %s; the run continues", error.strerror or error)

    def _lines(self, step: int, values: Mapping[str, Value]) -> list[str]:
        is_due = step % self._log_interval == 0 or step == self._total_steps
        found = []
        if REWARD_MEAN in values or TRAIN_LOSS in values:
            found += [self._step_line(step, values)] if is_due else []
        if VALIDATION_LOSS in values:
            found.append(self._validation_line(step, values))
        if EVALUATION_REWARD in values:
            found.append(self._evaluation_line(step, values))
        is_known = any(name in values for name in (REWARD_MEAN, TRAIN_LOSS, VALIDATION_LOSS, EVALUATION_REWARD))
        if is_known or not values or not is_due:
            return found
        return [plain_line(step, values, total=self._total_steps, width=self._width)]

    def _step_line(self, step: int, values: Mapping[str, Value]) -> str:
        if self._style == "episode":
            if REWARD_MEAN in values:
                return rollout_line(step, values, word="Episode")
            return train_line(step, values, num_epochs=self._num_epochs)
        return step_line(
            step,
            values,
            total=self._total_steps,
            num_epochs=self._num_epochs,
            left_s=self._pace.left_s(step),
            width=self._width,
        )

    def _validation_line(self, step: int, values: Mapping[str, Value]) -> str:
        if self._style == "episode":
            return lines.validation_line(step, values)
        return step_lines.validation_line(step, values, total=self._total_steps, width=self._width)

    def _evaluation_line(self, step: int, values: Mapping[str, Value]) -> str:
        if self._style == "episode":
            return lines.evaluation_line(step, values)
        return step_lines.evaluation_line(step, values, total=self._total_steps, width=self._width)

    @property
    def _width(self) -> int:
        """How wide a line may be: as the terminal, or 80 where there is none."""
        try:
            columns = os.get_terminal_size((self._stream or sys.stdout).fileno()).columns
        except (OSError, ValueError, AttributeError):
            return WIDTH
        return max(20, columns) if columns else WIDTH  # a terminal that does not know its size says 0

    def _print(self, line: str) -> None:
        if self._display is not None:
            self._display.print(line, to_stderr=False)
        elif self._stream is not None:
            print(line, file=self._stream, flush=True)
        else:
            print_above(line)


class Pace:
    """How long the steps of a run take, those that come after the first one."""

    def __init__(self, total: int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._first: tuple[int, float] | None = None
        self._now_s = 0.0

    def note(self, step: int) -> None:
        """Note that a step has ended."""
        self._now_s = self._clock()
        if self._first is None or step < self._first[0]:
            self._first = (step, self._now_s)

    def left_s(self, step: int) -> float | None:
        """Return the seconds that are left after a step; None where that is not known."""
        if self._total is None or self._first is None or not self._first[0] < step < self._total:
            return None
        first, began_s = self._first
        return (self._now_s - began_s) / (step - first) * (self._total - step)


def _open_display(progress: bool | None, stream: TextIO | None) -> tuple[Display | None, bool]:
    """Return what moves while the run runs, if anything does, and whether it belongs to another."""
    monitor = current_monitor()
    if stream is None and monitor is not None and monitor.panel is not None:
        return monitor.panel, True
    if stream is None and panel_is_possible(progress):
        return Panel(), False
    if stream is not None and stream.isatty() and progress is not False:
        return Panel(stream=stream), False
    return (StepBar(stream=stream), False) if progress else (None, False)


def open_missing_streams() -> None:
    """Let /dev/null stand for a standard stream that the caller closed (`>&-`).

    Otherwise `sys.stdout` is None, and the next file or socket that is opened becomes standard output.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        nothing = os.open(os.devnull, os.O_RDWR)
        if nothing != descriptor:
            os.dup2(nothing, descriptor)
            os.close(nothing)
        setattr(sys, name, open(descriptor, mode, closefd=False, encoding="utf-8"))  # noqa: SIM115 - for good


def discard_output(descriptor: int = 1) -> None:
    """Send what is still to be printed nowhere: nothing reads it, and Python's end would fail on it."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)
