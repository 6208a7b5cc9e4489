"""Reports of a process to the root of its run: log records for its console, and the phases of its start.

They are sent through the rendezvous server, in order, and cost their sender next to nothing: what is not sent at once
waits in the connection. A root that has gone gets nothing, and no error is raised for that.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import Any, Final

from forge.errors import ForgeError
from forge.observe.logs.records import to_fields

REGISTRY: Final = "reports"
_BACKLOG: Final = 1000
_BURST, _RECORDS_PER_S = 200, 100.0


class Reports:
    """The way to the root. Any thread may send. Only the process that made it does: a forked child has its own log."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: deque[tuple[str, Any]] = deque(maxlen=_BACKLOG)
        self._connection: Any = None
        self._is_opening = self._is_lost = False

    def send(self, kind: str, body: Any) -> None:
        """Send one report soon."""
        if self.pid != os.getpid():
            return
        with self._lock:
            if self._connection is None:
                self._waiting.append((kind, body))
                if not self._is_opening and not self._is_lost:
                    self._is_opening = True
                    threading.Thread(target=self._open, name="forge-reports", daemon=True).start()
                return
            self._notify(kind, body)

    def _open(self) -> None:
        from forge.runtime import rendezvous

        try:
            connection = rendezvous.connect(REGISTRY)
        except (ForgeError, OSError):
            connection = None  # the run has ended
        with self._lock:
            self._connection, self._is_opening, self._is_lost = connection, False, connection is None
            while self._waiting and not self._is_lost:
                self._notify(*self._waiting.popleft())
            self._waiting.clear()

    def _notify(self, kind: str, body: Any) -> None:
        try:
            self._connection.notify(kind, body)
        except ForgeError:  # the run has ended
            self._connection, self._is_lost = None, True


class RecordSender(logging.Handler):
    """Sends records to the root's console: so many at once, and then so many a second."""

    def __init__(self, reports: Reports, *, process: str) -> None:
        super().__init__()
        self._reports, self._process = reports, process
        self._allowed, self._at = float(_BURST), time.monotonic()
        self._num_hidden = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            now = time.monotonic()
            self._allowed = min(float(_BURST), self._allowed + (now - self._at) * _RECORDS_PER_S)
            self._at = now
            if self._allowed < 1:
                self._num_hidden += 1
                return
            self._allowed -= 1
            fields = to_fields(record)
            if self._num_hidden:
                fields["message"] += f" ({self._num_hidden} records before this are in the log file only)"
                self._num_hidden = 0
            self._reports.send("record", (self._process, fields))
        except Exception:  # noqa: BLE001 - as every handler of `logging` does
            self.handleError(record)


_reports: Reports | None = None


def reports() -> Reports:
    """Return this process's way to the root."""
    global _reports
    if _reports is None or _reports.pid != os.getpid():
        _reports = Reports()
    return _reports
