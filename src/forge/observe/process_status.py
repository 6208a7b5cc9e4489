"""How one process of a run is doing: what it uses, its gauges, and the faults that it has noticed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from forge.observe.clock import wall_s
from forge.observe.fault_records import FaultRecord, drain_faults
from forge.observe.gauges import read_gauges
from forge.observe.tracing import Process, this_process
from forge.observe.usage import ProcessUse, measure_use

_log = logging.getLogger("forge.observe")
_has_failed = False


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """What a process says of itself when it is asked.

    Attributes:
        process: which it is.
        time: when, in seconds since 1970, by the clock of its host.
        use: what it uses; None where nobody asked for that, or it cannot be known.
        gauges: numbers that say how things are, by name; empty where nobody asked.
        faults: what it has noticed since it was asked last.
    """

    process: Process
    time: float
    use: ProcessUse | None = None
    gauges: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[FaultRecord, ...] = ()


def own_status(*, with_use: bool, except_for: Collection[int] = ()) -> ProcessStatus:
    """Return how this process is doing. `except_for` are child processes that answer for themselves."""
    return ProcessStatus(
        this_process(),
        wall_s(),
        _use(except_for) if with_use else None,
        read_gauges() if with_use else {},
        tuple(drain_faults()),
    )


def _use(except_for: Collection[int]) -> ProcessUse | None:
    """Return what this process uses; None where that cannot be known, which is logged once."""
    global _has_failed
    try:
        return measure_use(except_for=except_for)
    except Exception:  # noqa: BLE001 - the driver's own; a process that cannot be measured still reports
        if not _has_failed:
            _log.warning("what this process uses cannot be measured, and is left out", exc_info=True)
        _has_failed = True
        return None
