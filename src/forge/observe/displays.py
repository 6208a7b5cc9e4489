"""What moves during a run: a panel on a terminal, or a bar where there is none and one was asked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from forge.observe.lines import bar_text
from forge.observe.sink import Value

if TYPE_CHECKING:
    from tqdm import tqdm


class Display(Protocol):
    """Something that shows where a run is."""

    def begin(self, *, step: int, total: int | None) -> None:
        """Start after a step of a run that is to reach `total`."""

    def show(self, step: int, values: Mapping[str, Value]) -> None:
        """Show the metrics of a step that has ended."""

    def print(self, line: str, *, to_stderr: bool = False) -> None:
        """Print a line above the display."""

    def close(self) -> None:
        """Stop. May be called twice."""


class StepBar:
    """A bar with the time that is left, and loss, learning rate and tokens per second."""

    def __init__(self, *, stream: TextIO | None) -> None:
        self._stream = stream
        self._bar: tqdm[Any] | None = None

    def begin(self, *, step: int, total: int | None) -> None:
        from tqdm import tqdm

        stream = self._stream or sys.stderr
        self._bar = tqdm(total=total, initial=step, unit="step", dynamic_ncols=True, file=stream)

    def show(self, step: int, values: Mapping[str, Value]) -> None:
        if self._bar is not None and step > self._bar.n:
            self._bar.set_postfix_str(bar_text(values), refresh=False)
            self._bar.update(step - self._bar.n)

    def print(self, line: str, *, to_stderr: bool = False) -> None:
        from tqdm import tqdm

        stream = self._stream or (sys.stderr if to_stderr else sys.stdout)
        tqdm.write(line, file=stream)
        stream.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
