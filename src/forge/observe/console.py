"""Metrics on the console: lines, and a progress display on a terminal."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from forge.observe.displays import Display, EpisodePanel, StepBar
from forge.observe.lines import evaluation_line, plain_line, rollout_line, train_line, validation_line
from forge.observe.sink import EVALUATION_REWARD, REWARD_MEAN, TRAIN_LOSS, VALIDATION_LOSS, Value, closed_error

_log = logging.getLogger("forge.observe")


class ConsoleSink:
    """Prints a line every `log_interval` steps and at step `total_steps`; a validation or an evaluation is printed
    whenever it comes.

    Lines go to standard output. The progress display goes to standard error, moves with every step, and knows the time
    that is left when `total_steps` is given: a bar, which gives way to a panel with the first metrics of rollouts. The
    bar is there when `progress` is true, or when that is None and both streams are terminals: a line on its way through
    a pipe and a bar on the terminal would run into each other. The panel needs a terminal in any case. `stream` takes
    the place of both streams. Where a stream is closed, or is no longer read (`| head`), nothing more is printed, and
    the run continues.
    """

    def __init__(
        self,
        *,
        log_interval: int = 10,
        step_word: str = "Step",
        num_epochs: int | None = None,
        total_steps: int | None = None,
        resume_step: int | None = None,
        progress: bool | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._log_interval, self._word = log_interval, step_word
        self._num_epochs = num_epochs
        self._total_steps = total_steps
        self._step = resume_step or 0
        self._stream = stream
        self._closed = False
        self._display: Display | None = None
        self._is_muted = False
        if progress is None:
            streams = [stream or standard for standard in (sys.stdout, sys.stderr)]
            progress = all(each is not None and each.isatty() for each in streams)
        if progress:
            self._display = StepBar(step=self._step, total_steps=total_steps, stream=stream)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        if self._closed:
            raise closed_error(self)
        if self._is_muted:
            return
        try:
            self._show(step, values)
        except OSError as error:
            self._mute(error)

    def _show(self, step: int, values: Mapping[str, Value]) -> None:
        if REWARD_MEAN in values:
            self._show_episode()
        if self._display is not None and (REWARD_MEAN in values or TRAIN_LOSS in values):
            self._display.show(step, values)
        for line in self._lines(step, values):
            self._print(line)

    def close(self) -> None:
        self._closed = True
        if self._display is not None and not self._is_muted:
            self._display.close()

    def _mute(self, error: OSError) -> None:
        """Print no more: a run does not end because its output cannot be written."""
        self._is_muted = True
        if self._stream is None:
            discard_output(sys.stdout.fileno())
        _log.warning("metrics are no longer printed: standard output: %s; the run continues", error.strerror or error)

    def _lines(self, step: int, values: Mapping[str, Value]) -> list[str]:
        is_due = step % self._log_interval == 0 or step == self._total_steps
        lines = []
        if REWARD_MEAN in values:
            lines += [rollout_line(step, values, word=self._word)] if is_due else []
        elif TRAIN_LOSS in values:
            lines += [train_line(step, values, num_epochs=self._num_epochs)] if is_due else []
        if VALIDATION_LOSS in values:
            lines.append(validation_line(step, values))
        if EVALUATION_REWARD in values:
            lines.append(evaluation_line(step, values))
        is_known = any(name in values for name in (REWARD_MEAN, TRAIN_LOSS, VALIDATION_LOSS, EVALUATION_REWARD))
        return lines if is_known or not values or not is_due else [plain_line(step, values)]

    def _show_episode(self) -> None:
        """Let the panel take the place of the bar, on a terminal."""
        if isinstance(self._display, StepBar):
            self._display.wipe()
            self._display = None
            if (self._stream or sys.stderr).isatty():
                self._display = EpisodePanel(step=self._step, total_steps=self._total_steps, stream=self._stream)

    def _print(self, line: str) -> None:
        stream = self._stream or sys.stdout
        if self._display is None:
            print(line, file=stream, flush=True)
        else:
            self._display.print(line, stream=stream)


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
