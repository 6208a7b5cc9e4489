"""Prints without waiting for a console that is not read: after Ctrl-S, in a pager, or where its program is stopped."""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

MAX_WAITING: Final = 1000
PATIENCE_S: Final = 0.25
_DRAIN_S: Final = 2.0

Call = Callable[[], object]


class _Pending:
    """A call that is to be made, and what became of it."""

    __slots__ = ("call", "error", "is_over")

    def __init__(self, call: Call) -> None:
        self.call, self.is_over = call, threading.Event()
        self.error: Exception | None = None


class Printer:
    """Makes calls that print in the order in which they come, on a thread of its own, and waits for each a moment.

    Where the console takes nothing, callers stop waiting: what they print appears once the console is read again, the
    newest `MAX_WAITING` calls of it. Any thread may use it, and a forked child has a thread of its own.
    """

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._waiting: deque[_Pending] = deque(maxlen=MAX_WAITING)
        self._changed = threading.Condition()
        self._is_late = self._is_busy = False
        self._thread: threading.Thread | None = None

    def make(self, call: Call) -> None:
        """Make a call, and raise what it raises. One that comes while the console is not read is made later, and what
        it raises then is dropped."""
        if self._pid != os.getpid():
            self._reset()
        if threading.current_thread() is self._thread or sys.is_finalizing():
            call()
            return
        pending = _Pending(call)
        with self._changed:
            self._waiting.append(pending)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="forge-print", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            if self._is_late:
                return
        if not pending.is_over.wait(self._patience_s):
            with self._changed:
                self._is_late = not pending.is_over.is_set()
        if pending.error is not None:
            raise pending.error

    def drain(self, timeout_s: float = _DRAIN_S) -> bool:
        """Wait until everything is printed; return False where the console does not take it in that time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_busy, timeout_s)

    def _run(self) -> None:
        changed = self._changed
        while True:
            with changed:
                self._is_busy = False
                if not self._waiting:
                    self._is_late = False
                    changed.notify_all()
                changed.wait_for(lambda: self._waiting)
                pending, self._is_busy = self._waiting.popleft(), True
            try:
                pending.call()
            except Exception as error:  # noqa: BLE001 - raised where the call was asked for
                pending.error = error
            pending.is_over.set()


_printer = Printer()


def print_patiently(call: Call, *streams: Any) -> None:
    """Make a call that prints on streams. It waits no longer than a moment where one of them may not be read."""
    if any(map(_may_wait, streams)):
        _printer.make(call)
    else:
        call()


def drain() -> None:
    """Wait a little until everything is printed."""
    if _printer._pid == os.getpid():  # a forked child prints nothing of its parent's
        _printer.drain()


atexit.register(drain)


def _may_wait(stream: Any) -> bool:
    """Whether this is the program's own stream to a terminal, a pipe or a socket. Others, such as a notebook's, are
    written by the thread that prints: it says to which cell a line belongs."""
    stream = getattr(stream, "rich_proxied_file", stream)
    if stream is None or not any(stream is own for own in (sys.__stdout__, sys.__stderr__)):
        return False
    with contextlib.suppress(OSError, ValueError):
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    return False


def printable(line: str, stream: Any) -> str:
    """Return a line as a stream can print it: what its encoding does not have is written as an escape."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return line.encode(encoding, "backslashreplace").decode(encoding, "replace")
