"""How one process of a run is doing: what it uses, its gauges, and the faults that it has noticed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from forge.observe.clock import wall_s
from forge.observe.fault_records import FaultRecord, drain_faults
from forge.observe.gauges import read_gauges
from forge.observe.tracing import Process, this_process
from forge.observe.usage import ProcessUse, measure_use


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
        measure_use(except_for=except_for) if with_use else None,
        read_gauges() if with_use else {},
        tuple(drain_faults()),
    )
