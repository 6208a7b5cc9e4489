"""`collect`: the metrics and spans of every process of a run, brought together once a step.

Each actor answers the hidden call `_forge_observations` with what it has recorded since it was last asked, and begins
anew. A query stays open until every rank has answered: one that is late answers into the next `collect`, so that
only what a process had not been asked for dies with it. An actor that has actors of its own asks them first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from forge.observe.fault_records import FaultRecord
from forge.observe.metrics import Partials, drain_metrics, reduced
from forge.observe.process_status import ProcessStatus, own_status
from forge.observe.tracing import Span, Trace, drain_trace, is_tracing, spans_of, switch_tracing
from forge.runtime.control import control, post
from forge.runtime.group import RankGroup, live_groups
from forge.runtime.option_checks import check_seconds
from forge.runtime.replies import OK, Outbox, reply_channel
from forge.runtime.serialization import decode

_log = logging.getLogger("forge.runtime")


class Report(NamedTuple):
    """What one process has recorded since it was last asked, and how it is doing."""

    metrics: Partials
    trace: Trace
    status: ProcessStatus


@dataclass(frozen=True, slots=True)
class Observations:
    """What a run has recorded since it was last collected.

    Attributes:
        metrics: the metrics, each reduced over all processes by its own rule; see `record_metric`.
        spans: what was traced, for `TraceFile.write`; empty while tracing is off.
        unheard: which processes said nothing, by name, and why. A late one's metrics come with a later `collect`.
        num_processes: how many reports these are made of, this process's own included.
        num_dropped_spans: spans that were pushed out by newer ones before they could be collected.
        processes: how each process is doing; what it uses only with `collect(use=True)`.
    """

    metrics: dict[str, float]
    spans: list[Span]
    unheard: Mapping[str, str] = field(default_factory=dict)
    num_processes: int = 1
    num_dropped_spans: int = 0
    processes: tuple[ProcessStatus, ...] = ()

    @property
    def faults(self) -> list[FaultRecord]:
        """What processes have noticed that went wrong, in order."""
        return sorted((fault for each in self.processes for fault in each.faults), key=lambda fault: fault.time)


class _Query:
    """A query to one group, which not every rank has answered yet. Lives on the control loop."""

    def __init__(self, group: RankGroup, reports: _Reports) -> None:
        self.group, self._reports = group, reports
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, also if not awaited
        self.answered: set[int] = set()
        self.is_overdue = False
        self.call_id = reply_channel().enter(self)
        group.calls.add(self.done, self._loop)

    def take(self, rank: int, kind: int, payload: bytes) -> bool:
        """Post an answer to the control loop; called on the reply channel's thread."""
        return post(self._loop, self._note, rank, kind, payload)

    def _note(self, rank: int, kind: int, payload: bytes) -> None:
        self.answered.add(rank)
        if kind == OK:
            self._reports.add(decode(payload))
        else:
            _log.error("%s could not report its metrics", self._name(rank), exc_info=decode(payload))
        if len(self.answered) == len(self.group.pids) and not self.done.done():
            self.done.set_result(None)

    def end(self) -> None:
        """Stop waiting. Answers that still come are taken until the channel forgets the query."""
        self.group.calls.discard(self.done)

    def missing(self) -> list[str]:
        """Return the names of the ranks that have not answered."""
        return [self._name(rank) for rank in range(len(self.group.pids)) if rank not in self.answered]

    def _name(self, rank: int) -> str:
        label = self.group.spec.label
        return label if len(self.group.pids) == 1 else f"{label} rank {rank}"


class _Reports:
    """Reports that have arrived and were not taken yet. Added on the control loop, taken anywhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: list[Report] = []

    def add(self, reports: list[Report]) -> None:
        with self._lock:
            self._reports += reports

    def take(self) -> list[Report]:
        with self._lock:
            reports, self._reports = self._reports, []
            return reports


class Collector:
    """Queries the actors that this process has started. Everything but `reports` lives on the control loop."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.reports = _Reports()
        self._asked: dict[RankGroup, _Query] = {}
        self._connected: weakref.WeakSet[RankGroup] = weakref.WeakSet()
        self._lost: list[int] = []

    @property
    def is_needed(self) -> bool:
        """Whether there is an actor to query, or an answer to wait for."""
        return bool(self._asked or live_groups())

    @property
    def pids(self) -> set[int]:
        """The processes of actors that this process has started, on this host or another."""
        return {pid for group in live_groups() for _, pid in group.pids}

    async def gather(self, timeout_s: float, *, use: bool = False) -> dict[str, str]:
        """Query every actor and wait for the answers. Return which have not answered, and why. With `use` they say
        what they use of their machines.

        An actor that was too late for an earlier call is not waited for again.
        """
        channel = reply_channel()
        while self._lost:
            channel.close(self._lost.pop())
        self._close_finished(timeout_s)
        for group in live_groups():
            if group not in self._asked:
                self._ask(group, timeout_s, use=use)
        waiting = [query.done for query in self._asked.values() if not query.is_overdue]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        return self._close_finished(timeout_s)

    def _ask(self, group: RankGroup, timeout_s: float, *, use: bool) -> None:
        channel, query = reply_channel(), _Query(group, self.reports)
        self._asked[group] = query
        if query.done.done():
            return  # it has just died
        if group not in self._connected:
            self._connected.add(group)
            group.actor._forge_connect.broadcast(channel.caller, channel.port)
        group.actor._forge_observations.broadcast(channel.caller, query.call_id, is_tracing(), timeout_s, use)

    def _close_finished(self, timeout_s: float) -> dict[str, str]:
        """Close the queries that were answered or lost; the rest are late."""
        unheard: dict[str, str] = {}
        for group, query in list(self._asked.items()):
            if not query.done.done():
                unheard.update(dict.fromkeys(query.missing(), f"did not answer within {timeout_s:g} s"))
                if not query.is_overdue:
                    query.is_overdue = True
                    _log.warning(
                        "%s did not report within %g s; its metrics are counted when it answers",
                        ", ".join(query.missing()),
                        timeout_s,
                    )
                continue
            del self._asked[group]
            query.end()
            failure = query.done.exception()
            if failure is None:
                reply_channel().close(query.call_id)
            else:  # its last answer may still be on its way
                self._lost.append(query.call_id)
                unheard.update(dict.fromkeys(query.missing(), str(getattr(failure, "message", failure))))
        return unheard


_the_collector: Collector | None = None
_guard = threading.Lock()
_answers: set[asyncio.Task[None]] = set()


def _collector() -> Collector:
    """Return this process's collector."""
    global _the_collector
    with _guard:
        if _the_collector is None or _the_collector.pid != os.getpid():
            _the_collector = Collector()
        return _the_collector


async def collect(*, timeout_s: float = 5.0, use: bool = False) -> Observations:
    """Take what this process and all its live actors and replicas have recorded, and reduce it. With `use` they also
    say what they use of their machines, and read their gauges.

    Call it once a step. Every value is in exactly one result. A process that does not answer within `timeout_s` is
    named in `unheard` and not waited for again; what it has recorded is in the first result after it answers. If one
    died, what it had recorded since the last call is lost, and nothing else is.
    """
    check_seconds("timeout_s", timeout_s, where="collect")
    collector = _collector()
    unheard = await control().submit(collector.gather(timeout_s, use=use)) if collector.is_needed else {}
    reports = [_own_report(use=use), *collector.reports.take()]
    traces = [report.trace for report in reports]
    return Observations(
        reduced(report.metrics for report in reports),
        spans_of(traces),
        unheard,
        len(reports),
        sum(trace.num_dropped for trace in traces),
        tuple(report.status for report in reports),
    )


def _own_report(*, use: bool) -> Report:
    return Report(drain_metrics(), drain_trace(), own_status(with_use=use, except_for=_collector().pids if use else ()))


def answer(outbox: Outbox, call_id: int, *, tracing: bool, timeout_s: float, use: bool) -> None:
    """Answer the controller's query, in an actor, and trace from now on if the controller does."""
    switch_tracing(tracing)
    collector = _collector()
    if not collector.is_needed:
        outbox.send(call_id, OK, [_own_report(use=use)])
        return
    task = asyncio.get_running_loop().create_task(_answer_for_all(collector, outbox, call_id, timeout_s, use=use))
    _answers.add(task)
    task.add_done_callback(_answers.discard)


async def _answer_for_all(collector: Collector, outbox: Outbox, call_id: int, timeout_s: float, *, use: bool) -> None:
    await control().submit(collector.gather(timeout_s * 0.8, use=use))  # so that this answer is still in time
    outbox.send(call_id, OK, [_own_report(use=use), *collector.reports.take()])
