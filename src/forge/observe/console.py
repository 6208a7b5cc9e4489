"""Figures for whoever watches: a line now and then, and a progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from forge.observe.lines import bar_text, plain_line, train_line, validation_line
from forge.observe.sink import TRAIN_LOSS, VALIDATION_LOSS, Value, closed_error

if TYPE_CHECKING:
    from tqdm import tqdm


class ConsoleSink:
    """Prints a line every `log_interval` steps and at step `total_steps`; a validation is printed whenever it comes.

    Lines go to standard output. The bar goes to standard error, moves with every step, and knows the time that is left
    when `total_steps` is given. It is there when `progress` is true, or when that is None and both streams are
    terminals: a line on its way through a pipe and a bar on the terminal would run into each other. `stream` takes the
    place of both.
    """

    def __init__(
        self,
        *,
        log_interval: int = 10,
        num_epochs: int | None = None,
        total_steps: int | None = None,
        resume_step: int | None = None,
        progress: bool | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._log_interval = log_interval
        self._num_epochs = num_epochs
        self._total_steps = total_steps
        self._stream = stream
        self._closed = False
        if progress is None:
            progress = all((stream or standard).isatty() for standard in (sys.stdout, sys.stderr))
        self._bar = self._make_bar(resume_step or 0) if progress else None

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        if self._closed:
            raise closed_error(self)
        if TRAIN_LOSS in values:
            if self._bar is not None:
                self._move_bar(self._bar, step, bar_text(values))
            if self._is_due(step):
                self._print(train_line(step, values, num_epochs=self._num_epochs))
        if VALIDATION_LOSS in values:
            self._print(validation_line(step, values))
        elif TRAIN_LOSS not in values and values and self._is_due(step):
            self._print(plain_line(step, values))

    def close(self) -> None:
        self._closed = True
        if self._bar is not None:
            self._bar.close()

    def _is_due(self, step: int) -> bool:
        return step % self._log_interval == 0 or step == self._total_steps

    def _make_bar(self, step: int) -> tqdm[Any]:
        from tqdm import tqdm

        return tqdm(
            total=self._total_steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            file=self._stream or sys.stderr,
        )

    @staticmethod
    def _move_bar(bar: tqdm[Any], step: int, text: str) -> None:
        bar.set_postfix_str(text, refresh=False)
        bar.update(step - bar.n)

    def _print(self, line: str) -> None:
        stream = self._stream or sys.stdout
        if self._bar is None:
            print(line, file=stream, flush=True)
            return
        from tqdm import tqdm

        tqdm.write(line, file=stream)
        stream.flush()
