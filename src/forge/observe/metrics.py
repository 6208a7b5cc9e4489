"""`record_metric`: metrics from anywhere in a run, kept as states that merge.

A process keeps one small state for each key, not the values: a sum and a count, an extreme, or the moments of a
standard deviation. `forge.runtime.collect` takes the states of every process and merges them, so that a mean over
replicas of different load is the mean of all values, and not a mean of means.
"""

from __future__ import annotations

import enum
import math
import operator
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

from forge.errors import DataError

MAX_KEYS = 10_000
"""How many keys a process may use. More come from a key that is made of data, and would fill the memory."""

_KEY = re.compile(r"[\w.@%+=:,\[\]-]+(/[\w.@%+=:,\[\]-]+)*", re.ASCII)
_MAX_KEY = 200
NONFINITE = "nonfinite/"
"""Comes before a key where its values that are NaN or infinite are counted."""


class Reduce(enum.Enum):
    """What becomes of the values of one key, over time, ranks and replicas, until they are collected."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"
    """Of all values, dividing by their number; 0 for one value."""
    COUNT = "count"
    """How often it was recorded, whatever the values."""


class Partial:
    """The values of one key that one process has recorded. Partials of the same `reduce` merge, in any order."""

    __slots__ = ("num", "num_nonfinite", "total")
    reduce: ClassVar[Reduce] = Reduce.SUM
    start: ClassVar[float] = 0.0
    combine: ClassVar[Callable[..., Any]] = operator.add

    def __init__(self) -> None:
        self.num = self.num_nonfinite = 0
        self.total = self.start

    def add(self, value: float) -> None:
        """Take one value. One that is not finite is counted separately and changes nothing else."""
        if value - value == 0.0:
            self.num += 1
            self.total = type(self).combine(self.total, value)
        else:
            self.num_nonfinite += 1

    def merge(self, other: Self) -> None:
        """Take everything that `other`, of the same class, has taken."""
        self.num += other.num
        self.num_nonfinite += other.num_nonfinite
        self.total = type(self).combine(self.total, other.total)

    def value(self) -> float | None:
        """Return the reduced value; None if no value was finite."""
        return self.total if self.num else None


class MeanPartial(Partial):
    __slots__ = ()
    reduce = Reduce.MEAN

    def value(self) -> float | None:
        return self.total / self.num if self.num else None


class CountPartial(Partial):
    __slots__ = ()
    reduce = Reduce.COUNT

    def add(self, value: float) -> None:
        self.num += 1

    def value(self) -> float | None:
        return float(self.num) if self.num else None


class MaxPartial(Partial):
    __slots__ = ()
    reduce, start, combine = Reduce.MAX, -math.inf, max


class MinPartial(Partial):
    __slots__ = ()
    reduce, start, combine = Reduce.MIN, math.inf, min


class StdPartial(Partial):
    """Welford's running moments, which stay exact where a sum of squares would cancel; Chan's rule merges them."""

    __slots__ = ("mean", "squares")
    reduce = Reduce.STD

    def __init__(self) -> None:
        super().__init__()
        self.mean = self.squares = 0.0

    def add(self, value: float) -> None:
        if value - value == 0.0:
            self.num += 1
            away = value - self.mean
            self.mean += away / self.num
            self.squares += away * (value - self.mean)
        else:
            self.num_nonfinite += 1

    def merge(self, other: Self) -> None:
        if other.num:
            num, away = self.num + other.num, other.mean - self.mean
            self.squares += other.squares + away * away * self.num * other.num / num
            self.mean += away * other.num / num
        super().merge(other)

    def value(self) -> float | None:
        return math.sqrt(self.squares / self.num) if self.num else None


_PARTIALS = {kind.reduce: kind for kind in (MeanPartial, Partial, MaxPartial, MinPartial, StdPartial, CountPartial)}
Partials = dict[str, Partial]


class Recorder:
    """The metrics of one process. Any thread may record; `drain` gives what there is and begins anew.

    The lock may be taken twice by one thread: a signal handler that records must not wait for what it interrupted.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._partials: Partials = {}
        self._reduces: dict[str, Reduce] = {}

    def record(self, key: str, value: float, reduce: Reduce = Reduce.MEAN) -> None:
        if type(value) is not float:
            value = _number(key, value)
        with self._lock:
            partial = self._partials.get(key)
            if partial is None or partial.reduce is not reduce:
                partial = self._open(key, reduce)
            partial.add(value)

    def drain(self) -> Partials:
        """Return every state since the last call. What each key is reduced by is remembered."""
        with self._lock:
            partials, self._partials = self._partials, {}
            return partials

    def _open(self, key: str, reduce: Reduce) -> Partial:
        known = self._reduces.get(key)
        if known is None:
            _check(key, reduce, len(self._reduces))
            self._reduces[key] = reduce
        elif known is not reduce:
            raise two_reduces(key, known, reduce)
        partial = self._partials[key] = _PARTIALS[reduce]()
        return partial


def reduced(parts: Iterable[Mapping[str, Partial]]) -> dict[str, float]:
    """Return the metrics of all processes together, by key.

    A key whose values were all NaN or infinite has no metric. Each key with such values has their number beside it, as
    `nonfinite/<key>`. The partials are changed: give each to one call.
    """
    merged: Partials = {}
    for part in parts:
        for key, partial in part.items():
            first = merged.setdefault(key, partial)
            if first.reduce is not partial.reduce:
                raise two_reduces(key, first.reduce, partial.reduce)
            if first is not partial:
                first.merge(partial)
    metrics = {key: value for key, partial in merged.items() if (value := partial.value()) is not None}
    odd = {f"{NONFINITE}{key}": float(part.num_nonfinite) for key, part in merged.items() if part.num_nonfinite}
    return metrics | odd


def two_reduces(key: str, known: Reduce, other: Reduce) -> DataError:
    """Return the error for a key with two ways to reduce it."""
    return DataError(
        f"the metric {key!r} is recorded with Reduce.{other.name}, and elsewhere with Reduce.{known.name}",
        path=key,
        value=f"Reduce.{other.name}",
        rule=f"one way to reduce each key in the whole run; this one has Reduce.{known.name}",
        repair=f"give one of them another key, such as {key}_{other.value}",
    )


def _number(key: str, value: object) -> float:
    """Return the value as a float. Numbers of Python and numpy and tensors of one element are taken; text is not."""
    cause: Exception | None = None
    if not isinstance(value, str | bytes | bytearray):
        try:
            return float(value)  # type: ignore[arg-type]
        except OverflowError:
            return math.inf
        except (TypeError, ValueError, RuntimeError) as error:
            cause = error
    raise DataError(
        "the value of a metric is not a number",
        path=str(key),
        value=value,
        rule="one number: a float, an int, or a tensor of one element",
        repair="reduce it to one number first, such as by .mean().item()",
    ) from cause


def _check(key: object, reduce: object, num_keys: int) -> None:
    if not isinstance(key, str) or len(key) > _MAX_KEY or _KEY.fullmatch(key) is None or key.startswith(NONFINITE):
        raise DataError(
            "this is not a valid metric key",
            path="record_metric(key)",
            value=key,
            rule=f"words of letters, digits and _.@%+=:,[]- joined by /, {_MAX_KEY} characters at most, and not "
            f"beginning with {NONFINITE}",
            repair="write it like rollout/reward_mean",
        )
    if not isinstance(reduce, Reduce):
        raise DataError(
            f"the metric {key!r} cannot be reduced this way",
            path=key,
            value=reduce,
            rule=f"one of {', '.join(f'Reduce.{each.name}' for each in Reduce)}",
            repair="write Reduce.MEAN, or leave it out",
        )
    if num_keys >= MAX_KEYS:
        raise DataError(
            f"there are already {num_keys} keys of metrics in this process",
            path=key,
            value=num_keys + 1,
            rule=f"at most {MAX_KEYS} keys, because each one is a separate curve",
            repair="do not put ids, such as a prompt's, into a key",
        )


_recorder = Recorder()


def _begin_anew() -> None:
    """Start without metrics in a forked child; its parent reports those from before."""
    global _recorder
    _recorder = Recorder()


os.register_at_fork(after_in_child=_begin_anew)


def record_metric(key: str, value: float, reduce: Reduce = Reduce.MEAN) -> None:
    """Note one value of a metric, in any process and any thread of a run.

    It costs about a microsecond and never blocks. The values of all processes since the last step come together
    as `reduce` says when the loop calls `forge.runtime.collect.collect`. A value that is NaN or infinite is counted as
    `nonfinite/<key>` and does not spoil the rest. A key has one `Reduce` in the whole run: another one is a
    `DataError`, as is a key or value that is none.

    Example:
        >>> record_metric("reward/format", 1.0)
        >>> record_metric("generator/num_requests", 1, Reduce.COUNT)
    """
    _recorder.record(key, value, reduce)


def drain_metrics() -> Partials:
    """Return what this process has recorded since the last call."""
    return _recorder.drain()
