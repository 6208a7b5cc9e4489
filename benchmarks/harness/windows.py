"""Rates of calls, measured in short windows that alternate between the things compared.

On a shared machine the rate of one and the same program drifts by a factor of two within a minute. Two windows that
follow each other see nearly the same machine, so the ratio of neighbours says more than the ratio of averages. Only the
standard library is used here: this file also runs in the environments of peers.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


async def count_calls(call: Callable[[int], Awaitable[Any]], *, num_callers: int, seconds: float) -> tuple[int, float]:
    """Call from `num_callers` tasks for `seconds`; how many calls were answered, and when the last one was."""
    count = 0
    began = time.perf_counter()
    end = began + seconds

    async def caller() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await call(count)
            count += 1

    await asyncio.gather(*(caller() for _ in range(num_callers)))
    return count, time.perf_counter() - began


@dataclass(frozen=True)
class Window:
    """One short measurement of one side."""

    calls: int
    seconds: float
    caller_cpu_s: float
    total_cpu_s: float
    caller_growth_b: int

    @property
    def rate(self) -> float:
        return self.calls / self.seconds


Measure = Callable[[int, float], Awaitable[tuple[int, float]]]


@dataclass(frozen=True)
class Side:
    """One of the things compared: how to measure it, and whose CPU time it costs (the calling process first)."""

    name: str
    measure: Measure
    pids: tuple[int, ...]


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used so far, to the nanosecond: Linux gives every process such a clock."""
    return time.clock_gettime((~pid << 3) | 2)


def resident_b(pid: int) -> int:
    """Bytes of memory that a process holds now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def calling(call: Callable[[int], Awaitable[Any]]) -> Measure:
    async def measure(num_callers: int, seconds: float) -> tuple[int, float]:
        return await count_calls(call, num_callers=num_callers, seconds=seconds)

    return measure


def cpu_each_s(pids: Sequence[int]) -> dict[int, float]:
    """CPU seconds of each of the processes that still run: a peer's idle helpers may end at any time."""
    return {pid: cpu_s(pid) for pid in pids if Path(f"/proc/{pid}").exists()}


async def take_window(side: Side, num_callers: int, seconds: float) -> Window:
    caller = side.pids[0]
    held_b, before = resident_b(caller), cpu_each_s(side.pids)
    calls, took_s = await side.measure(num_callers, seconds)
    spent = {pid: now - before[pid] for pid, now in cpu_each_s(side.pids).items() if pid in before}
    return Window(calls, took_s, spent[caller], sum(spent.values()), resident_b(caller) - held_b)


async def alternate(
    sides: Sequence[Side], *, num_callers: int, num_rounds: int, window_s: float
) -> dict[str, list[Window]]:
    """Windows of each side, taken in turns whose order is reversed every round; one round first to warm up."""
    taken: dict[str, list[Window]] = {side.name: [] for side in sides}
    for number in range(num_rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            window = await take_window(side, num_callers, window_s)
            if number:
                taken[side.name].append(window)
    return taken


def summary(windows: Sequence[Window]) -> dict[str, float]:
    calls = sum(window.calls for window in windows)
    return {
        "rate": statistics.median(window.rate for window in windows),
        "rate_best": max(window.rate for window in windows),
        "caller_cpu_us": 1e6 * sum(window.caller_cpu_s for window in windows) / calls,
        "total_cpu_us": 1e6 * sum(window.total_cpu_s for window in windows) / calls,
        "caller_growth_b": sum(window.caller_growth_b for window in windows) / calls,
    }


def compare(what: str, ours: Sequence[Window], peer: Sequence[Window], *, goal: float | None = None) -> dict[str, Any]:
    """One row: both sides, and the ratio of their rates over neighbouring windows (larger is better for us)."""
    ratios = [mine.rate / its.rate for mine, its in zip(ours, peer, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    mine, its = summary(ours), summary(peer)
    return {
        "what": what,
        "ours": mine,
        "peer": its,
        "ratio": median,
        "ratio_quartiles": [low, high],
        "ratio_best": mine["rate_best"] / its["rate_best"],
        "cpu_ratio": its["total_cpu_us"] / mine["total_cpu_us"],
        "goal": goal,
        "met": None if goal is None else median >= goal,
        "rates": {"ours": [window.rate for window in ours], "peer": [window.rate for window in peer]},
    }


def spread(what: str, seconds: Sequence[float], *, goal: float | None = None) -> dict[str, Any]:
    median, worst = statistics.median(seconds), max(seconds)
    met = None if goal is None else median < goal
    return {"what": what, "median_s": median, "worst_s": worst, "goal": goal, "met": met, "seconds": list(seconds)}
