"""`system.jsonl`: what every process of a run uses, what replicas serve, and what waits in queues, over time.

It has the form of a metrics file, and `read_jsonl` reads it:

    {"step": 3, "time": 1767225600.0, "values": {"cpu/trainer": 3.9, "memory_gib/trainer": 1.2, "buffer/ready": 2.0}}

Its size is bounded. When the file has reached its bound, it is replaced by one of half the size: see `thin_file`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from forge.errors import DataError
from forge.observe.clock import monotonic_s
from forge.observe.gauges import add_up
from forge.observe.jsonl import JsonlSink
from forge.observe.process_status import ProcessStatus
from forge.observe.sink import Value
from forge.observe.thinning import thin_file
from forge.observe.tracing import Process
from forge.observe.usage import DeviceUse

FILE_NAME: Final = "system.jsonl"
MAX_BYTES: Final = 32 << 20
_GIB: Final = 2**30
_log = logging.getLogger("forge.observe")


class SystemLog:
    """Writes how the processes of a run are doing, after steps, and at most once in `interval_s`.

    What cannot be written is logged once, and does not end the run. The file, and that of what resumes have discarded,
    has `max_bytes` and a line at most, if `thin` is called whenever `is_full`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        interval_s: float,
        resume_step: int | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._path, self._interval_s, self._max_bytes = Path(path), interval_s, max_bytes
        self._lock = threading.RLock()
        """Held while the file is written or replaced."""
        self._written_at: float | None = None
        self._spent: dict[Process, tuple[float, float]] = {}
        self._hosts: set[str] = set()
        self._file: JsonlSink | None = None
        try:
            self._file = JsonlSink(path, resume_step=resume_step)
            discarded = self._path.with_name(f"{self._path.stem}.discarded{self._path.suffix}")
            if discarded.exists() and discarded.stat().st_size > max_bytes:
                thin_file(discarded, max_bytes)
        except (OSError, DataError) as error:
            self._give_up(error)

    @property
    def is_due(self) -> bool:
        """Whether it is time to ask the processes again."""
        is_time = self._written_at is None or monotonic_s() - self._written_at >= self._interval_s
        return self._file is not None and is_time

    def write(self, step: int, processes: Iterable[ProcessStatus]) -> None:
        """Write how processes are after so many steps. Those that were not asked what they use are left out."""
        values: dict[str, float] = {}
        for status in processes:
            self._add(values, status)
        rounded: dict[str, Value] = {name: round(value, 4) for name, value in sorted(values.items())}
        with self._lock:
            if self._file is None or not values:
                return
            self._written_at = monotonic_s()
            try:
                self._file.write(step, rounded)
            except OSError as error:
                self._give_up(error)

    @property
    def is_full(self) -> bool:
        """Whether the file has reached its bound."""
        with self._lock:
            return self._file is not None and self._file.size > self._max_bytes

    def thin(self) -> None:
        """Make a file that is full smaller. It may take a second, and be called in a thread: `close` waits for it."""
        with self._lock:
            if self._file is None or not self.is_full:
                return
            try:
                thin_file(self._path, self._max_bytes)
                self._file.reopen()
            except OSError as error:
                self._give_up(error)

    def _add(self, values: dict[str, float], status: ProcessStatus) -> None:
        add_up(values, status.gauges)
        use, process = status.use, status.process
        if use is None:
            return
        found = {"memory_gib": use.memory / _GIB, "shared_gib": use.shared / _GIB}
        if use.gpu_memory is not None:
            found["gpu_memory_gib"] = use.gpu_memory / _GIB
        before, self._spent[process] = self._spent.get(process), (status.time, use.cpu_s)
        if before is not None and status.time > before[0]:
            found["cpu"] = max(0.0, use.cpu_s - before[1]) / (status.time - before[0])
        add_up(values, {f"{key}/{process.name}": value for key, value in found.items()})
        self._hosts.add(process.host)
        for device in use.devices:
            values |= self._of_device(process.host, device)

    def _of_device(self, host: str, device: DeviceUse) -> dict[str, float]:
        """Return a GPU's values. Several processes may compute with it; each says the same."""
        name = device.name if len(self._hosts) == 1 else f"{host}:{device.name}"
        busy = {} if device.busy is None else {f"gpu/{name}": device.busy}
        return {f"gpu_used_gib/{name}": device.used / _GIB, **busy}

    def _give_up(self, error: Exception) -> None:
        _log.warning("writing %s failed; the run continues without it: %s", self._path, error)
        self.close()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                with contextlib.suppress(OSError):  # some file systems report only now that they are full
                    self._file.close()
                self._file = None
