"""What `grpo.py` found: ratios of neighbouring windows, times to an accuracy, and both as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness.report import table, verdict
from harness.throughput import quartiles

GOAL_SYNC, GOAL_ASYNC, GOAL_TIME, GOAL_SYNC_SHARE = 3.0, 1.4, 0.4, 0.05

Window = Mapping[str, Any]
Windows = Mapping[str, Sequence[Window]]
Point = tuple[float, int, float]
"""Seconds on the clock, samples, and held-out accuracy."""


def rates(windows: Sequence[Window]) -> list[float]:
    """Samples learned from in a second, window by window."""
    return [window["samples"] / window["seconds"] for window in windows]


def side_summary(windows: Sequence[Window], last: Mapping[str, Any]) -> dict[str, Any]:
    """One side's figures; `last` is what it said at its end."""
    samples = sum(window["samples"] for window in windows)
    return {
        "samples_per_s": statistics.median(rates(windows)),
        "samples_per_s_best": max(rates(windows)),
        "samples_per_cpu_s": samples / sum(window["cpu_seconds"] for window in windows),
        "tokens_per_sample": sum(window["tokens"] for window in windows) / samples,
        "windows": [dict(window) for window in windows],
        "last": dict(last),
    }


def best_of(windows: Windows, names: Sequence[str]) -> str:
    """The side with the highest median rate."""
    return max(names, key=lambda name: statistics.median(rates(windows[name])))


def compare(windows: Windows, *, fast: str, slow: str, goal: float | None) -> dict[str, Any]:
    """By how much one side is faster than another: the median of the rounds, and its quartiles."""
    pairs = zip(rates(windows[fast]), rates(windows[slow]), strict=True)
    low, median, high = quartiles(sorted(mine / its for mine, its in pairs))
    return {
        "what": f"{fast} / {slow}",
        "ratio": median,
        "ratio_quartiles": [low, high],
        "goal": goal,
        "sign": "≥",
        "met": None if goal is None else median >= goal,
    }


def speed_rows(windows: Windows, *, ours: Sequence[str], peers: Sequence[str]) -> list[dict[str, Any]]:
    """Every side of ours against TRL at its best, and what asynchrony adds to the same processes in turns."""
    synchronous = [name for name in ours if "asynchronous" not in name]
    asynchronous = [name for name in ours if "asynchronous" in name]
    rows = []
    if peers:
        peer = best_of(windows, peers)
        best = best_of(windows, synchronous) if synchronous else None
        rows += [
            compare(windows, fast=name, slow=peer, goal=GOAL_SYNC if name == best else None)
            for name in (*synchronous, *asynchronous)
        ]
    apart = next((name for name in synchronous if "apart" in name), None)
    if apart is not None and asynchronous:
        ahead = best_of(windows, asynchronous)
        rows += [
            compare(windows, fast=name, slow=apart, goal=GOAL_ASYNC if name == ahead else None) for name in asynchronous
        ]
    return rows


def sync_row(name: str, times: Mapping[str, float]) -> dict[str, Any]:
    """Which part of a step the weights' way to the generators takes."""
    share = times["syncing"] / times["step"]
    return {
        "what": f"{name}: part of a step that weight sync takes",
        "ratio": share,
        "ratio_quartiles": None,
        "goal": GOAL_SYNC_SHARE,
        "sign": "<",
        "met": share < GOAL_SYNC_SHARE,
    }


# ---- time to an accuracy


def curve(windows: Sequence[Window]) -> list[Point]:
    """Where a side was before the first step and after each window."""
    seconds, samples, points = 0.0, 0, []
    for number, window in enumerate(windows):
        if number:  # the first one says only where the side begins
            seconds += window["seconds"]
            samples += window["samples"]
        points.append((seconds, samples, float(window["accuracy"])))
    return points


def reached(points: Sequence[Sequence[float]], goal: float) -> tuple[float, int] | None:
    """Seconds and samples at the first evaluation that meets the goal; None if none does."""
    return next(((seconds, int(samples)) for seconds, samples, accuracy in points if accuracy >= goal), None)


def time_row(curves: Mapping[str, Sequence[Sequence[Point]]], *, ours: str, peer: str, goal: float) -> dict[str, Any]:
    """Our time to an accuracy as a part of TRL's, seed by seed: the median and the quartiles.

    A run of TRL's that never gets there counts with all its time. A run of ours that does not has no ratio, and neither
    has the median if it is among the better half.
    """
    ratios = []
    for mine, its in zip(curves[ours], curves[peer], strict=True):
        found, other = reached(mine, goal), reached(its, goal)
        ratios.append(math.inf if found is None else found[0] / (its[-1][0] if other is None else other[0]))
    is_known = all(math.isfinite(ratio) for ratio in ratios)
    low, median, high = quartiles(sorted(ratios)) if is_known else (0.0, statistics.median_high(ratios), 0.0)
    return {
        "what": f"{ours}: time to {goal:.0%} held-out, as a part of that of {peer}",
        "ratio": median if math.isfinite(median) else None,
        "ratio_quartiles": [low, high] if is_known else None,
        "goal": GOAL_TIME,
        "sign": "≤",
        "met": median <= GOAL_TIME,
    }


def only_the_best(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows, of which only the lowest ratio is held to the goal: the others are given to compare."""
    known = [row["ratio"] for row in rows if row["ratio"] is not None]
    best = min(known, default=None)
    return [row if row["ratio"] == best else {**row, "goal": None, "met": None} for row in rows]


# ---- what is printed


def report(found: Mapping[str, Any]) -> str:
    """Everything, as Markdown."""
    parts = [_described(found)]
    if found.get("sides"):
        parts.append(_sides_table(found["sides"]))
    parts.append(_rows_table(found["rows"]))
    if found.get("curves"):
        parts.append(_curves_table(found["curves"], found["time_plan"]["goal"]))
    return "\n\n".join(parts)


def _described(found: Mapping[str, Any]) -> str:
    plan, data, timed = found["plan"], found["data"], found.get("time_plan")
    lines = [
        f"{data['parameters'] / 1e6:.1f} M weights, float32, {plan['num_prompts']} prompts x {plan['group_size']} "
        f"completions a step; {data['num_train']} questions to learn from, {data['num_heldout']} held out"
    ]
    if found.get("sides"):
        lines.append(
            f"speed: {plan['max_tokens']} tokens a completion, {plan['num_rounds']} windows of {plan['window']}"
        )
    if timed:
        lines.append(f"time: at most {timed['max_tokens']} tokens, held-out questions every {timed['window']} steps")
    return "; ".join(lines)


def _sides_table(sides: Mapping[str, Mapping[str, Any]]) -> str:
    head = ("", "samples/s (best)", "samples per CPU second", "tokens a sample", "step: training / generating / sync")
    lines = []
    for name, side in sides.items():
        times = side["last"].get("times")
        split = "" if not times else " / ".join(f"{times[key]:.2f} s" for key in ("training", "generating", "syncing"))
        lines.append(
            (
                name,
                f"{side['samples_per_s']:.1f} ({side['samples_per_s_best']:.1f})",
                f"{side['samples_per_cpu_s']:.1f}",
                f"{side['tokens_per_sample']:.1f}",
                split,
            )
        )
    return table(head, lines)


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        spread = row["ratio_quartiles"]
        value = "not reached" if row["ratio"] is None else f"{row['ratio']:.3g}"
        shown = value if spread is None else f"{value} ({spread[0]:.2f}–{spread[1]:.2f})"
        lines.append((row["what"], shown, verdict(dict(row), row["sign"])))
    return table(("", "ratio (quartiles)", "goal"), lines)


def _curves_table(curves: Mapping[str, Sequence[Sequence[Sequence[float]]]], goal: float) -> str:
    lines = []
    for name, runs in curves.items():
        found = [reached(points, goal) for points in runs]
        shown = ["not reached" if each is None else f"{each[0]:.1f} s, {each[1]:,} samples" for each in found]
        lines.append((name, f"{runs[0][0][2]:.1%}", "; ".join(shown)))
    return table(("held-out", "start", f"{goal:.0%} reached after, seed by seed"), lines)
