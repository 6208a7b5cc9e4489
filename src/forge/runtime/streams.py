"""Streams: a call whose answer comes item by item, and both its ends.

In the actor, `serve_items` drives an async generator and sends each item as it is yielded. In the caller, `Inflow`
holds what has arrived until it is read. The generator may run `WINDOW` items ahead of its reader and is then held at
its `yield`; the reader acknowledges what it has taken, several items at a time. A stream of several ranks runs on each
of them: one rank speaks, the others are held and let go together with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any, Final, Self

from forge.errors import ActorFailure, CallTimeout
from forge.runtime.control import control, post
from forge.runtime.group import PendingCalls, translate
from forge.runtime.replies import FAILED, OK, Outbox, ReplyDesk
from forge.runtime.serialization import decode

_log = logging.getLogger("forge.runtime")

WINDOW: Final = 64
"""So many items may be on their way to a reader that has not taken them."""

PATIENCE_S = 30.0
"""A generator that is held so long asks its reader for a sign of life, and is closed if none comes as long again."""

_ACKNOWLEDGE_AFTER: Final = WINDOW // 4
_WITHOUT_LIMIT: Final = 1 << 60
_ITEM: Final = 2
_PROBE: Final = 3


# ---- in the actor


class ItemsTo:
    """Where the items of one stream go. Ranks that do not speak only say that they have ended, or how they failed."""

    __slots__ = ("_call_id", "_outbox", "_speaks")

    def __init__(self, outbox: Outbox, call_id: int, *, speaker: int = 0) -> None:
        self._outbox, self._call_id, self._speaks = outbox, call_id, outbox.rank == speaker

    def item(self, value: object) -> None:
        if self._speaks:
            self._outbox.send_soon(self._call_id, _ITEM, value)

    def end(self) -> None:
        self._outbox.send_soon(self._call_id, OK, None)

    def exception(self, error: BaseException) -> None:
        self._outbox.send_soon(self._call_id, FAILED, error)

    def probe(self) -> None:
        """Ask the reader for a sign of life: it grants nothing more, but it grants."""
        self._outbox.send_soon(self._call_id, _PROBE, None)


class Room:
    """How far one generator may still run ahead of its reader."""

    def __init__(self, port: ItemsTo, *, patience_s: float | None = None) -> None:
        self._port, self._patience_s = port, PATIENCE_S if patience_s is None else patience_s
        self._left = WINDOW - 1  # the first item needs no leave
        self._granted: asyncio.Future[None] | None = None

    def grant(self, num_items: int) -> None:
        self._left += num_items
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    async def take(self) -> None:
        """Wait until one more item may be sent. Raises `CallTimeout` when the reader shows no sign of life."""
        while self._left == 0:
            await self._hear_reader()
        self._left -= 1

    async def _hear_reader(self) -> None:
        granted = self._granted = asyncio.get_running_loop().create_future()
        try:
            if await self._is_done(granted):
                return
            self._port.probe()
            if not await self._is_done(granted):
                raise CallTimeout(
                    "a stream was closed: its reader sent no heartbeat",
                    value=f"{self._patience_s} s",
                    rule="the process that reads a stream answers the actor's question whether it still does",
                    repair="read it in a process that lives on and does not hold the interpreter for so long",
                )
        finally:
            self._granted = None

    async def _is_done(self, granted: asyncio.Future[None]) -> bool:
        for _ in range(2):  # in halves: after a stall of this very process a word that lies ready still counts
            await asyncio.wait({granted}, timeout=self._patience_s / 2)
        return granted.done()


async def serve_items(items: Any, port: ItemsTo, room: Room) -> None:
    """Send what the async generator `items` yields until it ends or this task is cancelled; it is closed either way."""
    task = asyncio.current_task()
    assert task is not None
    async with contextlib.aclosing(items):
        async for item in items:
            port.item(item)
            await asyncio.sleep(0)  # the item leaves before the generator goes on, which may compute for long
            if task.cancelling():
                raise asyncio.CancelledError  # the generator has swallowed it
            await room.take()
    port.end()


# ---- in the caller


class Expired(Exception):
    """The next item did not come in time."""


class End:
    """What `Inflow.next` returns when there are no more items."""


class Inflow:
    """One stream as its reader has it: what has arrived and was not read, and what is told to the actor.

    Belongs to one event loop, except `take`, which the reply desk's thread calls. Use it as a context manager: what is
    left of the stream when the block ends is cancelled, and nothing of it is kept.
    """

    def __init__(self, actor: Any, desk: ReplyDesk, *, calls: PendingCalls, num_ranks: int, speaker: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._actor, self._desk, self._calls, self._speaker = actor, desk, calls, speaker
        self._num_running = self._num_not_ended = num_ranks
        self._arrived: deque[tuple[int, int, bytes]] = deque()
        self._num_taken = 0
        self._is_posted = False
        self._more: asyncio.Future[bool] | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()

    def __enter__(self) -> Self:
        self._call_id = self._desk.enter(self)
        self._calls.add(self._lost, self._loop)
        self._lost.add_done_callback(lambda _: self._wake())
        return self

    def start(self, name: str, payload: bytes, *, is_watched: bool = False) -> None:
        """Begin the stream. With `is_watched` Monarch is asked to tell of the actor's death: nobody else does here."""
        message = (self._desk.caller, self._call_id, self._speaker, name, payload)
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
        self._desk.close(self._call_id)
        self._calls.discard(self._lost)
        if not self._lost.cancel():
            self._lost.exception()  # it was told, or nobody asks any more
        if self._num_not_ended and self._calls.failure is None:
            self._actor._forge_cancel.broadcast(self._call_id)

    # ---- on the reply desk's thread

    def take(self, rank: int, kind: int, payload: bytes) -> bool:
        """Note what has arrived; False when nobody will read it."""
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
        """The next item, or `End`.

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
                if rank == self._speaker:
                    self._grant(_WITHOUT_LIMIT)  # the others come to their end without a reader
            if self._lost.done():
                self._lost.result()
            if not await self._wait(deadline):
                raise Expired

    async def _wait(self, deadline: float | None) -> bool:
        more: asyncio.Future[bool] = self._loop.create_future()
        self._more = more
        timer = None if deadline is None else self._loop.call_at(deadline, _settle, more, False)
        try:
            return await more
        finally:
            self._more = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        self._is_posted = False  # before the look at what has arrived: what arrives from now on posts again
        if self._more is not None:
            _settle(self._more, True)

    def _acknowledge(self) -> None:
        self._num_taken += 1
        if self._num_taken >= _ACKNOWLEDGE_AFTER:
            self._grant(self._num_taken)
            self._num_taken = 0

    def _grant(self, num_items: int) -> None:
        if self._calls.failure is None:
            self._actor._forge_grant.broadcast(self._call_id, num_items)


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
