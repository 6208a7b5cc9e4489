"""The reply desk: one channel for a process, on which the answers to all its calls arrive.

Monarch opens a port for every call and keeps about a kilobyte of it for ever, which is a gigabyte after a million
calls. One lasting port and a thread that reads it cost nothing in the long run and are faster. A call is a number;
whoever answers sends that number back with the outcome.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import os
import random
import threading
from typing import Any

from forge.runtime.backend import Channel
from forge.runtime.control import post
from forge.runtime.rank_main import RANK
from forge.runtime.wire import decode, encode

_log = logging.getLogger("forge.runtime")

_RANK = int(os.environ.get(RANK, "0"))  # read once, before the user's code can change it
Answer = tuple[bool, bytes]
"""Whether the call succeeded, and the value or the exception, encoded."""


class _Waiting:
    """A call that waits for the answers of one or several ranks."""

    __slots__ = ("answers", "future", "loop", "num_ranks")

    def __init__(self, loop: asyncio.AbstractEventLoop, num_ranks: int) -> None:
        self.loop, self.num_ranks = loop, num_ranks
        self.future: asyncio.Future[list[Answer]] = loop.create_future()
        self.answers: dict[int, Answer] = {}


class ReplyDesk:
    """Where this process's answers arrive. Calls may be opened from any event loop."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.caller = random.getrandbits(60)
        self.port, self._receiver = Channel.open()
        self._ids = itertools.count(random.getrandbits(60) << 16)
        self._calls: dict[int, _Waiting] = {}
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._read,), name="forge-replies", daemon=True).start()

    def open(self, num_ranks: int = 1) -> tuple[int, asyncio.Future[list[Answer]]]:
        """A new call: its number, and what will hold the answers of its ranks, in rank order."""
        call_id = next(self._ids)
        waiting = _Waiting(asyncio.get_running_loop(), num_ranks)
        self._calls[call_id] = waiting
        return call_id, waiting.future

    def close(self, call_id: int) -> None:
        """Forget a call; answers that come later are dropped."""
        self._calls.pop(call_id, None)

    def _read(self) -> None:
        while True:
            try:
                call_id, rank, is_ok, payload = self._receiver.recv().get()
            except Exception as error:  # noqa: BLE001 - the channel is gone: the process or its client is ending
                _log.debug("the reply desk closed: %s", error)
                return
            waiting = self._calls.get(call_id)
            if waiting is None:
                continue
            waiting.answers[rank] = (is_ok, payload)
            if len(waiting.answers) == waiting.num_ranks and not post(waiting.loop, _settle, waiting):
                self.close(call_id)


def _settle(waiting: _Waiting) -> None:
    if not waiting.future.done():
        waiting.future.set_result([answer for _, answer in sorted(waiting.answers.items())])


def read_answers(answers: list[Answer]) -> list[Any]:
    """The values, or the first exception, raised."""
    values = []
    for is_ok, payload in answers:
        value = decode(payload)
        if not is_ok:
            raise value
        values.append(value)
    return values


_desk: ReplyDesk | None = None
_guard = threading.Lock()


def reply_desk() -> ReplyDesk:
    """This process's desk, opened on first use."""
    global _desk
    desk = _desk
    if desk is None or desk.pid != os.getpid():
        with _guard:
            if _desk is None or _desk.pid != os.getpid():
                _desk = ReplyDesk()
            desk = _desk
    return desk


class ReplyTo:
    """In the answering process: where the outcome of one call goes. Has the two methods of a Monarch port."""

    __slots__ = ("_call_id", "_outbox")

    def __init__(self, outbox: Outbox, call_id: int) -> None:
        self._outbox, self._call_id = outbox, call_id

    def send(self, value: object) -> None:
        self._outbox.send(self._call_id, True, value)

    def exception(self, error: BaseException) -> None:
        self._outbox.send(self._call_id, False, error)


class Outbox:
    """In the answering process: the way to one caller's desk. What is ready before the way is known waits here."""

    def __init__(self) -> None:
        self._rank = _RANK
        self._port: Any = None
        self._unsent: list[tuple[int, int, bool, bytes]] = []

    def connect(self, port: Any) -> None:
        port.return_undeliverable = False
        self._port = port
        for message in self._unsent:
            port.send(message)
        self._unsent.clear()

    def send(self, call_id: int, is_ok: bool, value: object) -> None:
        message = (call_id, self._rank, is_ok, encode(value))
        if self._port is None:
            self._unsent.append(message)
        else:
            self._port.send(message)
