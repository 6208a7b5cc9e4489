"""`span`: who did what, when, and who waited for whom.

Each process keeps the spans that ended there, the newest `MAX_SPANS`, until they are collected. Tracing is off unless
`switch_tracing(True)` was called or the environment has `FORGE_TRACE=1`; actors that start then are on as well, and
those that run follow at the next `collect`.

Every span has a *lane*: spans of one lane follow or contain each other. Each asyncio task, and each thread where none
runs, has a lane of its own while it has a span open, named after the task or thread; the next one of that name takes
the lane over. A thousand short tasks, ten at a time, are ten lanes.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from forge.errors import DataError

TRACE: Final = "FORGE_TRACE"
"""The variable of the environment that switches tracing on: `1`."""

LABEL: Final = "FORGE_LABEL"
"""The variable that tells a rank the name of its mesh."""

MAX_SPANS: Final = 65_536
_MAX_TEXT = 200
_MAX_ARGS = 8

ArgValue = str | int | float | bool | None


class Ended(NamedTuple):
    """A span as its own process keeps it: times of the monotonic clock of its host, in nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    lane: str
    args: dict[str, ArgValue] | None


@dataclass(frozen=True, slots=True)
class Process:
    """Where spans come from. Two processes of one number, on two hosts, differ by `host`."""

    host: str
    pid: int
    name: str


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from `start_ns` to `end_ns`, in nanoseconds since 1970, on a clock that never goes back."""

    name: str
    start_ns: int
    end_ns: int
    process: Process
    lane: str
    args: dict[str, ArgValue] | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """What one process has traced since it was last asked.

    Attributes:
        boot: which boot of which kernel its monotonic clock counts from.
        epoch_ns: what the clock of 1970 said when that clock was 0.
        num_dropped: spans that were pushed out by newer ones.
    """

    process: Process
    boot: str
    epoch_ns: int
    ended: tuple[Ended, ...] = ()
    num_dropped: int = 0

    def spans(self, *, boot: str, epoch_ns: int) -> list[Span]:
        """Return its spans on the reader's clock: exact on the same host, else by the hosts' own clocks."""
        epoch_ns = epoch_ns if boot == self.boot else self.epoch_ns
        return [
            Span(name, start_ns + epoch_ns, end_ns + epoch_ns, self.process, lane, args)
            for name, start_ns, end_ns, lane, args in self.ended
        ]


class Tracer:
    """The spans of one process. Any thread may use it."""

    def __init__(self, *, max_spans: int = MAX_SPANS) -> None:
        self.is_on = False
        self._ended: deque[Ended] = deque(maxlen=max_spans)
        self._num_dropped = 0
        self._lock = threading.RLock()
        self._open: dict[object, _Lane] = {}
        self._taken: dict[str, set[int]] = {}

    def keep(self, span: Ended) -> None:
        with self._lock:
            self._num_dropped += len(self._ended) == self._ended.maxlen
            self._ended.append(span)

    def drain(self) -> tuple[tuple[Ended, ...], int]:
        """Return the spans that have ended, oldest first, and how many were dropped. Begins anew."""
        with self._lock:
            ended, num_dropped = tuple(self._ended), self._num_dropped
            self._ended.clear()
            self._num_dropped = 0
        return ended, num_dropped

    def enter_lane(self) -> _Lane:
        """Return the lane of the task or thread that calls. Each call needs a `leave_lane`."""
        owner, name = _current_owner()
        with self._lock:
            lane = self._open.get(owner)
            if lane is None:
                lane = self._open[owner] = self._take(owner, _family(name))
            lane.depth += 1
            return lane

    def leave_lane(self, lane: _Lane) -> None:
        with self._lock:
            lane.depth -= 1
            if lane.depth == 0:
                self._open.pop(lane.owner, None)
                taken = self._taken[lane.family]
                taken.discard(lane.slot)
                if not taken:
                    del self._taken[lane.family]

    def _take(self, owner: object, family: str) -> _Lane:
        taken = self._taken.setdefault(family, set())
        slot = next(number for number in range(1, len(taken) + 2) if number not in taken)
        taken.add(slot)
        return _Lane(owner, family, slot)


class _Lane:
    """A lane in use: who has it, and how many of its spans are open."""

    __slots__ = ("depth", "family", "name", "owner", "slot")

    def __init__(self, owner: object, family: str, slot: int) -> None:
        self.owner, self.family, self.slot, self.depth = owner, family, slot, 0
        self.name = family if slot == 1 else f"{family} {slot}"


def _current_owner() -> tuple[object, str]:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is not None:
        return task, task.get_name()
    thread = threading.current_thread()
    return thread, thread.name


@functools.lru_cache(maxsize=4096)
def _family(name: str) -> str:
    """Return the name without the number that tells it from its like: `Task-12` is a `Task`."""
    return name.rstrip("0123456789").rstrip("-_ ") or name


class OpenSpan:
    """A span that lasts as long as its `with` block."""

    __slots__ = ("_args", "_lane", "_name", "_start_ns", "_tracer")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, object]) -> None:
        self._tracer, self._name, self._args = tracer, name, args

    def __enter__(self) -> None:
        self._lane = self._tracer.enter_lane()
        self._start_ns = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end_ns = time.monotonic_ns()
        if kind is not None:
            self._args["error"] = kind.__name__
        self._tracer.keep(Ended(self._name, self._start_ns, end_ns, self._lane.name, _plain(self._args)))
        self._tracer.leave_lane(self._lane)


class _NoSpan:
    """What `span` gives while tracing is off."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


def _plain(args: dict[str, object]) -> dict[str, ArgValue] | None:
    """Return arguments that can be pickled and written: numbers and short texts, few of them."""
    plain: dict[str, ArgValue] = {}
    for name, value in list(args.items())[-_MAX_ARGS:]:
        if type(value) in (int, float, bool) or value is None:
            plain[name] = value  # type: ignore[assignment]
        else:
            text = value if isinstance(value, str) else repr(value)
            plain[name] = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
    return plain or None


_NO_SPAN = _NoSpan()
_tracer = Tracer()
_EPOCH_NS = time.time_ns() - time.monotonic_ns()
ORIGIN_NS: Final = time.time_ns()
"""When this module was loaded, which is before this process traced anything or started another that could."""


def read_environment() -> None:
    """Take from the environment whether this process is traced, and its name. A fork of a fork server calls it again,
    since its environment is another one than when this module was loaded."""
    _tracer.is_on = os.environ.get(TRACE) == "1"
    this_process.cache_clear()


def _begin_anew() -> None:
    """Start without spans in a forked child."""
    global _tracer
    is_on, _tracer = _tracer.is_on, Tracer()
    _tracer.is_on = is_on
    this_process.cache_clear()


os.register_at_fork(after_in_child=_begin_anew)


def span(name: str, /, **args: object) -> OpenSpan | _NoSpan:
    """Trace what the block does, awaits included. Next to no cost while tracing is off.

    `args` are shown beside the span: numbers and texts as they are, anything else by its `repr`, cut to 200 characters.
    If the block raises, the argument `error` names the class of what it raised.

    Example:
        >>> with span("score", num_completions=8):
        ...     scores = await reward.score.route(prompt, completions)
    """
    return OpenSpan(_tracer, name, args) if _tracer.is_on else _NO_SPAN


def switch_tracing(on: bool) -> None:
    """Switch tracing on or off in this process, and in every actor that it has, from their next `collect` on."""
    if not isinstance(on, bool):
        raise DataError(
            "tracing is on or off",
            path="switch_tracing(on)",
            value=on,
            rule="true or false",
            repair="switch_tracing(True)",
        )
    _tracer.is_on = on


def is_tracing() -> bool:
    return _tracer.is_on


@functools.cache
def this_process() -> Process:
    """Return this process, named after its mesh and rank; one that no mesh has is the controller."""
    label, num_ranks = os.environ.get(LABEL), int(os.environ.get("WORLD_SIZE", "1"))
    name = "controller" if label is None else label
    if label is not None and num_ranks > 1:
        name = f"{label} rank {os.environ.get('RANK', '0')}"
    return Process(socket.gethostname(), os.getpid(), name)


@functools.cache
def _boot() -> str:
    """Tells whether two processes have the same monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # unknown: every process has its own


def drain_trace() -> Trace:
    """Return what this process has traced since the last call."""
    ended, num_dropped = _tracer.drain()
    return Trace(this_process(), _boot(), _EPOCH_NS, ended, num_dropped)


def spans_of(traces: list[Trace]) -> list[Span]:
    """Return the spans of several processes on this process's clock, in the order in which they began."""
    spans = [span for trace in traces for span in trace.spans(boot=_boot(), epoch_ns=_EPOCH_NS)]
    return sorted(spans, key=lambda span: span.start_ns)


read_environment()
