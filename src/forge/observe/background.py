"""Calls that are made in order on a thread of their own, for what may wait for a server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Final

MAX_WAITING: Final = 1000
CLOSE_S: Final = 60.0

Call = Callable[[], Any]


class Background:
    """Makes calls in the order in which they were submitted.

    What a call raises is raised by the next `submit`, or by `close`. So is a server that takes no more for so long that
    `MAX_WAITING` calls wait: a run is not held up, and its memory does not grow.
    """

    def __init__(self, name: str, *, close_s: float = CLOSE_S) -> None:
        self._calls: queue.Queue[Call | None] = queue.Queue(MAX_WAITING)
        self._failure: Exception | None = None
        self._close_s = close_s
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Make a call soon."""
        self._check()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"{MAX_WAITING} calls wait for the server, which takes no more") from None

    def close(self) -> None:
        """Make all calls that wait, for a while, and end the thread. May be called twice."""
        if self._thread.is_alive():
            try:
                self._calls.put(None, timeout=self._close_s)
            except queue.Full:
                raise TimeoutError(f"the server took nothing for {self._close_s:g} s; the rest is lost") from None
            self._thread.join(self._close_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the server did not take the rest within {self._close_s:g} s")
        self._check()

    def _check(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - raised where the next call is submitted
                self._failure = self._failure or error
