"""What moves on a terminal during a run: a bar for steps that have a loss, a panel for episodes.

A display is drawn below the lines that are printed. After `close`, and also when the program ends without it, its last
state stays and the terminal is as it was.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from forge.observe.lines import bar_text, format_seconds, panel_metrics, time_shares
from forge.observe.sink import STEP_TIME, Value

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text


class Display(Protocol):
    """Something that shows where a run is."""

    def show(self, step: int, values: Mapping[str, Value]) -> None:
        """Show the metrics of a step that has ended."""

    def print(self, line: str, *, stream: TextIO) -> None:
        """Print a line above the display."""

    def close(self) -> None:
        """Stop. May be called twice."""


class StepBar:
    """A bar with the time that is left, and loss, learning rate and tokens per second."""

    def __init__(self, *, step: int, total_steps: int | None, stream: TextIO | None) -> None:
        from tqdm import tqdm

        self._bar: tqdm[Any] = tqdm(
            total=total_steps, initial=step, unit="step", dynamic_ncols=True, file=stream or sys.stderr
        )

    def show(self, step: int, values: Mapping[str, Value]) -> None:
        self._bar.set_postfix_str(bar_text(values), refresh=False)
        self._bar.update(step - self._bar.n)

    def print(self, line: str, *, stream: TextIO) -> None:
        from tqdm import tqdm

        tqdm.write(line, file=stream)
        stream.flush()

    def close(self) -> None:
        self._bar.close()

    def wipe(self) -> None:
        """Close it and leave nothing on the terminal."""
        self._bar.leave = False
        self._bar.close()


class EpisodePanel:
    """Three rows: how far the run is, the metrics of the last step, and where its time went.

    Rows are cut at the edge of the terminal, whatever its width is at that moment, so that they never wrap. `clock`
    gives seconds that never go back; `refresh_s` is how often the elapsed time moves by itself, 0 for never.
    """

    def __init__(
        self,
        *,
        step: int,
        total_steps: int | None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        refresh_s: float = 1.0,
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._first, self._step, self._total, self._clock = step, step, total_steps, clock
        self._began_s = clock()
        self._values: Mapping[str, Value] = {}
        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._takes_lines = stream is not None or sys.stdout.isatty()
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            auto_refresh=refresh_s > 0,
            refresh_per_second=1 / (refresh_s or 1.0),
            vertical_overflow="crop",
            redirect_stdout=stream is None and sys.stdout.isatty(),
            redirect_stderr=stream is None,
        )
        self._finish = weakref.finalize(self, self._live.stop)  # the cursor comes back however the program ends
        self._live.start()

    def show(self, step: int, values: Mapping[str, Value]) -> None:
        self._step, self._values = step, dict(values)
        self._live.refresh()

    def print(self, line: str, *, stream: TextIO) -> None:
        if self._takes_lines:
            self._console.print(line, markup=False, soft_wrap=True)
        else:  # standard output is a file: the line belongs there and not on the terminal
            print(line, file=stream, flush=True)

    def close(self) -> None:
        self._finish()

    def _render(self) -> RenderableType:
        from rich.console import Group

        rows = panel_rows(
            (self._first, self._step, self._total),
            self._values,
            elapsed_s=self._clock() - self._began_s,
            console=self._console,
        )
        return Group(*rows)


_WIDTH = 24
_GLYPHS = {"wait": "░", "gen": "▓", "train": "█", "sync": "▒", "other": " "}
_PLAIN_GLYPHS = {"wait": ".", "gen": "g", "train": "#", "sync": "s", "other": " "}
_STYLES = {"wait": "yellow", "gen": "cyan", "train": "green", "sync": "magenta", "other": "dim"}


def panel_rows(
    progress: tuple[int, int, int | None],
    values: Mapping[str, Value],
    *,
    elapsed_s: float,
    console: Console,
) -> list[Text]:
    """Return the rows of the panel. `progress` is the step of the start, the one that has ended, and the last."""
    from rich.text import Text

    rows = [_progress_row(progress, elapsed_s, is_ascii=console.options.ascii_only)]
    metrics = Text()
    for name, text in panel_metrics(values):
        metrics.append(f"{'  ' if metrics else ''}{name} ", style="dim").append(text, style="bold")
    if metrics:
        rows.append(metrics)
    if time_shares(values):
        rows.append(_time_row(values, is_ascii=console.options.ascii_only))
    for row in rows:
        row.no_wrap, row.overflow = True, "crop" if console.options.ascii_only else "ellipsis"
    return rows


def _progress_row(progress: tuple[int, int, int | None], elapsed_s: float, *, is_ascii: bool) -> Text:
    from rich.text import Text

    first, step, total = progress
    row = Text(f"step {step}" + ("" if total is None else f"/{total}"), style="bold")
    if total:
        full = min(_WIDTH, _WIDTH * step // total)
        row.append(" ").append(("=" if is_ascii else "━") * full, style="green")
        row.append(("." if is_ascii else "─") * (_WIDTH - full), style="dim")
    row.append(f" {_clock_text(elapsed_s)}", style="dim")
    if total and step > first:
        left_s = elapsed_s / (step - first) * max(0, total - step)
        row.append(f", {_clock_text(left_s)} left", style="dim")
    return row


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _time_row(values: Mapping[str, Value], *, is_ascii: bool) -> Text:
    """Return a bar in which each glyph is a part of the step's time, and what it stands for."""
    from rich.text import Text

    shares = list(time_shares(values).items())
    glyphs = _PLAIN_GLYPHS if is_ascii else _GLYPHS
    row = Text("time ", style="dim")
    if STEP_TIME in values:
        row.append(f"{format_seconds(float(values[STEP_TIME]))} ", style="bold")
    drawn, reached = 0, 0.0
    for name, part in [*shares, ("other", 1.0)]:
        reached = min(1.0, reached + part)
        width = round(reached * _WIDTH) - drawn
        row.append(glyphs[name] * width, style=_STYLES[name])
        drawn += width
    for name, part in shares:
        row.append(f" {name} ", style=_STYLES[name]).append(f"{part:.0%}")
    return row
