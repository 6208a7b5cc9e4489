"""Streams: calls whose answer arrives item by item, and both their ends.

In the actor, `serve_items` drives an async generator and sends each item as it is yielded. In the caller,
`StreamReader` holds what has arrived until it is read. The generator may run `WINDOW` items ahead of its reader and
then waits at its `yield`; the reader acknowledges what it has taken, several items at a time. A stream of several ranks
runs on each of them: one rank sends, the others wait and continue together with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any, Final, Self

from forge.errors import ActorFailure, CallTimeout
from forge.runtime.control import control, post
from forge.runtime.group import translate
from forge.runtime.pending_calls import PendingCalls
from forge.runtime.replies import FAILED, OK, Outbox, ReplyChannel
from forge.runtime.serialization import decode

_log = logging.getLogger("forge.runtime")

WINDOW: Final = 64
"""How many items may be on their way to a reader that has not taken them."""

HEARTBEAT_S = 30.0
"""A generator that waits so long asks its reader for a heartbeat, and is closed if none comes for as long again."""

_ACKNOWLEDGE_AFTER: Final = WINDOW // 4
_WITHOUT_LIMIT: Final = 1 << 60
_ITEM: Final = 2
_PROBE: Final = 3


# ---- in the actor


class StreamPort:
    """The actor's end of one stream. Ranks other than the sender report only how they ended."""

    __slots__ = ("_call_id", "_is_sender", "_outbox")

    def __init__(self, outbox: Outbox, call_id: int, *, sender: int = 0) -> None:
        self._outbox, self._call_id, self._is_sender = outbox, call_id, outbox.rank == sender

    def item(self, value: object) -> None:
        if self._is_sender:
            self._outbox.send_soon(self._call_id, _ITEM, value)

    def end(self) -> None:
        self._outbox.send_soon(self._call_id, OK, None)

    def exception(self, error: BaseException) -> None:
        self._outbox.send_soon(self._call_id, FAILED, error)

    def probe(self) -> None:
        """Ask the reader for a heartbeat: a grant, of no further items."""
        self._outbox.send_soon(self._call_id, _PROBE, None)


class SendWindow:
    """How far one generator may still run ahead of its reader."""

    def __init__(self, port: StreamPort, *, heartbeat_s: float | None = None) -> None:
        self._port, self._heartbeat_s = port, HEARTBEAT_S if heartbeat_s is None else heartbeat_s
        self._left = WINDOW - 1  # the first item needs no grant
        self._granted: asyncio.Future[None] | None = None

    def grant(self, num_items: int) -> None:
        self._left += num_items
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    async def take(self) -> None:
        """Wait until one more item may be sent. Raise `CallTimeout` when the reader sends no heartbeat."""
        while self._left == 0:
            await self._wait_for_grant()
        self._left -= 1

    async def _wait_for_grant(self) -> None:
        granted = self._granted = asyncio.get_running_loop().create_future()
        try:
            if await self._is_done(granted):
                return
            self._port.probe()
            if not await self._is_done(granted):
                raise CallTimeout(
                    "a stream was closed: its reader sent no heartbeat",
                    value=f"{self._heartbeat_s} s",
                    rule="the process that reads a stream must answer heartbeats",
                    repair="read it in a process that keeps running and does not block the interpreter for so long",
                )
        finally:
            self._granted = None

    async def _is_done(self, granted: asyncio.Future[None]) -> bool:
        for _ in range(2):  # in halves: after a stall of this very process a message that lies ready still counts
            await asyncio.wait({granted}, timeout=self._heartbeat_s / 2)
        return granted.done()


async def serve_items(items: Any, port: StreamPort, window: SendWindow) -> None:
    """Send what the async generator `items` yields until it ends or this task is cancelled; it is closed either way."""
    task = asyncio.current_task()
    assert task is not None
    async with contextlib.aclosing(items):
        async for item in items:
            port.item(item)
            await asyncio.sleep(0)  # the item is sent before the generator continues, which may compute for long
            if task.cancelling():
                raise asyncio.CancelledError  # the generator has swallowed it
            await window.take()
    port.end()


# ---- in the caller


class Expired(Exception):
    """The next item did not come in time."""


class End:
    """What `StreamReader.next` returns when there are no more items."""


class StreamReader:
    """The caller's end of one stream: what has arrived and was not read, and the acknowledgements to the actor.

    Belongs to one event loop, except `take`, which the reply channel's thread calls. Use it as a context manager: what
    is left of the stream when the block ends is cancelled.
    """

    def __init__(
        self, actor: Any, channel: ReplyChannel, *, calls: PendingCalls, num_ranks: int, sender: int = 0
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._actor, self._channel, self._calls, self._sender = actor, channel, calls, sender
        self._num_running = self._num_not_ended = num_ranks
        self._arrived: deque[tuple[int, int, bytes]] = deque()
        self._num_taken = 0
        self._is_posted = False
        self._more: asyncio.Future[bool] | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()

    def __enter__(self) -> Self:
        self._call_id = self._channel.enter(self)
        self._calls.add(self._lost, self._loop)
        self._lost.add_done_callback(lambda _: self._wake())
        return self

    def start(self, name: str, payload: bytes, *, is_watched: bool = False) -> None:
        """Start the stream. With `is_watched` Monarch reports the actor's death: nothing else does here."""
        message = (self._channel.caller, self._call_id, self._sender, name, payload)
        if not is_watched:
            self._actor._forge_stream.broadcast(*message)
            return
        watch: asyncio.Future[Any] = self._actor._forge_stream.call(*message).as_asyncio()
        watch.add_done_callback(self._note_death)

    def _note_death(self, watch: asyncio.Future[Any]) -> None:
        if watch.cancelled() or (error := watch.exception()) is None:
            return
        failure = translate(error, self._actor.__name__)
        if not isinstance(failure, ActorFailure):
            failure = ActorFailure(f"{self._actor.__name__} was lost: {error}", path=self._actor.__name__)
        self._calls.fail(failure)

    def __exit__(self, *_: object) -> None:
        self._channel.close(self._call_id)
        self._calls.discard(self._lost)
        if not self._lost.cancel():
            self._lost.exception()  # it was raised, or no longer matters
        if self._num_not_ended and self._calls.failure is None:
            self._actor._forge_cancel.broadcast(self._call_id)

    # ---- on the reply channel's thread

    def take(self, rank: int, kind: int, payload: bytes) -> bool:
        """Take what has arrived; False when it will not be read."""
        if kind == _PROBE:  # not on the reader's own loop, which may be busy and still wants its items
            return not self._loop.is_closed() and post(control().loop, self._grant, 0)
        if kind != _ITEM:
            self._num_not_ended -= 1
        self._arrived.append((rank, kind, payload))
        if self._is_posted:
            return True
        self._is_posted = True
        return post(self._loop, self._wake)

    # ---- on the reader's loop

    async def next(self, deadline: float | None = None) -> Any:
        """Return the next item, or `End`.

        Raises what the generator raised, `ActorFailure` where its process is lost and nothing more has arrived, and
        `Expired` when the loop's clock has passed the deadline.
        """
        while True:
            while self._arrived:
                rank, kind, payload = self._arrived.popleft()
                if kind == _ITEM:
                    self._acknowledge()
                    return decode(payload)
                if kind == FAILED:
                    raise decode(payload)
                self._num_running -= 1
                if self._num_running == 0:
                    return End
                if rank == self._sender:
                    self._grant(_WITHOUT_LIMIT)  # the others finish without a reader
            if self._lost.done():
                self._lost.result()
            if not await self._wait(deadline):
                raise Expired

    async def _wait(self, deadline: float | None) -> bool:
        more: asyncio.Future[bool] = self._loop.create_future()
        self._more = more
        timer = None if deadline is None else self._loop.call_at(deadline, _resolve, more, False)
        try:
            return await more
        finally:
            self._more = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        self._is_posted = False  # before the look at what has arrived: what arrives from now on posts again
        if self._more is not None:
            _resolve(self._more, True)

    def _acknowledge(self) -> None:
        self._num_taken += 1
        if self._num_taken >= _ACKNOWLEDGE_AFTER:
            self._grant(self._num_taken)
            self._num_taken = 0

    def _grant(self, num_items: int) -> None:
        if self._calls.failure is None:
            self._actor._forge_grant.broadcast(self._call_id, num_items)


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
