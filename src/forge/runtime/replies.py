"""The reply channel of a process, on which the answers to all its calls arrive.

Monarch opens a port for every call and never frees about a kilobyte of it, which is a gigabyte after a million
calls. One lasting port and a thread that reads it cost nothing in the long run and are faster. A call is a number;
the answering process sends that number back with the outcome.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import os
import random
import threading
from typing import Any, Final, Protocol

from forge.runtime.backend import Channel
from forge.runtime.control import post
from forge.runtime.rank_main import RANK
from forge.runtime.serialization import decode, encode

_log = logging.getLogger("forge.runtime")

_RANK = int(os.environ.get(RANK, "0"))  # read once, before the user's code can change it
Answer = tuple[int, bytes]
"""OK or FAILED, and the value or the exception, encoded."""

FAILED: Final = 0
OK: Final = 1
_GATHERED: Final = 0
"""In the place of a call's number: the message is a list of messages."""

_STOP: Final = -1
"""In the place of a call's number: nothing more is read."""

_STOP_LIMIT_S: Final = 5.0


class Awaiting(Protocol):
    """What a channel keeps of an open call."""

    def take(self, rank: int, kind: int, payload: Any, /) -> bool:
        """Note what a rank has sent, on the channel's thread; False when the caller no longer waits."""


class _Waiting:
    """A call that waits for the answers of one or several ranks."""

    __slots__ = ("answers", "future", "loop", "num_ranks")

    def __init__(self, loop: asyncio.AbstractEventLoop, num_ranks: int) -> None:
        self.loop, self.num_ranks = loop, num_ranks
        self.future: asyncio.Future[list[Answer]] = loop.create_future()
        self.answers: dict[int, Answer] = {}

    def take(self, rank: int, kind: int, payload: bytes) -> bool:
        self.answers[rank] = (kind, payload)
        return len(self.answers) < self.num_ranks or post(self.loop, _resolve, self)


class _Gathered:
    """Takes apart what was sent together."""

    __slots__ = ("_calls",)

    def __init__(self, calls: dict[int, Awaiting]) -> None:
        self._calls = calls

    def take(self, rank: int, kind: int, payload: list[tuple[int, int, int, bytes]]) -> bool:
        for call_id, sender, its_kind, its_payload in payload:
            awaiting = self._calls.get(call_id)
            if awaiting is not None and not awaiting.take(sender, its_kind, its_payload):
                self._calls.pop(call_id, None)
        return True


class ReplyChannel:
    """Where this process's answers arrive. Calls may be opened from any event loop."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.caller = random.getrandbits(60)
        self.port, self._receiver = Channel.open()
        self._ids = itertools.count(random.getrandbits(60) << 16)
        self._calls: dict[int, Awaiting] = {}
        self._calls[_GATHERED] = _Gathered(self._calls)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._read,), name="forge-replies", daemon=True)
        self._thread.start()

    def open(self, num_ranks: int = 1) -> tuple[int, asyncio.Future[list[Answer]]]:
        """Open a call: its number, and what will hold the answers of its ranks, in rank order."""
        call_id = next(self._ids)
        waiting = _Waiting(asyncio.get_running_loop(), num_ranks)
        self._calls[call_id] = waiting
        return call_id, waiting.future

    def enter(self, awaiting: Awaiting) -> int:
        """Open a call whose answers `awaiting` takes, and return its number."""
        call_id = next(self._ids)
        self._calls[call_id] = awaiting
        return call_id

    def close(self, call_id: int) -> None:
        """Forget a call; answers that come later are dropped."""
        self._calls.pop(call_id, None)

    def stop(self) -> None:
        """End the thread that reads, which waits in Monarch's code. A thread that returned from there while Python ends
        would abort the process."""
        self.port.send((_STOP, _RANK, OK, b""))
        self._thread.join(_STOP_LIMIT_S)

    def _read(self) -> None:
        while True:
            try:
                call_id, rank, kind, payload = self._receiver.recv().get()
            except Exception as error:  # noqa: BLE001 - the channel is gone: the process or its client is ending
                _log.debug("the reply channel closed: %s", error)
                return
            if call_id == _STOP:
                return
            awaiting = self._calls.get(call_id)
            if awaiting is not None and not awaiting.take(rank, kind, payload):
                self.close(call_id)


def _resolve(waiting: _Waiting) -> None:
    if not waiting.future.done():
        waiting.future.set_result([answer for _, answer in sorted(waiting.answers.items())])


def read_answers(answers: list[Answer]) -> list[Any]:
    """Return the values, or the first exception, raised."""
    values = []
    for kind, payload in answers:
        value = decode(payload)
        if kind == FAILED:
            raise value
        values.append(value)
    return values


_channel: ReplyChannel | None = None
_guard = threading.Lock()


def reply_channel() -> ReplyChannel:
    """Return this process's channel, opened on first use."""
    global _channel
    channel = _channel
    if channel is None or channel.pid != os.getpid():
        with _guard:
            if _channel is None or _channel.pid != os.getpid():
                _channel = ReplyChannel()
            channel = _channel
    return channel


def stop_replies() -> None:
    """Read no more answers, at the end of the process."""
    if _channel is not None and _channel.pid == os.getpid():
        _channel.stop()


class ReplyPort:
    """In the answering process: where the outcome of one call goes. Has the two methods of a Monarch port."""

    __slots__ = ("_call_id", "_outbox")

    def __init__(self, outbox: Outbox, call_id: int) -> None:
        self._outbox, self._call_id = outbox, call_id

    def send(self, value: object) -> None:
        self._outbox.send(self._call_id, OK, value)

    def exception(self, error: BaseException) -> None:
        self._outbox.send(self._call_id, FAILED, error)


class Outbox:
    """In the answering process: the way to one caller's channel. What is ready before the way is known waits here."""

    def __init__(self) -> None:
        self.rank = _RANK
        self._port: Any = None
        self._unsent: list[tuple[int, int, int, Any]] = []
        self._gathered: list[tuple[int, int, int, bytes]] = []

    def connect(self, port: Any) -> None:
        port.return_undeliverable = False
        self._port = port
        for message in self._unsent:
            port.send(message)
        self._unsent.clear()

    def send(self, call_id: int, kind: int, value: object) -> None:
        message = (call_id, self.rank, kind, encode(value))
        if self._port is None:
            self._unsent.append(message)
        else:
            self._port.send(message)

    def send_soon(self, call_id: int, kind: int, value: object) -> None:
        """As `send`, at the event loop's next turn and together with what else is sent so until then."""
        self._gathered.append((call_id, self.rank, kind, encode(value)))
        if len(self._gathered) == 1:
            asyncio.get_running_loop().call_soon(self._send_gathered)

    def _send_gathered(self) -> None:
        message = (_GATHERED, self.rank, OK, self._gathered)
        self._gathered = []
        if self._port is None:
            self._unsent.append(message)
        else:
            self._port.send(message)
