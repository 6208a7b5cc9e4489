"""Bytes per second, measured in turns with a peer that moves as many bytes in as many processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

LEAD_S = 0.02
"""How long before they begin the processes are told when."""


@dataclass(frozen=True)
class Span:
    """When one process did something: seconds of a clock that all processes of the machine share."""

    began: float
    ended: float
    cpu_s: float
    num_bytes: int
    extra: float = 0.0


@dataclass(frozen=True)
class Moved:
    """One window: everything that some processes moved at once."""

    num_bytes: int
    seconds: float
    cpu_s: float
    extra: float = 0.0

    @property
    def rate(self) -> float:
        return self.num_bytes / self.seconds


Window = Callable[[], Awaitable[Moved]]


def joined(spans: Sequence[Span]) -> Moved:
    """From the beginning of the first to the end of the last."""
    seconds = max(span.ended for span in spans) - min(span.began for span in spans)
    num_bytes, cpu_s = sum(span.num_bytes for span in spans), sum(span.cpu_s for span in spans)
    return Moved(num_bytes, seconds, cpu_s, max(span.extra for span in spans))


async def at_once(verb: Any, name: str, active: int, *args: Any) -> Moved:
    """Call an endpoint of all ranks, of which `active` begin at the same moment."""
    answers = await verb.call(name, active, time.perf_counter() + LEAD_S, *args)
    return joined([span for _, span in answers.items() if span is not None])


async def alternate(ours: Window, peer: Window, *, num_rounds: int, num_warm: int = 1) -> tuple[list[Moved], ...]:
    """Windows of both, in turns whose order is reversed every round; the first rounds only warm up."""
    taken: tuple[list[Moved], list[Moved]] = ([], [])
    for number in range(-num_warm, num_rounds):
        sides = ((0, ours), (1, peer))
        for side, measure in sides if number % 2 else sides[::-1]:
            moved = await measure()
            if number >= 0:
                taken[side].append(moved)
    return taken


def row(
    what: str,
    ours: Sequence[Moved],
    peer: Sequence[Moved],
    *,
    goal: float | None = None,
    torchstore: float | None = None,
) -> dict[str, Any]:
    """Rates in GB/s, and the ratio of neighbouring windows. `torchstore` is TorchStore's rate, from another run."""
    ratios = sorted(mine.rate / its.rate for mine, its in zip(ours, peer, strict=True))
    low, median, high = quartiles(ratios)
    return {
        "what": what,
        "num_bytes": ours[0].num_bytes,
        "ours": _summary(ours),
        "peer": _summary(peer),
        "ratio": median,
        "ratio_quartiles": [low, high],
        "extra_s": statistics.median(moved.extra for moved in ours),
        "torchstore": torchstore,
        "goal": goal,
        "met": None if goal is None else median >= goal,
    }


def _summary(windows: Sequence[Moved]) -> dict[str, Any]:
    num_bytes = sum(moved.num_bytes for moved in windows)
    return {
        "gbps": statistics.median(moved.rate for moved in windows) / 1e9,
        "gbps_best": max(moved.rate for moved in windows) / 1e9,
        "cpu_s_per_gb": sum(moved.cpu_s for moved in windows) / num_bytes * 1e9,
        "seconds": [moved.seconds for moved in windows],
    }


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return (values[0],) * 3
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def figure(
    what: str, value: float, unit: str, *, goal: float | None = None, sign: str = "<", torchstore: str = ""
) -> dict[str, Any]:
    """A row of one figure; `sign` says whether it must be below, at most or at least its goal."""
    fits = {"<": lambda: value < goal, "≤": lambda: value <= goal, "≥": lambda: value >= goal}  # type: ignore[operator]
    return {
        "what": what,
        "value": value,
        "unit": unit,
        "goal": goal,
        "sign": sign,
        "met": None if goal is None else fits[sign](),
        "torchstore": torchstore,
    }
