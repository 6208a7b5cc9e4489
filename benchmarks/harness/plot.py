"""Pictures of what a benchmark found, as SVG files that a page of the documentation shows: bars, and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#2a6fbb", "#d1603d", "#3c8d5a", "#8b5fbf", "#b8860b", "#7a7a7a")
WIDTH, ROW, LEFT, RIGHT = 760, 30, 300, 90
HEIGHT, MARGIN = 340, 56

Curve = Sequence[tuple[float, float]]
"""Points from left to right."""


def bars(title: str, values: Mapping[str, float], *, unit: str) -> str:
    """One bar for each value, the longest first."""
    ordered = sorted(values.items(), key=lambda entry: -entry[1])
    most = max(values.values(), default=1.0)
    parts = [_text(12, 24, title, size=15)]
    for number, (name, value) in enumerate(ordered):
        y = 44 + number * ROW
        length = (WIDTH - LEFT - RIGHT) * value / most
        parts += [
            _text(LEFT - 10, y + 15, name, anchor="end"),
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{ROW - 10}" fill="{COLOURS[0]}"/>',
            _text(LEFT + length + 8, y + 15, f"{value:.3g} {unit}"),
        ]
    return _svg(parts, height=52 + len(ordered) * ROW)


def curves(title: str, lines: Mapping[str, Sequence[Curve]], *, across: str, goal: float | None = None) -> str:
    """For each name one or more curves of values from 0 to 1; the names below, a dashed line at the goal."""
    longest = max((point[0] for runs in lines.values() for run in runs for point in run), default=1.0) or 1.0
    step = _round_step(longest / 6)
    parts = [_text(12, 24, title, size=15), *_grid(longest, step=step, across=across)]
    if goal is not None:
        y = _y(goal)
        parts.append(f'<path d="M{MARGIN} {y:.1f}H{WIDTH - 20}" stroke="#888" stroke-dasharray="5 4" fill="none"/>')
    for number, (name, runs) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        for run in runs:
            points = " ".join(f"{_x(seconds, longest):.1f},{_y(value):.1f}" for seconds, value in run)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = HEIGHT + 24 + number * 20
        parts += [f'<rect x="{MARGIN}" y="{y - 10}" width="18" height="4" fill="{colour}"/>']
        parts += [_text(MARGIN + 26, y - 3, name)]
    return _svg(parts, height=HEIGHT + 24 + len(lines) * 20)


def _grid(longest: float, *, step: float, across: str) -> list[str]:
    parts = []
    for percent in range(0, 101, 20):
        y = _y(percent / 100)
        parts.append(f'<path d="M{MARGIN} {y:.1f}H{WIDTH - 20}" stroke="#8884" fill="none"/>')
        parts.append(_text(MARGIN - 8, y + 4, f"{percent}%", anchor="end"))
    marks = [number * step for number in range(int(longest / step) + 1)]
    parts += [_text(_x(mark, longest), HEIGHT - 20, f"{mark:g}", anchor="middle") for mark in marks]
    return [*parts, _text(WIDTH - 20, HEIGHT - 2, across, anchor="end")]


def _x(value: float, longest: float) -> float:
    return MARGIN + (WIDTH - 20 - MARGIN) * value / longest


def _y(value: float) -> float:
    return HEIGHT - 36 - (HEIGHT - 36 - 44) * value


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, … that is not below."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="currentColor">'
        f"{escape(text)}</text>"
    )


def _svg(parts: Sequence[str], *, height: float) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}"'
    back = f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>'
    return "\n".join([f'{head} font-family="sans-serif" color="#222">', back, *parts, "</svg>", ""])
