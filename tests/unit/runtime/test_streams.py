"""Streaming endpoints without processes: what may be one, how an actor runs it, and what its reader does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any

import pytest

from forge.errors import ActorFailure, CallTimeout, OptionError
from forge.runtime import streams
from forge.runtime.dispatch import Dispatcher
from forge.runtime.endpoints import endpoint, specs_of
from forge.runtime.pending_calls import PendingCalls
from forge.runtime.replies import FAILED, OK, Outbox
from forge.runtime.serialization import as_remote, decode, encode
from forge.runtime.streams import WINDOW, End, Expired, SendWindow, StreamPort, StreamReader

LIMIT_S = 600
ITEM, PROBE = streams._ITEM, streams._PROBE


def drive(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, LIMIT_S))


async def settle(turns: int = 10) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


# ---- what may stream


class Teller:
    def __init__(self) -> None:
        self.log: list[object] = []
        self.gate = asyncio.Event()

    @endpoint(retry=True)
    async def tell(self, num_items: int) -> AsyncIterator[int]:
        """Tells."""
        try:
            for number in range(num_items):
                self.log.append(number)
                yield number
        finally:
            self.log.append("closed")

    @endpoint
    async def wait(self) -> AsyncIterator[int]:
        try:
            await self.gate.wait()
            yield 1
        finally:
            self.log.append("closed")

    @endpoint
    async def write(self) -> None:
        self.log.append("written")


def test_a_method_that_yields_is_a_concurrent_stream() -> None:
    spec = specs_of(Teller)["tell"]
    assert (spec.is_stream, spec.is_async, spec.concurrent, spec.retry, spec.batch) == (True, True, True, True, None)
    assert not specs_of(Teller)["write"].is_stream
    assert Teller.__dict__["tell"].__doc__ == "Tells."


async def yields(self: Any) -> AsyncIterator[None]:
    yield


async def setup(self: Any) -> AsyncIterator[None]:
    yield


def generates(self: Any) -> Any:
    yield


def test_what_cannot_stream_is_refused() -> None:
    with pytest.raises(OptionError, match="cannot be batched") as batched:
        endpoint(batch=4)(yields)
    assert (batched.value.path, batched.value.value) == ("yields", 4)
    with pytest.raises(OptionError, match="setup cannot be a streaming endpoint") as prepared:
        endpoint(setup)
    assert (prepared.value.path, prepared.value.value) == ("setup", setup)
    with pytest.raises(OptionError, match="plain method or an async method") as plain:
        endpoint(generates)
    assert "async def" in str(plain.value.repair)
    for caught in (batched, prepared, plain):
        assert caught.value.rule
        assert caught.value.repair


# ---- in the actor


class Line:
    """Stands for the port to a reader: keeps each message that is sent through it."""

    def __init__(self) -> None:
        self.return_undeliverable = True
        self.messages: list[list[tuple[int, int, int, bytes]]] = []

    def send(self, message: Any) -> None:
        call_id, _, _, gathered = message
        assert call_id == 0
        self.messages.append(gathered)

    def told(self, call_id: int = 7) -> list[Any]:
        """What a reader of one stream would get: items, and at the end `OK` or the error."""
        mine = [
            (kind, decode(data)) for message in self.messages for number, _, kind, data in message if number == call_id
        ]
        return [{ITEM: value, OK: "end", PROBE: "probe", FAILED: value}[kind] for kind, value in mine]


class Bench:
    """A dispatcher with an actor and the line to one caller."""

    def __init__(self) -> None:
        self.teller, self.dispatcher, self.line, self.outbox = Teller(), Dispatcher(), Line(), Outbox()
        self.outbox.connect(self.line)

    def start(self, name: str, *args: Any, call_id: int = 7, sender: int = 0) -> asyncio.Task[None] | None:
        port = StreamPort(self.outbox, call_id, sender=sender)
        return self.dispatcher.start_stream(port, partial(specs_of(Teller)[name].method, self.teller, *args), call_id)

    def assert_nothing_kept(self) -> None:
        dispatcher = self.dispatcher
        assert (dispatcher._windows, dispatcher._by_call, dispatcher._tasks) == ({}, {}, set())


def test_a_generator_is_held_when_its_reader_is_a_window_behind() -> None:
    async def body() -> None:
        bench = Bench()
        task = bench.start("tell", 3 * WINDOW)
        assert task is not None
        await settle(4 * WINDOW)
        assert bench.line.told() == bench.teller.log == list(range(WINDOW))
        bench.dispatcher.grant(7, 5)
        await settle(4 * WINDOW)
        assert bench.line.told() == list(range(WINDOW + 5))
        bench.dispatcher.grant(7, 0)
        await settle()
        assert bench.teller.log == list(range(WINDOW + 5)), "a heartbeat lets nothing through"
        bench.dispatcher.grant(7, 3 * WINDOW)
        await task
        await settle()
        assert bench.line.told() == [*range(3 * WINDOW), "end"]
        assert bench.dispatcher.num_served == 1
        bench.dispatcher.grant(7, 1)  # one that comes too late
        bench.assert_nothing_kept()

    drive(body())


def test_an_item_leaves_before_the_generator_goes_on_and_streams_share_messages() -> None:
    async def body() -> None:
        bench = Bench()
        tasks = [bench.start("tell", 3, call_id=call_id) for call_id in (7, 8, 9)]
        await asyncio.gather(*(task for task in tasks if task is not None))
        await settle()
        assert [bench.line.told(call_id) for call_id in (7, 8, 9)] == [[0, 1, 2, "end"]] * 3
        assert [len(message) for message in bench.line.messages] == [3] * 4

    drive(body())


@pytest.mark.parametrize("num_turns", [0, 1, 200])
def test_a_cancelled_generator_is_closed_wherever_it_stands(num_turns: int) -> None:
    async def body() -> None:
        bench = Bench()
        for name, args in (("tell", (1000,)), ("wait", ())):
            bench.teller.log.clear()
            task = bench.start(name, *args)
            assert task is not None
            await settle(num_turns)
            bench.dispatcher.cancel(7)
            await asyncio.wait({task})
            assert task.cancelled()
            assert bench.teller.log[-1:] == (["closed"] if num_turns else [])
            bench.assert_nothing_kept()

    drive(body())


def test_a_reader_that_left_before_its_stream_arrived_is_not_served() -> None:
    async def body() -> None:
        bench = Bench()
        bench.dispatcher.cancel(7)
        assert bench.start("tell", 3) is None
        await settle()
        assert bench.teller.log == []
        bench.assert_nothing_kept()

    drive(body())


def test_a_rank_that_does_not_speak_is_held_and_says_only_that_it_has_ended() -> None:
    async def body() -> None:
        bench = Bench()
        task = bench.start("tell", WINDOW + 1, sender=1)
        assert task is not None
        await settle(2 * WINDOW)
        assert len(bench.teller.log) == WINDOW
        bench.dispatcher.grant(7, 1 << 60)
        await task
        await settle()
        assert bench.line.told() == ["end"]

    drive(body())


def test_wrong_arguments_are_the_readers_error() -> None:
    async def body() -> None:
        bench = Bench()
        bench.start("tell", 1, 2)
        await settle()
        (error,) = bench.line.told()
        assert isinstance(error, TypeError)
        assert error.remote_traceback  # type: ignore[attr-defined]
        bench.assert_nothing_kept()

    drive(body())


def test_a_reader_is_asked_for_a_sign_of_life_and_closed_without_one() -> None:
    async def body() -> None:
        bench = Bench()
        window = SendWindow(StreamPort(bench.outbox, 7), heartbeat_s=0.02)
        window.grant(1 - WINDOW)  # nothing is left
        taking = asyncio.create_task(window.take())
        for num_probes in (1, 2, 3):  # it answers
            while len(bench.line.told()) < num_probes:
                await settle(1)
            window.grant(0)
        with pytest.raises(CallTimeout, match="no heartbeat") as caught:  # and then no more
            await taking
        assert bench.line.told() == ["probe"] * 4
        assert (caught.value.value, bool(caught.value.rule), bool(caught.value.repair)) == ("0.02 s", True, True)

    drive(body())


# ---- in the caller


class Verb:
    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def broadcast(self, *args: Any) -> None:
        self.sent.append(args)


class StandInActor:
    """What a reader touches of an actor."""

    def __init__(self) -> None:
        self._forge_stream, self._forge_grant, self._forge_cancel = Verb(), Verb(), Verb()


class StandInDesk:
    """Knows the open calls, as the reply desk does, and has no channel."""

    caller = 3

    def __init__(self) -> None:
        self.calls: dict[int, Any] = {}

    def enter(self, awaiting: Any) -> int:
        self.calls[7] = awaiting
        return 7

    def close(self, call_id: int) -> None:
        del self.calls[call_id]


class Far:
    """The far end of one stream, played by the test."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.actor, self.desk, self.calls = StandInActor(), StandInDesk(), PendingCalls()
        self.inflow = StreamReader(self.actor, self.desk, calls=self.calls, num_ranks=num_ranks)  # type: ignore[arg-type]

    def say(self, kind: int, value: object = None, *, rank: int = 0) -> bool:
        return self.inflow.take(rank, kind, encode(value))

    @property
    def granted(self) -> list[tuple[Any, ...]]:
        return self.actor._forge_grant.sent

    def assert_nothing_kept(self, *, is_cancelled: bool) -> None:
        assert (self.desk.calls, len(self.calls)) == ({}, 0)
        assert self.actor._forge_cancel.sent == ([(7,)] if is_cancelled else [])


def test_a_reader_takes_items_in_order_and_acknowledges_several_at_once() -> None:
    async def body() -> None:
        far = Far()
        with far.inflow as inflow:
            inflow.start("tell", b"payload")
            assert far.actor._forge_stream.sent == [(3, 7, 0, "tell", b"payload")]
            for number in range(WINDOW):
                far.say(ITEM, number)
            far.say(OK)
            assert [await inflow.next() for _ in range(WINDOW)] == list(range(WINDOW))
            assert await inflow.next() is End
        assert far.granted == [(7, WINDOW // 4)] * 4
        far.assert_nothing_kept(is_cancelled=False)

    drive(body())


def test_a_waiting_reader_is_woken_from_the_desks_thread() -> None:
    async def body() -> None:
        far = Far()
        with far.inflow as inflow:
            for number in range(3):
                waiting = asyncio.create_task(inflow.next())
                await settle()
                assert not waiting.done()
                assert await asyncio.to_thread(far.say, ITEM, number)
                assert await waiting == number

    drive(body())


def test_leaving_tells_the_actor_unless_the_end_had_arrived() -> None:
    async def body() -> None:
        left, ended = Far(), Far()
        for far in (left, ended):
            with far.inflow as inflow:
                far.say(ITEM, 1)
                assert await inflow.next() == 1
                if far is ended:
                    far.say(OK)
        left.assert_nothing_kept(is_cancelled=True)
        ended.assert_nothing_kept(is_cancelled=False)

    drive(body())


def test_an_error_of_any_rank_ends_the_stream_after_what_came_before_it() -> None:
    async def body() -> None:
        far = Far(num_ranks=2)
        with far.inflow as inflow:
            far.say(ITEM, 1)
            far.say(FAILED, as_remote(KeyError("there")), rank=1)
            assert await inflow.next() == 1
            with pytest.raises(KeyError, match="there"):
                await inflow.next()
        far.assert_nothing_kept(is_cancelled=True)

    drive(body())


def test_ranks_that_do_not_speak_are_let_go_when_the_speaker_has_ended() -> None:
    async def body() -> None:
        far = Far(num_ranks=2)
        with far.inflow as inflow:
            far.say(OK, rank=0)
            reading = asyncio.create_task(inflow.next())
            await settle()
            ((_, num_items),) = far.granted
            assert num_items > 1 << 32
            assert not reading.done()
            far.say(OK, rank=1)
            assert await reading is End
        far.assert_nothing_kept(is_cancelled=False)

    drive(body())


def test_what_has_arrived_is_read_before_a_loss_is_raised_and_nothing_is_sent_after_it() -> None:
    async def body() -> None:
        far = Far()
        with far.inflow as inflow:
            far.say(ITEM, 1)
            far.calls.fail(ActorFailure("it was lost"))
            await settle()
            assert await inflow.next() == 1
            with pytest.raises(ActorFailure, match="it was lost"):
                await inflow.next()
        far.assert_nothing_kept(is_cancelled=False)
        waiting = Far()
        with waiting.inflow as inflow:
            reading = asyncio.create_task(inflow.next())
            await settle()
            waiting.calls.fail(ActorFailure("it was lost"))
            with pytest.raises(ActorFailure, match="it was lost"):
                await reading

    drive(body())


def test_a_deadline_ends_the_wait_and_not_what_has_arrived() -> None:
    async def body() -> None:
        far, loop = Far(), asyncio.get_running_loop()
        with far.inflow as inflow:
            far.say(ITEM, 1)
            assert await inflow.next(loop.time() - 1) == 1
            with pytest.raises(Expired):
                await inflow.next(loop.time() - 1)
        far.assert_nothing_kept(is_cancelled=True)

    drive(body())


def test_a_reader_whose_loop_is_busy_gives_a_sign_of_life_and_one_whose_loop_has_ended_does_not() -> None:
    far: Far | None = None

    async def body() -> None:
        nonlocal far
        far = Far()
        far.inflow.__enter__()
        assert far.say(PROBE)
        deadline = time.monotonic() + LIMIT_S
        while not far.granted:  # this loop gets no turn meanwhile
            assert time.monotonic() < deadline
        assert far.granted == [(7, 0)]

    asyncio.run(body())
    assert far is not None
    assert not far.say(PROBE)
    assert not far.say(ITEM, 1)
    assert far.granted == [(7, 0)]
