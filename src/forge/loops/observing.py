"""What a run writes about its processes: the trace, what they use, and what went wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge.config.record import ObserveConfig
from forge.observe import is_tracing, switch_tracing
from forge.observe.fault_records import FILE_NAME as FAULTS
from forge.observe.fault_records import FaultFile, drain_faults, record_fault
from forge.observe.system_log import FILE_NAME as SYSTEM
from forge.observe.system_log import SystemLog
from forge.observe.trace_file import TraceFile
from forge.observe.tracing import drain_trace
from forge.runtime.collect import collect

TRACE = "trace.json"


@contextmanager
def tracing(is_on: bool) -> Iterator[None]:
    """Switch tracing on or off inside the block, and forget the spans that are left at its end."""
    was_on = is_tracing()
    switch_tracing(is_on)
    try:
        yield
    finally:
        switch_tracing(was_on)
        if not was_on:
            drain_trace()


class RunObserver:
    """The files `trace.json`, `system.jsonl` and `faults.jsonl` of one run. What an earlier run in the folder wrote
    after `resume_step` is moved aside."""

    def __init__(self, folder: Path, config: ObserveConfig, *, resume_step: int | None) -> None:
        self._step = resume_step or 0
        self._trace = TraceFile(folder / TRACE, resume_step=resume_step) if config.trace else None
        self._system: SystemLog | None = None
        if config.system_interval_s is not None:
            self._system = SystemLog(
                folder / SYSTEM,
                interval_s=config.system_interval_s,
                resume_step=resume_step,
                max_bytes=int(config.system_max_mb * 2**20),
            )
        self._faults = FaultFile(folder / FAULTS, is_resumed=resume_step is not None)

    async def after_step(self, step: int) -> dict[str, float]:
        """Collect what all processes have recorded since the last call, and write it. Return their metrics."""
        self._step = step
        observed = await collect(use=self._system is not None and self._system.is_due)
        if self._trace is not None:
            self._trace.write(observed.spans)
        if self._system is not None:
            self._system.write(step, observed.processes)
            if self._system.is_full:
                await asyncio.to_thread(self._system.thin)
        self._faults.write(step, observed.faults)
        return observed.metrics

    async def last_spans(self) -> None:
        """Write what was traced since the last step, while everyone is still there to be asked."""
        if self._trace is not None:
            observed = await collect()
            self._trace.write(observed.spans)
            self._faults.write(self._step, observed.faults)

    def note_end(self, failure: BaseException) -> None:
        """Write what ended the run."""
        record_fault("run", failure)
        self._faults.write(self._step, drain_faults())

    def close(self) -> None:
        """Close the files."""
        self._faults.write(self._step, drain_faults())
        self._faults.close(self._step)
        if self._system is not None:
            self._system.close()
        if self._trace is not None:
            self._trace.close()
