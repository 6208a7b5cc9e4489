"""The metrics of a run in a notebook: where it is, how long it will take, and its curves, changing in place."""

from __future__ import annotations

import html
import logging
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import pairwise

from forge.observe.lines import format_seconds, time_shares
from forge.observe.notebook.charts import Series, charts_html, inline_charts, number
from forge.observe.notebook.curves import Curves
from forge.observe.notebook.kernel import KernelOutput, Output
from forge.observe.sink import STEP_TIME, Value, closed_error

_log = logging.getLogger("forge.observe")
_BARS = "▁▂▃▄▅▆▇█"


class NotebookSink:
    """Shows a run in the output of the cell that started it, instead of lines.

    It changes at most every `refresh_s` seconds, and a last time when it is closed. In a saved notebook it stays as it
    was last. Where it cannot be shown any more, nothing is, and the run continues. `output` takes the place of the
    cell's output, and `clock` gives seconds that never go back."""

    def __init__(
        self,
        *,
        name: str,
        total_steps: int | None = None,
        resume_step: int | None = None,
        output: Output | None = None,
        clock: Callable[[], float] = time.monotonic,
        refresh_s: float = 0.5,
    ) -> None:
        self._name, self._total, self._refresh_s, self._clock = name, total_steps, refresh_s, clock
        self._first = self._step = resume_step or 0
        self._output: Output | None = output or KernelOutput()
        self._curves, self._shares = Curves(), ""
        self._began_s, self._shown_s = clock(), -refresh_s
        self._is_closed = self._is_stale = False

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        if self._is_closed:
            raise closed_error(self)
        self._step = max(self._step, step)
        self._curves.add(step, values)
        self._shares = _shares_text(values) or self._shares
        self._is_stale = True
        if self._clock() - self._shown_s >= self._refresh_s:
            self._show()

    def close(self) -> None:
        if not self._is_closed and self._is_stale:
            self._show()
        self._is_closed = True

    def _show(self) -> None:
        self._shown_s, self._is_stale = self._clock(), False
        charts = inline_charts(self._curves)
        progress = self._progress()
        fraction = None if not self._total else min(1.0, self._step / self._total)
        page = f"{_head(self._name, progress, fraction)}{charts_html(charts)}{_small(self._shares)}"
        try:
            if self._output is not None:
                self._output.show(
                    f'<div style="max-width:1200px">{page}</div>', plain_text(self._name, progress, charts)
                )
        except Exception as error:  # noqa: BLE001 - a front end that is gone must not end a run
            self._output = None
            text = "the run is no longer shown in the notebook: %s: %s; the run continues"
            _log.warning(text, type(error).__name__, error)

    def _progress(self) -> str:
        """`step 12/40, 0:00:23, 0:00:53 left`."""
        elapsed_s, done = self._clock() - self._began_s, self._step - self._first
        text = f"step {self._step}" + ("" if self._total is None else f"/{self._total}") + f", {_duration(elapsed_s)}"
        left = 0 if self._total is None else self._total - self._step
        return text + (f", {_duration(elapsed_s / done * left)} left" if left > 0 and done > 0 else "")


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


def plain_text(name: str, progress: str, charts: Mapping[str, list[Series]]) -> str:
    """Return the display without HTML: a line for each curve, with its course in eight levels."""
    lines = [f"{name}: {progress}"]
    for title, series in charts.items():
        for one in series:
            label = title if len(series) == 1 else f"{title}, {one.label}"
            lines.append(f"{label:<24} {number(one.curve.last):>8}  {sparkline([v for _, v in one.curve.points])}")
    return "\n".join(lines)


def sparkline(values: list[float], *, width: int = 40) -> str:
    """Return the course of some numbers in `width` characters at most, each the mean of its part."""
    if not values:
        return ""
    count = min(width, len(values))
    bounds = [len(values) * place // count for place in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    if high <= low:
        return _BARS[0] * count
    return "".join(_BARS[min(len(_BARS) - 1, int(len(_BARS) * (mean - low) / (high - low)))] for mean in means)


def _head(name: str, progress: str, fraction: float | None) -> str:
    bar = ""
    if fraction is not None:
        bar = (
            '<div style="height:4px;background:rgba(128,128,128,.3);margin:4px 0 8px">'
            f'<div style="height:4px;width:{100 * fraction:.1f}%;background:#2a9d5c"></div></div>'
        )
    return f"<div><b>{html.escape(name)}</b> {html.escape(progress)}</div>{bar}"


def _small(text: str) -> str:
    return f'<div style="font-size:12px;opacity:.75;margin-top:6px">{html.escape(text)}</div>' if text else ""


def _shares_text(values: Mapping[str, Value]) -> str:
    """`Last step: 8.0 s (wait 10%, gen 50%, train 30%, sync 5%)`; nothing where it is not known."""
    shares = ", ".join(f"{name} {part:.0%}" for name, part in time_shares(values).items())
    return f"Last step: {format_seconds(float(values[STEP_TIME]))} ({shares})" if shares and STEP_TIME in values else ""
