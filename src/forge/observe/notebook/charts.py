"""Small charts as SVG, in the colours of the page around them. Pure functions."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from forge.observe.notebook.curves import Curve, Curves
from forge.observe.report.charts import charts_of

INLINE: Final = (
    "Reward",
    "Held-out evaluation",
    "Loss",
    "Accuracy on pairs",
    "KL divergence",
    "Entropy",
    "Gradient norm",
    "Completion length",
)
"""The charts of a report that fit into a notebook, where they have metrics."""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 280.0, 110.0, 42.0, 6.0, 6.0, 16.0
_COLORS: Final = ("#3b7dd8", "#e07b00", "#2a9d5c", "#b04fa8", "#8a6d3b")
_MAX_SERIES: Final = len(_COLORS)


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart."""

    label: str
    curve: Curve


def number(value: float) -> str:
    """Return a number in a few characters: 0.8125, 1.2e-05, 15,360."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 10_000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
    return f"{value:.4g}"


def inline_charts(curves: Curves) -> dict[str, list[Series]]:
    """Return the charts that have something to show, by title, each with its lines."""
    present = [name for name, curve in curves.by_name.items() if curve.points or curve.nonfinite_at is not None]
    found = {}
    for chart in charts_of([name for name in present if not _is_on_policy(name, curves.by_name[name])]):
        if chart["title"] in INLINE:
            lines = [Series(str(one["label"]), curves.by_name[one["key"]]) for one in chart["series"]]
            found[str(chart["title"])] = _distinct(lines)[:_MAX_SERIES]
    return dict(sorted(found.items(), key=lambda each: INLINE.index(each[0])))


def _distinct(lines: Sequence[Series]) -> list[Series]:
    """The lines without those that hide an earlier one: with one sample per prompt, pass@1 is avg@1."""
    found: dict[tuple[tuple[int, float], ...], Series] = {}
    for one in lines:
        found.setdefault(tuple(one.curve.points), one)
    return list(found.values())


def _is_on_policy(name: str, curve: Curve) -> bool:
    """Whether this is the divergence of a trainer from a sampler that has its weights: always 0."""
    return name == "train/approx_kl" and curve.nonfinite_at is None and not any(value for _, value in curve.points)


def charts_html(charts: Mapping[str, Sequence[Series]]) -> str:
    """Return the charts side by side, as many in a row as there is room for."""
    each = "".join(
        f'<div style="flex:0 0 {_WIDTH:.0f}px">{_legend(title, series)}{chart_svg(title, series)}</div>'
        for title, series in charts.items()
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:10px 18px">{each}</div>' if each else ""


def _legend(title: str, series: Sequence[Series]) -> str:
    parts = [f"<b>{html.escape(title)}</b>"]
    for one, color in zip(series, _COLORS, strict=False):
        label = f"{html.escape(one.label)} " if len(series) > 1 else ""
        parts.append(f'<span style="color:{color}">{label}{number(one.curve.last)}</span>')
        if one.curve.nonfinite_at is not None:
            parts.append(f'<span style="color:#c62828">not finite at step {one.curve.nonfinite_at}</span>')
    return f'<div style="font-size:12px;text-align:left">{" ".join(parts)}</div>'


def describe(title: str, series: Sequence[Series]) -> str:
    """Return what a chart shows, in words."""
    parts = []
    for one in series:
        if one.curve.points:
            (first, start), (last, end) = one.curve.points[0], one.curve.points[-1]
            parts.append(f"{one.label} from {number(start)} at step {first} to {number(end)} at step {last}")
    return f"{title}: {'; '.join(parts) or 'no finite value'}"


def chart_svg(title: str, series: Sequence[Series]) -> str:
    """Return one chart. A line with one point is a dot."""
    points = [point for one in series for point in one.curve.points]
    label = html.escape(describe(title, series), quote=True)
    head = (
        f'<svg role="img" aria-label="{label}" width="{_WIDTH:.0f}" height="{_HEIGHT:.0f}" '
        f'viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" style="display:block"><title>{label}</title>'
    )
    if not points:
        return f"{head}</svg>"
    scale = _Scale.of(points)
    body = scale.frame() + "".join(scale.line(one, color) for one, color in zip(series, _COLORS, strict=False))
    return f"{head}{body}</svg>"


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where steps and values lie in a chart."""

    first: int
    last: int
    low: float
    high: float

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]]) -> _Scale:
        steps, values = [step for step, _ in points], [value for _, value in points]
        low, high = min(values), max(values)
        if high - low < 1e-9 * max(1.0, abs(high)):
            margin = abs(high) / 2 or 1.0
            low, high = low - margin, high + margin
        return cls(min(steps), max(steps), low, high)

    def x(self, step: int) -> float:
        span = _WIDTH - _LEFT - _RIGHT
        return _LEFT + (span * (step - self.first) / (self.last - self.first) if self.last > self.first else span / 2)

    def y(self, value: float) -> float:
        part = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)  # halves: the range may not be a float
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * part

    def frame(self) -> str:
        top, bottom, right = _TOP, _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        text = 'font-size="10" fill="currentColor" fill-opacity="0.75" stroke="none"'
        last = f'<text x="{right:.0f}" y="{_HEIGHT - 4:.0f}" text-anchor="end" {text}>{self.last}</text>'
        return (
            f'<path d="M{_LEFT:.0f} {top:.0f}V{bottom:.0f}H{right:.0f}" fill="none" stroke="currentColor" '
            'stroke-opacity="0.35"/>'
            f'<text x="{_LEFT - 4:.0f}" y="{top + 8:.0f}" text-anchor="end" {text}>{_tick(self.high)}</text>'
            f'<text x="{_LEFT - 4:.0f}" y="{bottom:.0f}" text-anchor="end" {text}>{_tick(self.low)}</text>'
            f'<text x="{_LEFT:.0f}" y="{_HEIGHT - 4:.0f}" {text}>{self.first}</text>'
            f"{last if self.last > self.first else ''}"
        )

    def line(self, one: Series, color: str) -> str:
        places = [f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in one.curve.points]
        if len(places) > 1:
            return f'<polyline points="{" ".join(places)}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        return "".join(
            f'<circle cx="{self.x(step):.1f}" cy="{self.y(value):.1f}" r="2.5" fill="{color}"/>'
            for step, value in one.curve.points
        )


def _tick(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 1000 else f"{value:.3g}"
