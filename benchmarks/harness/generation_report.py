"""What `generation.py` found, compared and as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness.report import number, table, verdict
from harness.throughput import quartiles

Windows = Sequence[Mapping[str, Any]]


def summary(windows: Windows) -> dict[str, Any]:
    rates = [window["tokens"] / window["seconds"] for window in windows]
    tokens = sum(window["tokens"] for window in windows)
    return {
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_best": max(rates),
        "tokens_per_cpu_s": tokens / max(1e-9, sum(window["cpu_seconds"] for window in windows)),
        "windows": list(windows),
    }


def compare(ours: Windows, peer: Windows, *, goal: float | None) -> dict[str, Any]:
    """How much faster we are, from neighbouring windows."""
    rates = [[window["tokens"] / window["seconds"] for window in side] for side in (ours, peer)]
    low, median, high = quartiles(sorted(mine / its for mine, its in zip(*rates, strict=True)))
    met = None if goal is None else median >= goal
    return {"ratio": median, "ratio_quartiles": [low, high], "goal": goal, "met": met}


def update_row(found: Mapping[str, Any], *, has_goal: bool) -> dict[str, Any]:
    """What an update holds up, against one step and a plain copy of the same weights."""
    step, copy = found["step_s"], statistics.median(found["copies_s"])
    stall = statistics.median(found["longest_gaps_s"]) - step
    goal = step + copy if has_goal else None
    return {"stall_s": stall, "copy_s": copy, "goal": goal, "met": None if goal is None else stall < goal, **found}


def throughput_table(sides: Mapping[str, Mapping[str, Any]], rows: Mapping[str, Mapping[str, Any]]) -> str:
    head = ("", "tokens/s (best)", "tokens per CPU second", "native is faster by (quartiles)", "goal")
    lines = []
    for name, side in sides.items():
        row = rows.get(name)
        ratio = ""
        if row is not None:
            low, high = row["ratio_quartiles"]
            ratio = f"{row['ratio']:.2f} ({low:.2f}–{high:.2f})"
        rate = f"{side['tokens_per_s']:,.0f} ({side['tokens_per_s_best']:,.0f})"
        goal = "" if row is None else verdict(dict(row), "≥")
        lines.append((name, rate, f"{side['tokens_per_cpu_s']:,.0f}", ratio, goal))
    return table(head, lines)


def start_table(starts: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    head = ("", "from the process's start to the first token", "imports", "model loaded, first token made")
    keys = ("spawn_to_first_s", "imports_s", "load_to_first_s")
    lines = [
        (name, *(f"{statistics.median(each[key] for each in found):.1f} s" for key in keys))
        for name, found in starts.items()
    ]
    return table(head, lines)


def update_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    head = (
        "",
        "step, ms",
        "longest gap between two steps, ms",
        "held up by the update for, ms",
        "engine's own figure, ms",
        "plain copy, ms",
        "whole update, ms",
        "publication, ms",
        "goal: held up for less than a step and a copy",
    )
    lines = []
    for name, row in rows.items():
        middle = {key: statistics.median(row[key]) for key in ("longest_gaps_s", "stalls_s", "updates_s")}
        figures = (
            row["step_s"],
            middle["longest_gaps_s"],
            row["stall_s"],
            middle["stalls_s"],
            row["copy_s"],
            middle["updates_s"],
            statistics.median(row["publications_s"]),
        )
        shown = [number(1e3 * value) for value in figures]
        goal = ""
        if row["goal"] is not None:
            goal = f"< {number(1e3 * row['goal'])} ms: {'met' if row['met'] else 'missed'}"
        lines.append((name, *shown, goal))
    return table(head, lines)
